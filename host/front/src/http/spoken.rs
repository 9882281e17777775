//! Takes a chat answer apart: thoughts, text, calls of tools.

use host_wire::random::random_u64;
use serde_json::{Map, Value, json};

use crate::text::calls::{AnswerPart, CallReader};
use crate::text::reasoning::{Split, Thoughts};

/// Takes an answer's text apart. The result is the same for an answer in pieces and as a whole.
pub(super) struct Spoken {
    thoughts: Option<Thoughts>,
    /// Thoughts are parts of the text.
    in_text: bool,
    calls: Option<Box<dyn CallReader>>,
    /// Most calls that are passed on to the client.
    most: usize,
    /// Calls that have begun, including those beyond `most`.
    count: usize,
}

/// A piece of what an answer says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// More of the thoughts.
    Thoughts(String),
    /// More of the text.
    Text(String),
    /// A call begins, with its whole name. Calls are counted from 0.
    Call { index: usize, id: String, name: String },
    /// More of the arguments of the last call.
    Arguments { index: usize, text: String },
}

/// A whole answer.
#[derive(Debug, Default)]
pub(super) struct Whole {
    thoughts: String,
    text: String,
    calls: Vec<Call>,
}

#[derive(Debug)]
struct Call {
    id: String,
    name: String,
    /// A JSON object as text.
    arguments: String,
}

impl Spoken {
    /// Reads calls with `calls` and passes on at most `most` of them. Separates thoughts with `thoughts`.
    pub fn new(thoughts: Option<Thoughts>, calls: Option<Box<dyn CallReader>>, most: usize) -> Self {
        Self { thoughts, in_text: false, calls, most, count: 0 }
    }

    /// The same, but thoughts are passed on as text, as the model wrote them. Calls in them are not read.
    pub fn with_thoughts_in_text(self) -> Self {
        Self { in_text: true, ..self }
    }

    /// Whether the answer is text only, so that nothing is held back.
    pub fn is_plain(&self) -> bool {
        self.thoughts.is_none() && self.calls.is_none()
    }

    /// Whether the next text may belong to the thoughts.
    pub fn is_thinking(&self) -> bool {
        self.thoughts.as_ref().is_some_and(|thoughts| !thoughts.are_over())
    }

    /// Calls that were passed on.
    pub fn calls(&self) -> usize {
        self.count.min(self.most)
    }

    /// The parts of a piece of text, as far as they are certain.
    pub fn push(&mut self, text: &str) -> Vec<Said> {
        let split = match &mut self.thoughts {
            Some(thoughts) => thoughts.push(text),
            None => Split { text: text.to_owned(), ..Split::default() },
        };
        self.said(split, false)
    }

    /// The parts that were held back. Call it at the end of the answer.
    pub fn finish(&mut self) -> Vec<Said> {
        let split = self.thoughts.as_mut().map(Thoughts::finish).unwrap_or_default();
        self.said(split, true)
    }

    fn said(&mut self, split: Split, last: bool) -> Vec<Said> {
        let mut said = Vec::new();
        match self.in_text {
            true if !split.written.is_empty() => said.push(Said::Text(split.written)),
            false if !split.thoughts.is_empty() => said.push(Said::Thoughts(split.thoughts)),
            _ => {}
        }
        let mut parts = match &mut self.calls {
            Some(reader) => reader.push(&split.text),
            None if split.text.is_empty() => Vec::new(),
            None => vec![AnswerPart::Text(split.text)],
        };
        if let Some(reader) = self.calls.as_mut().filter(|_| last) {
            parts.extend(reader.finish());
        }
        for part in parts {
            match part {
                AnswerPart::Text(text) => said.push(Said::Text(text)),
                AnswerPart::Call(name) => {
                    self.count += 1;
                    if self.count <= self.most {
                        said.push(Said::Call { index: self.count - 1, id: id(), name });
                    }
                }
                AnswerPart::Arguments(text) if self.count <= self.most => {
                    said.push(Said::Arguments { index: self.count - 1, text });
                }
                AnswerPart::Arguments(_) => {}
            }
        }
        said
    }

    /// Takes a whole answer apart.
    pub fn whole(&mut self, text: &str) -> Whole {
        let mut whole = Whole::default();
        let mut said = self.push(text);
        said.extend(self.finish());
        for said in said {
            whole.add(said);
        }
        whole
    }
}

impl Said {
    /// The part as a delta of OpenAI's chat.
    pub fn delta(&self) -> Value {
        match self {
            Self::Thoughts(text) => json!({"reasoning_content": text}),
            Self::Text(text) => json!({"content": text}),
            Self::Call { index, id, name } => {
                // Clients join pieces, so no later piece repeats the id or the name.
                let function = json!({"name": name, "arguments": ""});
                json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]})
            }
            Self::Arguments { index, text } => {
                json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            }
        }
    }
}

impl Whole {
    fn add(&mut self, said: Said) {
        match said {
            Said::Thoughts(text) => self.thoughts.push_str(&text),
            Said::Text(text) => self.text.push_str(&text),
            Said::Call { id, name, .. } => self.calls.push(Call { id, name, arguments: String::new() }),
            Said::Arguments { text, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
            }
        }
    }

    /// The answer as a message of OpenAI's chat.
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
            let calls = self.calls.into_iter().map(|Call { id, name, arguments }| {
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            });
            message.insert("tool_calls".into(), calls.collect());
        }
        Value::Object(message)
    }
}

/// A new id of a call.
fn id() -> String {
    let part = || random_u64().unwrap_or_default();
    format!("call_{:016x}{:08x}", part(), part() >> 32)
}
