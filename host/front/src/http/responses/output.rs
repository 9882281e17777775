//! The items of a response, and the events that build them up on the client's side.

use serde_json::{Map, Value, json};

use crate::http::spoken::Said;

/// The items of one response. A stream and a whole answer are built by the same steps.
pub(super) struct Output {
    /// The request's id, from which ids of items are made.
    id: String,
    /// Number of the next event.
    sequence: u64,
    /// Those that are complete.
    items: Vec<Value>,
    open: Option<Open>,
    /// White space that belongs to the next text, if one comes.
    space: String,
    /// Log probabilities are told.
    logprobs: bool,
    /// Those of tokens whose text is not told yet.
    shown: Vec<Value>,
    reasoning_tokens: usize,
}

/// The item that grows.
enum Open {
    Thoughts(String),
    Text { text: String, logprobs: Vec<Value> },
    Call { call_id: String, name: String, arguments: String },
}

impl Output {
    pub fn new(id: String, logprobs: bool) -> Self {
        Self {
            id,
            sequence: 0,
            items: Vec::new(),
            open: None,
            space: String::new(),
            logprobs,
            shown: Vec::new(),
            reasoning_tokens: 0,
        }
    }

    /// The items that are complete.
    pub fn items(&self) -> &[Value] {
        &self.items
    }

    /// Tokens of the thoughts.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// The next event, of this type.
    pub fn event(&mut self, kind: &str, mut event: Value) -> Value {
        event["type"] = json!(kind);
        event["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        event
    }

    /// Adds what was said, with the log probabilities of its tokens, of which so many were thoughts.
    pub fn push(&mut self, said: Vec<Said>, shown: Vec<Value>, reasoning_tokens: usize) -> Vec<Value> {
        self.reasoning_tokens += reasoning_tokens;
        self.shown.extend(shown);
        let mut events = Vec::new();
        for said in said {
            match said {
                Said::Thoughts(text) => events.extend(self.thoughts(&text)),
                Said::Text(text) => events.extend(self.text(&text)),
                Said::Call { id, name, .. } => {
                    self.space.clear();
                    events.extend(self.close("completed"));
                    events.extend(self.open(Open::Call { call_id: id, name, arguments: String::new() }));
                }
                Said::Arguments { text, .. } => events.extend(self.arguments(&text)),
            }
        }
        events
    }

    /// Ends the last item. `cut`: it is not complete.
    pub fn finish(&mut self, cut: bool) -> Vec<Value> {
        let mut events = Vec::new();
        if self.open.is_none() && self.items.is_empty() {
            // An answer has an item, even if it says nothing.
            events.extend(self.open(Open::Text { text: String::new(), logprobs: Vec::new() }));
            let space = std::mem::take(&mut self.space);
            events.extend(self.text_delta(&space));
        } else if !self.shown.is_empty() {
            events.extend(self.text_delta(""));
        }
        events.extend(self.close(if cut { "incomplete" } else { "completed" }));
        events
    }

    fn thoughts(&mut self, more: &str) -> Vec<Value> {
        let mut events = Vec::new();
        if !matches!(self.open, Some(Open::Thoughts(_))) {
            events.extend(self.close("completed"));
            events.extend(self.open(Open::Thoughts(String::new())));
        }
        if let Some(Open::Thoughts(text)) = &mut self.open {
            text.push_str(more);
        }
        events.push(self.part_event("response.reasoning_text.delta", json!({"delta": more})));
        events
    }

    fn text(&mut self, more: &str) -> Vec<Value> {
        if matches!(self.open, Some(Open::Text { .. })) {
            return self.text_delta(more);
        }
        self.space.push_str(more);
        if self.space.trim().is_empty() {
            return Vec::new();
        }
        let text = std::mem::take(&mut self.space);
        let mut events = self.close("completed");
        events.extend(self.open(Open::Text { text: String::new(), logprobs: Vec::new() }));
        events.extend(self.text_delta(&text));
        events
    }

    /// Adds to the text that is open; nothing without one, or without anything to add.
    fn text_delta(&mut self, more: &str) -> Vec<Value> {
        let Some(Open::Text { text, logprobs }) = &mut self.open else { return Vec::new() };
        if more.is_empty() && self.shown.is_empty() {
            return Vec::new();
        }
        text.push_str(more);
        let shown = std::mem::take(&mut self.shown);
        logprobs.extend_from_slice(&shown);
        vec![self.part_event("response.output_text.delta", json!({"delta": more, "logprobs": shown}))]
    }

    fn arguments(&mut self, more: &str) -> Vec<Value> {
        let Some(Open::Call { arguments, .. }) = &mut self.open else { return Vec::new() };
        arguments.push_str(more);
        vec![self.item_event("response.function_call_arguments.delta", json!({"delta": more}))]
    }

    fn open(&mut self, open: Open) -> Vec<Value> {
        let item = self.item(&open, "in_progress", true);
        let part = open.part(true, self.logprobs);
        self.open = Some(open);
        let index = self.items.len();
        let mut events =
            vec![self.event("response.output_item.added", json!({"output_index": index, "item": item}))];
        if let Some(part) = part {
            events.push(self.part_event("response.content_part.added", json!({"part": part})));
        }
        events
    }

    /// Ends the item that is open, if there is one.
    fn close(&mut self, status: &str) -> Vec<Value> {
        let mut events = Vec::new();
        if let Some(Open::Call { arguments, .. }) = &self.open
            && arguments.is_empty()
            && status == "completed"
        {
            // Clients read them as JSON.
            events.extend(self.arguments("{}"));
        }
        let Some(open) = self.open.take() else { return events };
        match &open {
            Open::Thoughts(text) => {
                events.push(self.part_event("response.reasoning_text.done", json!({"text": text})));
            }
            Open::Text { text, logprobs } => {
                let done = json!({"text": text, "logprobs": logprobs});
                events.push(self.part_event("response.output_text.done", done));
            }
            Open::Call { name, arguments, .. } => {
                let done = json!({"name": name, "arguments": arguments});
                events.push(self.item_event("response.function_call_arguments.done", done));
            }
        }
        let item_id = self.item_id(&open);
        if let Some(part) = open.part(false, self.logprobs) {
            events.push(self.part_event("response.content_part.done", json!({"part": part})));
        }
        // What was open is gone, and its id with it.
        for event in &mut events {
            event["item_id"] = json!(item_id);
        }
        let item = self.item(&open, status, false);
        let index = self.items.len();
        events.push(self.event("response.output_item.done", json!({"output_index": index, "item": item})));
        self.items.push(item);
        events
    }

    /// An event about the item that is open.
    fn item_event(&mut self, kind: &str, mut event: Value) -> Value {
        event["output_index"] = json!(self.items.len());
        if let Some(open) = &self.open {
            event["item_id"] = json!(self.item_id(open));
        }
        self.event(kind, event)
    }

    /// An event about its only part.
    fn part_event(&mut self, kind: &str, mut event: Value) -> Value {
        event["content_index"] = json!(0);
        self.item_event(kind, event)
    }

    /// Its id, which is another one than that of a call.
    fn item_id(&self, open: &Open) -> String {
        let kind = match open {
            Open::Thoughts(_) => "rs",
            Open::Text { .. } => "msg",
            Open::Call { .. } => "fc",
        };
        format!("{kind}_{}_{}", self.id, self.items.len())
    }

    /// The item. `bare`: without its content, which follows.
    fn item(&self, open: &Open, status: &str, bare: bool) -> Value {
        let content: Vec<Value> = open.part(false, self.logprobs).filter(|_| !bare).into_iter().collect();
        let mut item = match open {
            Open::Thoughts(_) => json!({"type": "reasoning", "summary": [], "content": content}),
            Open::Text { .. } => json!({"type": "message", "role": "assistant", "content": content}),
            Open::Call { call_id, name, arguments } => {
                json!({"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})
            }
        };
        item["id"] = json!(self.item_id(open));
        item["status"] = json!(status);
        item
    }
}

impl Open {
    /// The only part of its content. `bare`: as it begins.
    fn part(&self, bare: bool, with_logprobs: bool) -> Option<Value> {
        match self {
            Self::Thoughts(text) => {
                Some(json!({"type": "reasoning_text", "text": if bare { "" } else { text }}))
            }
            Self::Text { text, logprobs } => {
                let mut part = Map::new();
                part.insert("type".into(), json!("output_text"));
                part.insert("text".into(), json!(if bare { "" } else { text }));
                part.insert("annotations".into(), json!([]));
                let told = if bare || !with_logprobs { Vec::new() } else { logprobs.clone() };
                part.insert("logprobs".into(), Value::from(told));
                Some(Value::Object(part))
            }
            Self::Call { .. } => None,
        }
    }
}
