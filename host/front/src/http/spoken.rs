//! What a chat answer says, taken apart: thoughts, text, calls of tools.

use host_wire::random::random_u64;
use serde_json::{Map, Value, json};

use crate::text::calls::{CallReader, Part};
use crate::text::reasoning::{Split, Thoughts};

/// Takes an answer's text apart. The same for an answer in pieces and as a whole.
pub(super) struct Spoken {
    thoughts: Option<Thoughts>,
    calls: Option<Box<dyn CallReader>>,
    /// Most calls that are passed on.
    most: usize,
    /// Calls that have begun; those beyond `most` too.
    count: usize,
}

/// A whole answer.
#[derive(Debug, Default)]
pub(super) struct Whole {
    pub thoughts: String,
    pub text: String,
    /// With their names, ids and arguments.
    pub calls: Vec<Value>,
}

impl Spoken {
    /// Reads calls with `calls` and passes on at most so many; takes thoughts off with `thoughts`.
    pub fn new(thoughts: Option<Thoughts>, calls: Option<Box<dyn CallReader>>, most: usize) -> Self {
        Self { thoughts, calls, most, count: 0 }
    }

    /// Text is all that it says: nothing is held back.
    pub fn is_plain(&self) -> bool {
        self.thoughts.is_none() && self.calls.is_none()
    }

    /// Calls that were passed on.
    pub fn calls(&self) -> usize {
        self.count.min(self.most)
    }

    /// What OpenAI calls the deltas of a piece of text.
    pub fn push(&mut self, text: &str) -> Vec<Value> {
        let split = match &mut self.thoughts {
            Some(thoughts) => thoughts.push(text),
            None => Split { thoughts: String::new(), text: text.to_owned() },
        };
        self.deltas(split, false)
    }

    /// The deltas of what was held back.
    pub fn finish(&mut self) -> Vec<Value> {
        let split = self.thoughts.as_mut().map(Thoughts::finish).unwrap_or_default();
        self.deltas(split, true)
    }

    fn deltas(&mut self, split: Split, last: bool) -> Vec<Value> {
        let mut deltas = Vec::new();
        if !split.thoughts.is_empty() {
            deltas.push(json!({"reasoning_content": split.thoughts}));
        }
        let mut parts = match &mut self.calls {
            Some(reader) => reader.push(&split.text),
            None if split.text.is_empty() => Vec::new(),
            None => vec![Part::Text(split.text)],
        };
        if let Some(reader) = self.calls.as_mut().filter(|_| last) {
            parts.extend(reader.finish());
        }
        for part in parts {
            match part {
                Part::Text(text) => deltas.push(json!({"content": text})),
                Part::Call(name) => {
                    self.count += 1;
                    if self.count <= self.most {
                        // All of the name at once, and an id that no later piece repeats: clients join pieces.
                        let function = json!({"name": name, "arguments": ""});
                        deltas.push(json!({"tool_calls": [{
                            "index": self.count - 1, "id": id(), "type": "function", "function": function,
                        }]}));
                    }
                }
                Part::Arguments(text) if self.count <= self.most => {
                    deltas.push(json!({"tool_calls": [{
                        "index": self.count - 1, "function": {"arguments": text},
                    }]}));
                }
                Part::Arguments(_) => {}
            }
        }
        deltas
    }

    /// All of an answer.
    pub fn whole(&mut self, text: &str) -> Whole {
        let mut whole = Whole::default();
        let mut deltas = self.push(text);
        deltas.extend(self.finish());
        for delta in deltas {
            whole.add(&delta);
        }
        whole
    }
}

impl Whole {
    fn add(&mut self, delta: &Value) {
        let text = |name: &str| delta.get(name).and_then(Value::as_str).unwrap_or_default();
        self.thoughts.push_str(text("reasoning_content"));
        self.text.push_str(text("content"));
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            let more = call["function"]["arguments"].as_str().unwrap_or_default();
            match self.calls.last_mut().filter(|_| call.get("id").is_none()) {
                Some(last) => {
                    let all = last["function"]["arguments"].as_str().unwrap_or_default().to_owned() + more;
                    last["function"]["arguments"] = Value::from(all);
                }
                None => self.calls.push(json!({
                    "id": call["id"], "type": "function", "function": call["function"],
                })),
            }
        }
    }

    /// OpenAI's message.
    pub fn message(self, thinks: bool) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), json!("assistant"));
        let no_text = self.text.is_empty() && !self.calls.is_empty();
        message.insert("content".into(), if no_text { Value::Null } else { Value::from(self.text) });
        message.insert("refusal".into(), Value::Null);
        if thinks {
            let none = self.thoughts.is_empty();
            let thoughts = if none { Value::Null } else { Value::from(self.thoughts) };
            message.insert("reasoning_content".into(), thoughts);
        }
        if !self.calls.is_empty() {
            message.insert("tool_calls".into(), Value::from(self.calls));
        }
        Value::Object(message)
    }
}

/// A new id of a call.
fn id() -> String {
    let part = || random_u64().unwrap_or_default();
    format!("call_{:016x}{:08x}", part(), part() >> 32)
}
