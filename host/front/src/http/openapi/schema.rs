//! The building blocks of schemas. `null` is the same as leaving a field out, so every schema of a field allows it.

use std::ops::RangeInclusive;

use serde_json::{Map, Value, json};

use crate::http::fields;

/// Name of the schema of values that ask for nothing. Unknown fields are accepted with such a value.
pub(super) const NOTHING: &str = "Nothing";

/// Fields of an object, with their schemas.
#[derive(Default)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// Adds a field.
    pub fn add(&mut self, name: &str, mut schema: Value, about: &str) -> &mut Self {
        if !about.is_empty() {
            schema["description"] = json!(about);
        }
        self.0.insert(name.to_owned(), schema);
        self
    }

    /// Adds the fields of another list.
    pub fn extend(&mut self, other: Self) -> &mut Self {
        self.0.extend(other.0);
        self
    }

    /// An object with these fields. Other fields are accepted if they ask for nothing, or if no answer depends on them.
    pub fn object(mut self, required: &[&str]) -> Value {
        for name in fields::HARMLESS {
            let about = "Taken and not read: no answer depends on it";
            self.0.entry(name).or_insert_with(|| json!({"description": about}));
        }
        let mut object = json!({
            "type": "object",
            "properties": self.0,
            "additionalProperties": reference(NOTHING),
        });
        if !required.is_empty() {
            object["required"] = json!(required);
        }
        object
    }
}

/// A reference to a schema among the document's components.
pub(super) fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// The same schema with a default.
pub(super) fn or(mut schema: Value, default: impl Into<Value>) -> Value {
    schema["default"] = default.into();
    schema
}

/// `true` or `false`.
pub(super) fn boolean() -> Value {
    json!({"type": ["boolean", "null"]})
}

/// A text of any length.
pub(super) fn text() -> Value {
    json!({"type": ["string", "null"]})
}

/// A text of at most `most` bytes.
pub(super) fn short_text(most: usize) -> Value {
    json!({"type": ["string", "null"], "maxLength": most})
}

/// An integer of a range.
pub(super) fn integer(range: &RangeInclusive<i64>) -> Value {
    json!({"type": ["integer", "null"], "minimum": range.start(), "maximum": range.end()})
}

/// A number in (`above`, `most`], or in [`above`, `most`] when `closed`.
pub(super) fn number(above: f64, most: f64, closed: bool) -> Value {
    let least = if closed { "minimum" } else { "exclusiveMinimum" };
    json!({"type": ["number", "null"], least: above, "maximum": most})
}

/// A list of at most `most` token ids.
pub(super) fn token_list(most: usize, vocabulary: u32) -> Value {
    json!({"type": ["array", "null"], "maxItems": most, "items": token(vocabulary)})
}

/// A token id.
pub(super) fn token(vocabulary: u32) -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": vocabulary.saturating_sub(1)})
}

/// An object of any fields.
pub(super) fn any_object() -> Value {
    json!({"type": ["object", "null"]})
}

/// One of these values, or `null`.
pub(super) fn only(values: &[Value]) -> Value {
    let mut values = values.to_vec();
    values.push(Value::Null);
    json!({"enum": values})
}

/// A value that asks for nothing, or one of these schemas.
pub(super) fn nothing_or(others: impl IntoIterator<Item = Value>) -> Value {
    let kinds: Vec<Value> = [reference(NOTHING)].into_iter().chain(others).collect();
    json!({"anyOf": kinds})
}

/// The schema that [`NOTHING`] names.
pub(super) fn nothing() -> Value {
    json!({"description": "A value that asks for nothing", "enum": [null, false, 0, "", [], {}]})
}
