//! The input of a response, as messages for a chat template.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::http::conversation::Conversation;
use crate::http::error::ApiError;
use crate::http::fields::{Fields, echo};
use crate::http::tools::{self, InNamespace};
use crate::http::values::Nested;

/// Most bytes of the name, the namespace and the id of a call. Each of its results repeats the first two.
const LONGEST_NAME: usize = 256;

/// Takes `instructions` and `input`.
///
/// # Errors
/// When an item is wrong, or needs a feature that this server does not have.
pub(super) fn take(fields: &mut Fields) -> Result<Conversation, ApiError> {
    let mut messages = Messages::default();
    if let Some(instructions) = fields.string("instructions")?.filter(|text| !text.is_empty()) {
        messages.system(&instructions);
    }
    match fields.take("input") {
        None => return Err(ApiError::field("input", "input is missing")),
        Some(Value::String(text)) => messages.said("user", &text),
        Some(Value::Array(items)) if !items.is_empty() => {
            for (index, item) in items.iter().enumerate() {
                add(&mut messages, fields, index, item)?;
            }
        }
        Some(other) => return Err(fields.wrong("input", "a text, or a list of at least one item", &other)),
    }
    Ok(Conversation {
        field: "input",
        messages: messages.list.into_iter().map(Value::Object).collect(),
        has_calls: messages.has_calls,
        extra: Map::new(),
    })
}

fn add(messages: &mut Messages, fields: &Fields, index: usize, item: &Value) -> Result<(), ApiError> {
    let at = |field: &str| format!("input[{index}]{field}");
    let Value::Object(item) = item else { return Err(fields.wrong(&at(""), "an object", item)) };
    let none = Value::Null;
    let get = |name: &str| item.get(name).unwrap_or(&none);
    let name_of = |name: &str| match get(name).as_str() {
        Some(text) if (1..=LONGEST_NAME).contains(&text.len()) => Ok(text),
        _ => {
            let expected = format!("a text of 1 to {LONGEST_NAME} bytes");
            Err(fields.wrong(&at(&format!(".{name}")), expected, get(name)))
        }
    };
    match item.get("type").map_or("message", |kind| kind.as_str().unwrap_or_default()) {
        "message" => {
            let text = text_of(fields, &at(".content"), get("content"))?;
            match get("role").as_str() {
                Some("system" | "developer") => messages.system(&text),
                Some(role @ ("user" | "assistant")) => messages.said(role, &text),
                _ => {
                    let expected = "one of system, developer, user, assistant";
                    return Err(fields.wrong(&at(".role"), expected, get("role")));
                }
            }
        }
        "function_call" => {
            let arguments = tools::object(item, &mut messages.nested)?
                .ok_or_else(|| fields.wrong(&at(".arguments"), "a JSON object, as text", get("arguments")))?;
            let name = name_of("name")?.to_owned();
            let name = match get("namespace").as_str() {
                None | Some("") => name,
                Some(_) => InNamespace { namespace: name_of("namespace")?.to_owned(), name }.joined(),
            };
            messages.call(name_of("call_id")?, &name, arguments);
        }
        "function_call_output" => {
            let output = text_of(fields, &at(".output"), get("output"))?;
            messages.result(name_of("call_id")?, &output);
        }
        "reasoning" => {
            messages.thoughts = thoughts_of(get("content")).or_else(|| thoughts_of(get("summary")));
        }
        // Belongs to an earlier answer of a server that ran the tool.
        kind if tools::is_foreign_call(kind) => {}
        "item_reference" => {
            let message =
                format!("{} refers to an item: this server keeps none; send the item itself", at(""));
            return Err(ApiError::unsupported(&at(""), message));
        }
        _ => {
            let message = format!(
                "{} has type {}, which this server does not have; it takes message, function_call, function_call_output and reasoning",
                at(""),
                echo(get("type"))
            );
            return Err(ApiError::unsupported(&at(".type"), message));
        }
    }
    Ok(())
}

/// The text of a content, which is a text or a list of parts.
fn text_of(fields: &Fields, name: &str, content: &Value) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        other => return Err(fields.wrong(name, "a text, or a list of parts", other)),
    };
    let texts: Result<Vec<&str>, ApiError> = parts
        .iter()
        .map(|part| {
            let text = match part.get("type").and_then(Value::as_str) {
                Some("input_text" | "output_text" | "text") => part.get("text"),
                Some("refusal") => part.get("refusal"),
                _ => None,
            };
            text.and_then(Value::as_str).ok_or_else(|| {
                let expected =
                    "parts of type input_text or output_text (this server takes no images, files or sound)";
                fields.wrong(name, expected, part)
            })
        })
        .collect();
    Ok(texts?.join("\n"))
}

/// Thoughts of an earlier answer, if they can be read.
fn thoughts_of(content: &Value) -> Option<String> {
    let parts = content.as_array()?.iter();
    let texts: Vec<&str> = parts.filter_map(|part| part.get("text")?.as_str()).collect();
    (!texts.is_empty()).then(|| texts.join("\n"))
}

#[derive(Default)]
struct Messages {
    list: Vec<Map<String, Value>>,
    has_calls: bool,
    /// Thoughts that belong to the next message of the assistant.
    thoughts: Option<String>,
    /// Names of functions, by the ids of their calls.
    names: HashMap<String, String>,
    /// Counts the arguments of all calls.
    nested: Nested,
}

impl Messages {
    /// Adds a system message. Templates take one at the beginning, so system messages that stand together there are joined.
    fn system(&mut self, text: &str) {
        if let [only] = &mut self.list[..]
            && only["role"] == "system"
            && let Some(Value::String(content)) = only.get_mut("content")
        {
            content.push_str("\n\n");
            content.push_str(text);
            return;
        }
        self.message("system", text);
    }

    /// Adds a message. A text of the assistant behind its calls belongs to their message: litellm sends calls first, although the
    /// model writes them last.
    fn said(&mut self, role: &str, text: &str) {
        if role == "assistant"
            && self.thoughts.is_none()
            && let Some(last) = self.list.last_mut()
            && last["role"] == "assistant"
            && last.contains_key("tool_calls")
            && last["content"] == ""
        {
            last.insert("content".into(), json!(text));
            return;
        }
        self.message(role, text);
        if role == "assistant" {
            self.think();
        }
    }

    /// Adds a call to the assistant's message before it, or to a new message if there is none.
    fn call(&mut self, call_id: &str, name: &str, arguments: Value) {
        self.has_calls = true;
        self.names.insert(call_id.to_owned(), name.to_owned());
        if self.thoughts.is_some() || self.list.last().is_none_or(|last| last["role"] != "assistant") {
            self.said("assistant", "");
        }
        let call = json!({
            "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments},
        });
        if let Some(last) = self.list.last_mut()
            && let Value::Array(calls) = last.entry("tool_calls").or_insert_with(|| json!([]))
        {
            calls.push(call);
        }
    }

    fn result(&mut self, call_id: &str, text: &str) {
        self.has_calls = true;
        let name = self.names.get(call_id).cloned();
        self.message("tool", text);
        if let Some(last) = self.list.last_mut() {
            last.insert("tool_call_id".into(), json!(call_id));
            if let Some(name) = name {
                last.insert("name".into(), json!(name));
            }
        }
    }

    fn message(&mut self, role: &str, text: &str) {
        let message = json!({"role": role, "content": text});
        if let Value::Object(message) = message {
            self.list.push(message);
        }
    }

    fn think(&mut self) {
        if let (Some(thoughts), Some(last)) = (self.thoughts.take(), self.list.last_mut()) {
            last.insert("reasoning_content".into(), json!(thoughts));
        }
    }
}
