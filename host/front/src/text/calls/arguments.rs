//! How calls in tags write the value of an argument: as plain text or as JSON. The tool's schema decides.
//!
//! Qwen3-Coder's template writes texts as they are and all other values as JSON, so its models do the same. A text in quotes is a
//! text that contains quotes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use serde_json::Value;

/// Longest name of a tool or an argument, and most white space before the name of a tool, in bytes.
pub(super) const LONGEST_NAME: usize = 512;

/// Most schemas and values that are read for one argument. An argument with more may have values of any type.
const MOST: usize = 256;
/// Most schemas and values that are read for all arguments of a tool. The arguments after that may have values of any type.
const MOST_OF_TOOL: usize = 64 * MOST;
/// Longest `$ref` that is followed, in bytes.
const LONGEST_REFERENCE: usize = 1 << 10;
/// Most bytes of references that are followed for all arguments of a tool.
const MOST_REFERENCES: usize = 256 << 10;

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

/// The schemas of a tool's arguments. The work for all arguments together is limited, because a schema may refer to another as often
/// as it likes.
pub(super) struct Schemas<'a> {
    parameters: &'a Value,
    /// What each reference leads to.
    targets: HashMap<&'a str, Option<&'a Value>>,
    /// Schemas and values that may still be read for the tool, and for the present argument.
    left: usize,
    left_here: usize,
    /// Bytes of references that may still be followed.
    left_bytes: usize,
}

impl<'a> Schemas<'a> {
    /// The schemas of a tool with these parameters.
    pub fn new(parameters: &'a Value) -> Self {
        let targets = HashMap::new();
        Self { parameters, targets, left: MOST_OF_TOOL, left_here: 0, left_bytes: MOST_REFERENCES }
    }

    /// The schema of an argument, if the parameters list it.
    pub fn of(&self, name: &str) -> Option<&'a Value> {
        self.parameters.get("properties")?.get(name)
    }

    /// How a call writes the value of an argument. Arguments that the parameters do not list are text.
    pub fn kind(&mut self, name: &str) -> Kind {
        let Some(schema) = self.of(name) else { return Kind::Text };
        self.begin();
        let mut types = 0;
        self.add_types(&mut types, schema);
        match types {
            0 => Kind::Mixed(Types(ANY)),
            STRING => Kind::Text,
            types if types & STRING != 0 => Kind::Mixed(Types(types)),
            types => Kind::Json(Types(types)),
        }
    }

    /// The schema at the end of the references, or the schema itself.
    pub fn resolved(&mut self, mut schema: &'a Value) -> &'a Value {
        for _ in 0..8 {
            match self.target(schema) {
                Some(next) => schema = next,
                None => break,
            }
        }
        schema
    }

    /// The values that a schema allows, where it lists them.
    pub fn values(&mut self, schema: &'a Value) -> Option<Vec<&'a Value>> {
        self.begin();
        let mut all = Vec::new();
        self.list(schema, &mut all)?;
        Some(all).filter(|all| !all.is_empty())
    }

    fn begin(&mut self) {
        self.left_here = self.left.min(MOST);
    }

    /// Counts a schema or value that is read. `None` if it is one too many.
    fn step(&mut self) -> Option<()> {
        self.left_here = self.left_here.checked_sub(1)?;
        self.left -= 1;
        Some(())
    }

    /// The schema that this schema refers to, if it refers to one.
    fn target(&mut self, schema: &'a Value) -> Option<&'a Value> {
        let reference = schema.get("$ref")?.as_str().filter(|text| text.len() <= LONGEST_REFERENCE)?;
        self.left_bytes = self.left_bytes.checked_sub(reference.len())?;
        match self.targets.entry(reference) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                let pointer = reference.strip_prefix('#');
                *new.insert(pointer.and_then(|pointer| self.parameters.pointer(pointer)))
            }
        }
    }

    /// Adds the types that a schema allows, none where it names none, and all where too much would have to be read.
    fn add_types(&mut self, types: &mut u8, schema: &'a Value) {
        if self.add_some(types, schema).is_none() {
            *types = ANY;
        }
    }

    fn add_some(&mut self, types: &mut u8, schema: &'a Value) -> Option<()> {
        if *types == ANY {
            return Some(());
        }
        self.step()?;
        if let Some(target) = self.target(schema) {
            return self.add_some(types, target);
        }
        match schema.get("type") {
            Some(Value::String(name)) => *types |= type_called(name),
            Some(Value::Array(names)) => {
                for name in names {
                    self.step()?;
                    *types |= name.as_str().map_or(0, type_called);
                }
            }
            _ => {
                let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
                for value in values.chain(schema.get("const")) {
                    self.step()?;
                    *types |= type_of(value);
                }
            }
        }
        for branch in branches(schema, &["anyOf", "oneOf", "allOf"]) {
            if *types == ANY {
                break;
            }
            self.add_some(types, branch)?;
        }
        Some(())
    }

    fn list(&mut self, schema: &'a Value, all: &mut Vec<&'a Value>) -> Option<()> {
        self.step()?;
        if let Some(target) = self.target(schema) {
            return self.list(target, all);
        }
        let given = schema.get("enum").and_then(Value::as_array);
        if given.is_some() || schema.get("const").is_some() {
            for value in given.into_iter().flatten().chain(schema.get("const")) {
                self.step()?;
                all.push(value);
            }
            return Some(());
        }
        if schema.get("type").is_some_and(|name| name == "null") {
            all.push(&Value::Null);
            return Some(());
        }
        let mut some = false;
        for branch in branches(schema, &["anyOf", "oneOf"]) {
            some = true;
            self.list(branch, all)?;
        }
        some.then_some(())
    }
}

fn branches<'a>(schema: &'a Value, keys: &'static [&'static str]) -> impl Iterator<Item = &'a Value> {
    keys.iter().filter_map(|key| schema.get(key)?.as_array()).flatten()
}

/// The kinds of all arguments that these parameters list, but for plain texts, and for names that are too long for an answer.
pub(super) fn kinds(parameters: &Value) -> HashMap<String, Kind> {
    let mut schemas = Schemas::new(parameters);
    let listed = parameters.get("properties").and_then(Value::as_object).into_iter().flatten();
    let known = listed.filter(|(name, _)| name.len() <= LONGEST_NAME);
    let kinds = known.map(|(name, _)| (name.clone(), schemas.kind(name)));
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
        let mut schemas = Schemas::new(&parameters);
        let mut of = |name: &str| schemas.kind(name);
        assert_eq!([of("text"), of("color"), of("unknown")], [Kind::Text; 3]);
        assert_eq!(
            (of("maybe"), of("words")),
            (Kind::Mixed(Types(STRING | NULL)), Kind::Mixed(Types(STRING | NUMBER)))
        );
        assert_eq!(
            (of("count"), of("any"), of("loop")),
            (Kind::Json(Types(NUMBER | NULL)), Kind::Mixed(Types(ANY)), Kind::Mixed(Types(ANY)))
        );
        let mut listed = |name: &str| {
            let values = schemas.values(&parameters["properties"][name])?;
            Some(values.into_iter().cloned().collect::<Vec<_>>())
        };
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
        let mut schemas = Schemas::new(&parameters);
        assert_eq!(schemas.kind("a"), Kind::Mixed(Types(ANY)));
        assert_eq!(schemas.values(&parameters["properties"]["a"]), None);
        assert_eq!(MOST_OF_TOOL - schemas.left, 2 * MOST);
    }

    #[test]
    fn all_arguments_of_a_tool_share_a_limit_of_steps_and_of_bytes() {
        let long = "k".repeat(LONGEST_REFERENCE);
        let near = "n".repeat(LONGEST_REFERENCE - "#/properties/".len());
        let refers = |name: &str| json!({"$ref": format!("#/properties/{name}")});
        let of = |target: &str| {
            let mut properties: serde_json::Map<String, Value> =
                (0..1000).map(|at| (at.to_string(), refers(target))).collect();
            properties.insert(target.to_owned(), refers(target));
            json!({"properties": properties})
        };
        // Each argument leads in a circle. The third reference is too long to be followed.
        for (target, most_steps, bytes) in [
            ("x", MOST_OF_TOOL, MOST_OF_TOOL * "#/properties/x".len()),
            (&near, MOST + 2 * 1001, MOST_REFERENCES),
            (&long, 2 * 1001, 0),
        ] {
            let parameters = of(target);
            let mut schemas = Schemas::new(&parameters);
            for name in parameters["properties"].as_object().unwrap().keys() {
                assert_eq!(schemas.kind(name), Kind::Mixed(Types(ANY)), "{name:.8}");
                assert_eq!(schemas.values(&parameters["properties"][name]), None, "{name:.8}");
            }
            let (steps, read) = (MOST_OF_TOOL - schemas.left, MOST_REFERENCES - schemas.left_bytes);
            assert!(steps <= most_steps && read <= bytes, "{target:.8}: {steps} steps, {read} bytes");
            assert!(schemas.targets.len() <= 1, "a reference is resolved once");
        }
    }

    #[test]
    fn names_that_no_answer_has_are_not_kept() {
        let name = |length: usize| "n".repeat(length);
        let properties: serde_json::Map<String, Value> = [name(LONGEST_NAME), name(LONGEST_NAME + 1)]
            .map(|name| (name, json!({"type": "integer"})))
            .into_iter()
            .collect();
        let kept = kinds(&json!({"properties": properties}));
        assert_eq!(kept.into_keys().collect::<Vec<_>>(), [name(LONGEST_NAME)]);
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
