//! How calls in tags write the value of an argument: as plain text or as JSON. The tool's schema decides.
//!
//! Qwen3-Coder's template writes texts as they are and all other values as JSON, so its models do the same. A text in quotes is a
//! text that contains quotes.

use std::collections::HashMap;

use serde_json::Value;

/// Longest name of a tool or an argument, and most white space before the name of a tool, in bytes.
pub(super) const LONGEST_NAME: usize = 512;

/// Most schemas and values that are read for one argument. An argument with more may have values of any type.
const MOST: usize = 256;

const NULL: u8 = 1;
const BOOLEAN: u8 = 2;
const NUMBER: u8 = 4;
const STRING: u8 = 8;
const ARRAY: u8 = 16;
const OBJECT: u8 = 32;
const ANY: u8 = 63;

/// Types that a schema allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Types(u8);

/// How the value of an argument is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// As plain text.
    Text,
    /// As JSON where the value is JSON of one of these types other than a string, else as plain text.
    Mixed(Types),
    /// As JSON of these types.
    Json(Types),
}

fn type_of(value: &Value) -> u8 {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(_) => NUMBER,
        Value::String(_) => STRING,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
    }
}

fn type_called(name: &str) -> u8 {
    match name {
        "null" => NULL,
        "boolean" => BOOLEAN,
        "number" | "integer" => NUMBER,
        "string" => STRING,
        "array" => ARRAY,
        "object" => OBJECT,
        _ => ANY,
    }
}

/// The schema that this schema refers to, if it refers to one.
fn target<'a>(schema: &'a Value, parameters: &'a Value) -> Option<&'a Value> {
    let pointer = schema.get("$ref")?.as_str()?.strip_prefix('#')?;
    parameters.pointer(pointer)
}

/// The schema at the end of the references, or the schema itself.
pub(super) fn resolved<'a>(mut schema: &'a Value, parameters: &'a Value) -> &'a Value {
    for _ in 0..8 {
        match target(schema, parameters) {
            Some(next) => schema = next,
            None => break,
        }
    }
    schema
}

fn branches<'a>(schema: &'a Value, keys: &'static [&'static str]) -> impl Iterator<Item = &'a Value> {
    keys.iter().filter_map(|key| schema.get(key)?.as_array()).flatten()
}

/// Adds the types that a schema allows, none where it names none. `left` limits how many more schemas are read.
fn add_types(types: &mut u8, schema: &Value, parameters: &Value, left: &mut usize) {
    if *left == 0 || *types == ANY {
        *types = ANY;
        return;
    }
    *left -= 1;
    if let Some(target) = target(schema, parameters) {
        return add_types(types, target, parameters, left);
    }
    match schema.get("type") {
        Some(Value::String(name)) => *types |= type_called(name),
        Some(Value::Array(names)) => {
            names.iter().take(MOST).filter_map(Value::as_str).for_each(|name| *types |= type_called(name));
        }
        _ => {
            let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
            for value in values.chain(schema.get("const")) {
                if *left == 0 {
                    break;
                }
                *left -= 1;
                *types |= type_of(value);
            }
        }
    }
    for branch in branches(schema, &["anyOf", "oneOf", "allOf"]) {
        add_types(types, branch, parameters, left);
    }
    if *left == 0 {
        *types = ANY;
    }
}

/// How a call writes the value of an argument, for a tool with these parameters. Arguments that the parameters do not list are
/// text.
pub(super) fn kind(parameters: &Value, name: &str) -> Kind {
    let Some(schema) = parameters.get("properties").and_then(|all| all.get(name)) else { return Kind::Text };
    let (mut types, mut left) = (0, MOST);
    add_types(&mut types, schema, parameters, &mut left);
    match types {
        0 => Kind::Mixed(Types(ANY)),
        STRING => Kind::Text,
        types if types & STRING != 0 => Kind::Mixed(Types(types)),
        types => Kind::Json(Types(types)),
    }
}

/// The kinds of all arguments that these parameters list, but for plain texts.
pub(super) fn kinds(parameters: &Value) -> HashMap<String, Kind> {
    let listed = parameters.get("properties").and_then(Value::as_object).into_iter().flatten();
    let kinds = listed.map(|(name, _)| (name.clone(), kind(parameters, name)));
    kinds.filter(|(_, kind)| *kind != Kind::Text).collect()
}

/// Turns a whole value that may be JSON into JSON.
pub(super) fn json(text: &str, types: Types) -> String {
    let trimmed = text.trim();
    let python = match trimmed {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    match serde_json::from_str::<Value>(python) {
        Ok(value) if types.0 & type_of(&value) & !STRING != 0 => python.to_owned(),
        _ if types.0 & STRING != 0 => Value::from(text).to_string(),
        _ => Value::from(trimmed).to_string(),
    }
}

/// The values that a schema allows, where it lists them.
pub(super) fn values(schema: &Value, parameters: &Value) -> Option<Vec<Value>> {
    fn list(schema: &Value, parameters: &Value, left: &mut usize, all: &mut Vec<Value>) -> Option<()> {
        *left = left.checked_sub(1)?;
        if let Some(target) = target(schema, parameters) {
            return list(target, parameters, left, all);
        }
        let given = schema.get("enum").and_then(Value::as_array);
        if given.is_some() || schema.get("const").is_some() {
            let given = given.into_iter().flatten().chain(schema.get("const"));
            for value in given {
                *left = left.checked_sub(1)?;
                all.push(value.clone());
            }
            return Some(());
        }
        if schema.get("type").is_some_and(|name| name == "null") {
            all.push(Value::Null);
            return Some(());
        }
        let mut some = false;
        for branch in branches(schema, &["anyOf", "oneOf"]) {
            some = true;
            list(branch, parameters, left, all)?;
        }
        some.then_some(())
    }
    let (mut all, mut left) = (Vec::new(), MOST);
    list(schema, parameters, &mut left, &mut all)?;
    Some(all).filter(|all| !all.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn types_follow_from_the_schema() {
        let parameters = json!({"properties": {
            "text": {"type": "string"}, "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "any": {},
            "count": {"$ref": "#/$defs/count"}, "color": {"$ref": "#/$defs/color"}, "words": {"enum": ["a", 1]}, "loop": {"$ref": "#/properties/loop"}
        }, "$defs": {"count": {"type": ["integer", "null"]}, "color": {"enum": ["red", "green"]}}});
        let of = |name: &str| kind(&parameters, name);
        assert_eq!([of("text"), of("color"), of("unknown")], [Kind::Text; 3]);
        assert_eq!(
            (of("maybe"), of("words")),
            (Kind::Mixed(Types(STRING | NULL)), Kind::Mixed(Types(STRING | NUMBER)))
        );
        assert_eq!(
            (of("count"), of("any"), of("loop")),
            (Kind::Json(Types(NUMBER | NULL)), Kind::Mixed(Types(ANY)), Kind::Mixed(Types(ANY)))
        );
        let listed = |name: &str| values(&parameters["properties"][name], &parameters);
        assert_eq!(listed("color"), Some(vec![json!("red"), json!("green")]));
        assert_eq!(
            (listed("words"), listed("text"), listed("loop")),
            (Some(vec![json!("a"), json!(1)]), None, None)
        );
    }

    #[test]
    fn a_schema_that_multiplies_is_looked_at_for_a_while_alone() {
        let reference = json!({"$ref": "#/properties/a"});
        let parameters = json!({"properties": {"a": {
            "anyOf": vec![reference; 3_000], "enum": (0..10_000).collect::<Vec<_>>()
        }}});
        // Without the limit this would take minutes.
        assert_eq!(kind(&parameters, "a"), Kind::Mixed(Types(ANY)));
        assert_eq!(values(&parameters["properties"]["a"], &parameters), None);
    }

    #[test]
    fn texts_are_kept_as_they_are_where_they_may_be_texts() {
        let (maybe, any, number) = (Types(STRING | NULL), Types(ANY), Types(NUMBER));
        for (text, types, read) in [
            ("    return 1\n", maybe, json!("    return 1\n")),
            ("None", maybe, json!(null)),
            ("12", maybe, json!("12")),
            ("\"q\"", any, json!("\"q\"")),
            (" [1] ", any, json!([1])),
            ("True", any, json!(true)),
            (" 12 ", number, json!(12)),
            (" many ", number, json!("many")),
        ] {
            assert_eq!(serde_json::from_str::<Value>(&json(text, types)).unwrap(), read, "{text:?}");
        }
    }
}
