//! Takes the fields of a request one by one, so that an error can name the field and its value.

use std::fmt::Display;
use std::ops::RangeInclusive;

#[cfg(test)]
use serde_json::json;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::values;

/// The fields of one JSON object of the request. A field that is `null` is the same as absent.
#[derive(Debug, Default)]
pub(super) struct Fields {
    fields: Map<String, Value>,
    /// Prefix of field names in messages: "sampling_params." or nothing.
    prefix: &'static str,
}

/// Fields of other servers that this server ignores, because the answer does not depend on them: they concern filing, billing,
/// scheduling, caching or logging.
pub(super) const HARMLESS: [&str; 17] = [
    "user",
    "metadata",
    "client_metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "no_logs",
    "request_id",
    "log_metrics",
    "return_text_in_logprobs",
    // The tokenizers of this server write none.
    "spaces_between_special_tokens",
    // The prompt decides it.
    "verbosity",
    // Chats read them. Elsewhere a text has all of the answer, and the items of a response have thoughts apart.
    "include_reasoning",
    "separate_reasoning",
    "stream_reasoning",
];

/// Values longer than this are not repeated in messages.
const LONGEST_ECHO: usize = 60;

impl Fields {
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        values::check(body).map_err(|too_many| ApiError::invalid(too_many.to_string()))?;
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self { fields, prefix: "" }),
            Ok(other) => {
                Err(ApiError::invalid(format!("the body must be a JSON object, got {}", echo(&other))))
            }
            Err(error) => Err(ApiError::invalid(format!("the body is not valid JSON: {error}"))),
        }
    }

    /// The fields of an object within the body. Messages put this prefix before their names.
    pub fn within(prefix: &'static str, fields: Map<String, Value>) -> Self {
        Self { fields, prefix }
    }

    /// An object within the body, or an empty one when it is absent.
    pub fn object(&mut self, name: &str, prefix: &'static str) -> Result<Self, ApiError> {
        match self.take(name) {
            None => Ok(Self { fields: Map::new(), prefix }),
            Some(Value::Object(fields)) => Ok(Self { fields, prefix }),
            Some(other) => Err(self.wrong(name, "a JSON object", &other)),
        }
    }

    pub fn into_map(self) -> Map<String, Value> {
        self.fields
    }

    pub fn take(&mut self, name: &str) -> Option<Value> {
        #[cfg(test)]
        fields_read::note(self.prefix, name);
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    /// Reads a field without taking it.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.fields.get(name)
    }

    /// The error for a field with a wrong value.
    pub fn wrong(&self, name: &str, expected: impl Display, got: &Value) -> ApiError {
        let full = format!("{}{name}", self.prefix);
        ApiError::field(&full, format!("{full} must be {expected}, got {}", echo(got)))
    }

    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        #[cfg(test)]
        fields_read::note_kind(self.prefix, name, json!({"type": ["boolean", "null"]}));
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong(name, "true or false", &other)),
        }
    }

    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        #[cfg(test)]
        fields_read::note_kind(self.prefix, name, json!({"type": ["string", "null"]}));
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong(name, "a string", &other)),
        }
    }

    /// A string of at most `most` bytes, or an empty one when it is absent.
    pub fn short_string(&mut self, name: &str, most: usize) -> Result<String, ApiError> {
        #[cfg(test)]
        fields_read::note_kind(self.prefix, name, json!({"type": ["string", "null"], "maxLength": most}));
        match self.take(name) {
            None => Ok(String::new()),
            Some(Value::String(value)) if value.len() <= most => Ok(value),
            Some(other) => Err(self.wrong(name, format!("a string of up to {most} bytes"), &other)),
        }
    }

    pub fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        #[cfg(test)]
        fields_read::note_kind(
            self.prefix,
            name,
            json!({"type": ["integer", "null"], "minimum": range.start(), "maximum": range.end()}),
        );
        let Some(value) = self.take(name) else { return Ok(None) };
        match whole(&value) {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => {
                let expected = match (*range.start(), *range.end()) {
                    (i64::MIN, i64::MAX) => "an integer".to_owned(),
                    (start, end) => format!("an integer from {start} to {end}"),
                };
                Err(self.wrong(name, expected, &value))
            }
        }
    }

    /// A number in (`above`, `most`], or in [`above`, `most`] when `closed`.
    pub fn number(
        &mut self,
        name: &str,
        above: f64,
        most: f64,
        closed: bool,
    ) -> Result<Option<f64>, ApiError> {
        #[cfg(test)]
        fields_read::note_kind(self.prefix, name, {
            let least = if closed { "minimum" } else { "exclusiveMinimum" };
            json!({"type": ["number", "null"], least: above, "maximum": most})
        });
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number <= most && (number > above || (closed && number >= above)) => {
                Ok(Some(number))
            }
            _ if closed => Err(self.wrong(name, format!("a number from {above} to {most}"), &value)),
            _ => Err(self.wrong(name, format!("a number above {above} and up to {most}"), &value)),
        }
    }

    /// Reads token ids, which must be less than `vocabulary`.
    pub fn token_ids(&self, name: &str, items: &[Value], vocabulary: u32) -> Result<Vec<u32>, ApiError> {
        items
            .iter()
            .map(|item| match whole(item).and_then(|id| u32::try_from(id).ok()) {
                Some(id) if id < vocabulary => Ok(id),
                _ => Err(self.wrong(
                    name,
                    format!("token ids from 0 to {}", vocabulary.saturating_sub(1)),
                    item,
                )),
            })
            .collect()
    }

    /// A list of at most `most` token ids, or an empty one when it is absent.
    pub fn token_list(&mut self, name: &str, most: usize, vocabulary: u32) -> Result<Vec<u32>, ApiError> {
        #[cfg(test)]
        fields_read::note_kind(self.prefix, name, {
            let token = json!({"type": "integer", "minimum": 0, "maximum": vocabulary - 1});
            json!({"maxItems": most, "items": token})
        });
        match self.take(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(ids)) if ids.len() <= most => self.token_ids(name, &ids, vocabulary),
            Some(other) => Err(self.wrong(name, format!("a list of up to {most} token ids"), &other)),
        }
    }

    /// Refuses the fields that were not taken: misspelt fields, and fields that this server does not have. `hint` may say what to
    /// do.
    ///
    /// Clients of other servers send fields that are switched off. So a value that is `false`, 0 or empty is accepted, unless
    /// there is a hint for the field: a temperature of 0 in the wrong place was set on purpose.
    pub fn refuse_rest(mut self, hint: impl Fn(&str) -> Option<String>) -> Result<(), ApiError> {
        self.fields.retain(|name, value| {
            let asks = !value.is_null() && (!empty(value) || hint(name).is_some());
            asks && !HARMLESS.contains(&name.as_str())
        });
        let Some((name, value)) = self.fields.iter().next() else { return Ok(()) };
        let full = format!("{}{}", self.prefix, shorten(name));
        let hint = hint(name).unwrap_or_else(|| "leave it out".to_owned());
        let message =
            format!("{full} is not known here, got {}, and might change the answer; {hint}", echo(value));
        Err(ApiError::unsupported(&full, message))
    }

    /// Refuses a field that this server does not have, unless its value changes nothing.
    pub fn refuse_unless(&mut self, name: &str, harmless: impl Fn(&Value) -> bool) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !harmless(&value) => Err(self.unsupported(name, &value)),
            _ => Ok(()),
        }
    }

    /// The error for a field that this server does not have.
    pub fn unsupported(&self, name: &str, got: &Value) -> ApiError {
        let full = format!("{}{name}", self.prefix);
        let message = format!("{full} is not supported here, got {}; leave it out", echo(got));
        ApiError::unsupported(&full, message)
    }
}

/// Whether a value changes nothing.
pub(super) fn empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(on) => !on,
        Value::Null => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
    }
}

/// An integer, or a float without a fraction: languages with one kind of number write `4.0`.
fn whole(value: &Value) -> Option<i64> {
    /// Above this number, a float cannot represent every integer.
    const EXACT: f64 = (1_u64 << 53) as f64;
    #[expect(clippy::cast_possible_truncation, reason = "it has no fraction, and its size is checked")]
    let of_float = |number: f64| (number.fract() == 0.0 && number.abs() <= EXACT).then_some(number as i64);
    value.as_i64().or_else(|| of_float(value.as_f64()?))
}

/// A field's name, or its length if it is too long for a message.
fn shorten(name: &str) -> String {
    if name.len() <= LONGEST_ECHO {
        name.to_owned()
    } else {
        format!("a field with a name of {} bytes", name.len())
    }
}

/// A value, or its length if it is too long for a message.
pub(super) fn echo(value: &Value) -> String {
    let text = value.to_string();
    if text.len() <= LONGEST_ECHO {
        return text;
    }
    match value {
        Value::String(string) => format!("a string of {} bytes", string.len()),
        Value::Array(items) => format!("a list of {} items", items.len()),
        _ => format!("a value of {} bytes", text.len()),
    }
}

/// Records which fields were looked at, and their schemas, for tests of the documents that list the fields.
#[cfg(test)]
pub(super) mod fields_read {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use serde_json::Value;

    thread_local! {
        static READ: RefCell<BTreeMap<String, Value>> = const { RefCell::new(BTreeMap::new()) };
    }

    pub fn note(prefix: &str, name: &str) {
        note_kind(prefix, name, Value::Null);
    }

    pub fn note_kind(prefix: &str, name: &str, kind: Value) {
        // Keeps the first entry, because the first look takes the field.
        READ.with_borrow_mut(|read| read.entry(format!("{prefix}{name}")).or_insert(kind).clone());
    }

    /// The names that this thread has looked at since the last call, each with a part of its schema where that is known.
    pub fn take() -> BTreeMap<String, Value> {
        READ.take()
    }
}
