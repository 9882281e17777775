//! A JSON schema of a client as the engine reads it.
//!
//! The engine refuses keywords that it cannot enforce. Some of them limit nothing where they stand, and some say the same as other
//! keywords. They are left out or written otherwise here, so that exactly the same JSON is valid. What remains is refused by the
//! engine.
//!
//! | Keyword | What becomes of it |
//! | --- | --- |
//! | `format` with a name that JSON Schema does not define | left out: validators ignore it |
//! | `uniqueItems` that is `false`, or beside a `maxItems` of 0 or 1 | left out |
//! | `propertyNames` that allows every name | left out |
//! | `propertyNames` with a list, an expression or a length, where nothing else names properties | `properties`, `patternProperties` |
//! | `unevaluatedProperties` where nothing combines schemas | `additionalProperties` |
//! | the expression that pydantic writes for a decimal number | one without lookaround |
//!
//! Nothing is changed if a `$ref` leads into a schema and not to a definition: what it finds there could be another schema. In
//! schemas of drafts that do not know a keyword, the keyword stays, and the engine ignores it.

use serde_json::{Map, Value, json};

/// White space between parts of JSON: a line's end and an indentation, as programs write it. The limit stops a model that would
/// write white space for ever.
const WHITE_SPACE: &str = r"\r?\n[ \t]{0,40}|[ \t]{1,40}";

/// The formats that JSON Schema defines. The engine enforces some of them and refuses the others.
const FORMATS: [&str; 19] = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "idn-email",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "time",
    "uri",
    "uri-reference",
    "uri-template",
    "uuid",
];

/// Keywords whose values are schemas.
const ONE: [&str; 12] = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];
/// Keywords whose values are lists of schemas. `items` was one in older drafts.
const LISTS: [&str; 5] = ["allOf", "anyOf", "items", "oneOf", "prefixItems"];
/// Keywords whose values are objects of schemas.
const OBJECTS: [&str; 6] =
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"];
/// Keywords that combine schemas, so that other schemas may name properties, too.
const COMBINE: [&str; 8] =
    ["$dynamicRef", "$ref", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf"];
/// Keywords that say nothing about what is valid.
const NOTES: [&str; 6] = ["$comment", "default", "deprecated", "description", "examples", "title"];
/// Most bytes of schemas that are copied, one copy for each name, in a whole schema.
const MOST_COPIED: usize = 8 << 10;

/// A schema for the engine, with the options that it reads from it.
pub(crate) fn for_engine(schema: &Value, compact: bool) -> Value {
    let mut fields = match rewritten(schema) {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    let options = match compact {
        true => json!({"whitespace_flexible": false}),
        false => json!({"whitespace_pattern": WHITE_SPACE}),
    };
    fields.insert("x-guidance".into(), options);
    Value::Object(fields)
}

fn rewritten(schema: &Value) -> Value {
    if !refers_to_definitions_alone(schema) {
        return schema.clone();
    }
    let draft = schema.get("$schema").and_then(Value::as_str).unwrap_or_default();
    let is_one_of = |names: &[&str]| names.iter().any(|name| draft.contains(name));
    let names_are_known = !is_one_of(&["draft-03", "draft-04"]);
    let evaluates = names_are_known && !is_one_of(&["draft-06", "draft-07"]);
    Rewriting { left: MOST_COPIED, names_are_known, evaluates }.of(schema)
}

/// Whether every `$ref` is to the whole schema or to one of its definitions.
fn refers_to_definitions_alone(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.iter().all(refers_to_definitions_alone),
        Value::Object(fields) => fields.iter().all(|(name, value)| match value {
            Value::String(to) if name == "$ref" => {
                let name = ["#/$defs/", "#/definitions/"].iter().find_map(|folder| to.strip_prefix(folder));
                to == "#" || name.is_some_and(|name| !name.contains('/'))
            }
            value => refers_to_definitions_alone(value),
        }),
        _ => true,
    }
}

/// What may be done to a schema.
struct Rewriting {
    /// Bytes that may still be copied.
    left: usize,
    /// The draft has `propertyNames`.
    names_are_known: bool,
    /// The draft has `unevaluatedProperties`.
    evaluates: bool,
}

impl Rewriting {
    /// A schema, and all schemas within it.
    fn of(&mut self, schema: &Value) -> Value {
        let Value::Object(given) = schema else { return schema.clone() };
        let mut fields = Map::new();
        for (name, value) in given {
            let keyword = name.as_str();
            let value = match value {
                Value::Array(list) if LISTS.contains(&keyword) => {
                    list.iter().map(|schema| self.of(schema)).collect()
                }
                Value::Object(schemas) if OBJECTS.contains(&keyword) => {
                    schemas.iter().map(|(name, schema)| (name.clone(), self.of(schema))).collect()
                }
                value if ONE.contains(&keyword) => self.of(value),
                value => value.clone(),
            };
            fields.insert(name.clone(), value);
        }
        formats(&mut fields);
        decimals(&mut fields);
        unique_items(&mut fields);
        if self.evaluates {
            unevaluated(&mut fields);
        }
        if self.names_are_known {
            property_names(&mut fields, &mut self.left);
        }
        Value::Object(fields)
    }
}

/// Takes a keyword out. The others keep their order.
fn drop_keyword(fields: &mut Map<String, Value>, keyword: &str) {
    fields.retain(|name, _| name != keyword);
}

fn formats(fields: &mut Map<String, Value>) {
    if fields.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
        drop_keyword(fields, "format");
    }
}

fn unique_items(fields: &mut Map<String, Value>) {
    let few = fields.get("maxItems").and_then(Value::as_f64).is_some_and(|most| most <= 1.0);
    if fields.get("uniqueItems").is_some_and(|unique| few || *unique == Value::Bool(false)) {
        drop_keyword(fields, "uniqueItems");
    }
}

/// pydantic's expressions for decimal numbers, with any number of places or at most so many. Both begin by refusing texts that have
/// no digit, which is what takes lookaround.
fn decimals(fields: &mut Map<String, Value>) {
    let pattern = fields.get("pattern").and_then(Value::as_str);
    let Some(number) = pattern.and_then(|pattern| pattern.strip_prefix(r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d"))
    else {
        return;
    };
    let places = number.strip_prefix("{0,").and_then(|rest| rest.strip_suffix("}0*$"));
    let places = places.filter(|places| places.bytes().all(|byte| byte.is_ascii_digit()));
    let places = places.and_then(|places| places.parse::<u16>().ok());
    let plain = match (number, places) {
        ("*$", _) => r"^[+-]?(\d+\.?\d*|\.\d+)$".to_owned(),
        (_, Some(0)) => r"^[+-]?(\d+\.?0*|\.0+)$".to_owned(),
        (_, Some(most)) => format!(r"^[+-]?(\d+(\.\d{{0,{most}}}0*)?|\.\d{{1,{most}}}0*)$"),
        _ => return,
    };
    fields.insert("pattern".into(), plain.into());
}

/// Without schemas that are combined, the properties that no other keyword has evaluated are the additional ones.
fn unevaluated(fields: &mut Map<String, Value>) {
    if COMBINE.iter().any(|keyword| fields.contains_key(*keyword)) {
        return;
    }
    if let Some(rest) = fields.get("unevaluatedProperties").cloned() {
        drop_keyword(fields, "unevaluatedProperties");
        fields.entry("additionalProperties").or_insert(rest);
    }
}

fn property_names(fields: &mut Map<String, Value>, left: &mut usize) {
    let Some(names) = fields.get("propertyNames") else { return };
    let Some(limits) = limits_of_names(names) else { return };
    let of_values = fields.get("additionalProperties").cloned().unwrap_or(Value::Bool(true));
    let named = ["properties", "patternProperties"].iter().any(|keyword| fields.contains_key(*keyword));
    let combined = COMBINE.iter().any(|keyword| fields.contains_key(*keyword));
    let (keyword, properties) = match limits {
        // Every property's name is a text.
        Names::Any => {
            return drop_keyword(fields, "propertyNames");
        }
        _ if named || combined => return,
        Names::Of(names) => {
            let copied = names.len().saturating_mul(of_values.to_string().len());
            let Some(rest) = left.checked_sub(copied) else { return };
            *left = rest;
            ("properties", names.into_iter().map(|name| (name, of_values.clone())).collect::<Map<_, _>>())
        }
        // The engine counts a name that comes twice as two.
        Names::Matching(_) if fields.get("minProperties").is_some_and(|least| *least != 0 && *least != 1) => {
            return;
        }
        Names::Matching(pattern) => ("patternProperties", Map::from_iter([(pattern, of_values)])),
    };
    drop_keyword(fields, "propertyNames");
    fields.insert(keyword.into(), Value::Object(properties));
    fields.insert("additionalProperties".into(), Value::Bool(false));
}

/// The names that a `propertyNames` allows.
enum Names {
    Any,
    Of(Vec<String>),
    Matching(String),
}

/// `None` if they cannot be written as names of properties.
fn limits_of_names(names: &Value) -> Option<Names> {
    let fields = match names {
        Value::Bool(true) => return Some(Names::Any),
        Value::Object(fields) => fields,
        _ => return None,
    };
    let is_text = |name: &String, value: &Value| name == "type" && value == "string";
    let limits: Vec<(&str, &Value)> = fields
        .iter()
        .filter(|(name, value)| !NOTES.contains(&name.as_str()) && !is_text(name, value))
        .map(|(name, value)| (name.as_str(), value))
        .collect();
    let length = |value: &Value| value.as_u64().filter(|length| *length <= u64::from(u16::MAX));
    match limits[..] {
        [] => Some(Names::Any),
        [("const", Value::String(name))] => Some(Names::Of(vec![name.clone()])),
        [("enum", Value::Array(names))] => {
            names.iter().map(|name| name.as_str().map(str::to_owned)).collect::<Option<_>>().map(Names::Of)
        }
        [("pattern", Value::String(pattern))] => Some(Names::Matching(pattern.clone())),
        [("minLength", least)] => Some(Names::Matching(format!(r"^[\s\S]{{{},}}$", length(least)?))),
        [("maxLength", most)] => Some(Names::Matching(format!(r"^[\s\S]{{0,{}}}$", length(most)?))),
        [("maxLength", most), ("minLength", least)] | [("minLength", least), ("maxLength", most)] => {
            Some(Names::Matching(format!(r"^[\s\S]{{{},{}}}$", length(least)?, length(most)?)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(schema: Value) -> Value {
        rewritten(&schema)
    }

    #[test]
    fn keywords_that_limit_nothing_are_left_out_where_they_are_keywords() {
        let string = json!({"type": "string"});
        for (schema, becomes) in [
            (json!({"type": "string", "format": "cuid2"}), string.clone()),
            (json!({"type": "string", "format": "uri"}), json!({"type": "string", "format": "uri"})),
            (json!({"items": string, "uniqueItems": false}), json!({"items": string})),
            (json!({"maxItems": 1, "uniqueItems": true}), json!({"maxItems": 1})),
            (json!({"maxItems": 2, "uniqueItems": true}), json!({"maxItems": 2, "uniqueItems": true})),
            (
                json!({"propertyNames": {"type": "string", "title": "K"}, "properties": {"a": true}}),
                json!({"properties": {"a": true}}),
            ),
            (json!({"propertyNames": true}), json!({})),
            // What lies elsewhere than in a definition may be another schema where it is referred to.
            (
                json!({"$ref": "#/$defs", "$defs": {"const": {"format": "x"}}}),
                json!({"$ref": "#/$defs", "$defs": {"const": {"format": "x"}}}),
            ),
            // A property, a definition or a value of such a name is none.
            (json!({"properties": {"format": {"format": "x"}}}), json!({"properties": {"format": {}}})),
            (json!({"enum": [{"format": "x"}]}), json!({"enum": [{"format": "x"}]})),
            (json!({"const": {"uniqueItems": false}}), json!({"const": {"uniqueItems": false}})),
            (
                json!({"anyOf": [{"format": "x"}, {"prefixItems": [{"format": "x"}]}]}),
                json!({"anyOf": [{}, {"prefixItems": [{}]}]}),
            ),
            (json!({"$defs": {"a": {"items": {"format": "x"}}}}), json!({"$defs": {"a": {"items": {}}}})),
            (json!({"items": [{"format": "x"}, true]}), json!({"items": [{}, true]})),
        ] {
            assert_eq!(read(schema.clone()), becomes, "{schema}");
        }
    }

    #[test]
    fn the_rest_of_a_schema_keeps_its_order() {
        let text = r#"{"type":"object","propertyNames":true,"format":"x","properties":{"b":true},"allOf":[{"required":["a"]}]}"#;
        let read = read(serde_json::from_str(text).unwrap()).to_string();
        assert_eq!(read, r#"{"type":"object","properties":{"b":true},"allOf":[{"required":["a"]}]}"#);
    }

    #[test]
    fn names_of_properties_become_properties_where_nothing_else_names_any() {
        let integer = json!({"type": "integer"});
        for (schema, becomes) in [
            (
                json!({"propertyNames": {"enum": ["a", "b"], "type": "string"}, "additionalProperties": integer}),
                json!({"properties": {"a": integer, "b": integer}, "additionalProperties": false}),
            ),
            (
                json!({"propertyNames": {"const": "a"}}),
                json!({"properties": {"a": true}, "additionalProperties": false}),
            ),
            (
                json!({"propertyNames": {"pattern": "^x"}, "additionalProperties": integer}),
                json!({"patternProperties": {"^x": integer}, "additionalProperties": false}),
            ),
            (
                json!({"propertyNames": {"minLength": 1, "maxLength": 3}}),
                json!({"patternProperties": {"^[\\s\\S]{1,3}$": true}, "additionalProperties": false}),
            ),
        ] {
            assert_eq!(read(schema.clone()), becomes, "{schema}");
        }
        for stays in [
            json!({"propertyNames": {"enum": ["a"]}, "properties": {"b": true}}),
            json!({"propertyNames": {"enum": ["a"]}, "allOf": [{"required": ["a"]}]}),
            json!({"propertyNames": {"enum": ["a", 1]}}),
            json!({"propertyNames": {"pattern": "a", "maxLength": 3}}),
            json!({"propertyNames": {"maxLength": -3}}),
            json!({"propertyNames": {"pattern": "a"}, "minProperties": 2}),
            json!({"propertyNames": {"enum": ["a"]}, "$schema": "http://json-schema.org/draft-04/schema#"}),
            json!({"propertyNames": {"enum": ["a"]}, "properties": {"b": {"$ref": "#/additionalProperties"}}}),
            json!({"propertyNames": false}),
        ] {
            assert_eq!(read(stays.clone()), stays);
        }
        // Each level would have eight copies of the one within it.
        let names: Vec<String> = (0..8).map(|name| name.to_string()).collect();
        let deep = (0..30).fold(
            json!({}),
            |values, _| json!({"propertyNames": {"enum": names}, "additionalProperties": values}),
        );
        let read = read(deep).to_string();
        assert!(read.len() < 4 * MOST_COPIED && read.contains("propertyNames"), "{} bytes", read.len());
    }

    #[test]
    fn unevaluated_properties_are_additional_ones_where_nothing_combines_schemas() {
        for (schema, becomes) in [
            (json!({"unevaluatedProperties": false}), json!({"additionalProperties": false})),
            (
                json!({"unevaluatedProperties": false, "additionalProperties": true}),
                json!({"additionalProperties": true}),
            ),
            (
                json!({"unevaluatedProperties": false, "$ref": "#"}),
                json!({"unevaluatedProperties": false, "$ref": "#"}),
            ),
            (
                json!({"$schema": "http://json-schema.org/draft-07/schema#", "unevaluatedProperties": false}),
                json!({"$schema": "http://json-schema.org/draft-07/schema#", "unevaluatedProperties": false}),
            ),
        ] {
            assert_eq!(read(schema), becomes);
        }
    }

    #[test]
    fn expressions_of_decimal_numbers_lose_their_lookaround() {
        let pattern = |end: &str| {
            read(json!({"pattern": format!(r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{end}")}))["pattern"].clone()
        };
        assert_eq!(pattern("*$"), r"^[+-]?(\d+\.?\d*|\.\d+)$");
        assert_eq!(pattern("{0,2}0*$"), r"^[+-]?(\d+(\.\d{0,2}0*)?|\.\d{1,2}0*)$");
        assert_eq!(pattern("{0,0}0*$"), r"^[+-]?(\d+\.?0*|\.0+)$");
        assert_eq!(pattern("{0,+2}0*$"), r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,+2}0*$");
        assert_eq!(pattern("{0,2}x$"), r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}x$");
    }
}
