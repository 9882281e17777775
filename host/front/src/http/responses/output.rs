//! The items of a response, and the events that build them up on the client's side.

use serde::ser::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::http::answer::Shown;
use crate::http::logprobs::{With, list};
use crate::http::respond::Event;
use crate::http::spoken::Said;
use crate::http::tools::Namespaces;
use crate::text::Tokenizer;
use crate::text::held::Held;

/// The items of one response. A stream and a whole answer are built by the same steps.
pub(super) struct Output {
    /// The request's id, from which ids of items are made.
    id: String,
    /// Number of the next event.
    sequence: u64,
    /// Those that are complete.
    items: Vec<Item>,
    open: Option<Open>,
    /// White space that belongs to the next text, if one comes.
    space: Held,
    /// Whether log probabilities are sent.
    logprobs: bool,
    /// Those of tokens whose text is not told yet.
    shown: Vec<Shown>,
    reasoning_tokens: usize,
    /// Whether events are left out, because the answer is sent at once.
    is_quiet: bool,
    /// Tools whose names the client writes with a namespace.
    namespaces: Namespaces,
}

/// An item that is complete.
pub(super) struct Item {
    id: String,
    status: &'static str,
    content: Open,
}

/// The item that grows.
enum Open {
    Thoughts(String),
    Text { text: String, shown: Vec<Shown> },
    Call { call_id: String, namespace: Option<String>, name: String, arguments: String },
}

impl Output {
    pub fn new(id: String, logprobs: bool, namespaces: Namespaces) -> Self {
        Self {
            id,
            sequence: 0,
            items: Vec::new(),
            open: None,
            space: Held::default(),
            logprobs,
            shown: Vec::new(),
            reasoning_tokens: 0,
            is_quiet: false,
            namespaces,
        }
    }

    /// Makes only items from here on. Events are empty.
    pub fn be_quiet(&mut self) {
        self.is_quiet = true;
    }

    /// The items that are complete, to be written.
    pub fn items<'a>(&'a self, tokenizer: &'a dyn Tokenizer) -> Vec<impl Serialize + use<'a>> {
        self.items.iter().map(|item| item.object(tokenizer, self.logprobs)).collect()
    }

    /// The items that are complete, to be written without log probabilities.
    pub fn texts<'a>(&'a self, tokenizer: &'a dyn Tokenizer) -> Vec<impl Serialize + use<'a>> {
        self.items.iter().map(|item| item.object(tokenizer, false)).collect()
    }

    /// Tokens of the thoughts.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// The next event, of this type.
    pub fn event(&mut self, kind: &'static str, event: Value) -> Event {
        let fields = self.fields(kind, event);
        Event::Value(if self.is_quiet { Value::Null } else { Value::Object(fields) })
    }

    /// The next event, of this type. Its field `name`, which has a placeholder, is written from `value`.
    fn event_with(
        &mut self,
        kind: &'static str,
        event: Value,
        name: &'static str,
        value: impl Serialize,
    ) -> Event {
        let object = self.fields(kind, event);
        if self.is_quiet {
            return Event::Value(Value::Null);
        }
        Event::written(Some(kind), &With { object: &object, name, value })
    }

    /// The number of the next event.
    pub fn next_number(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence - 1
    }

    /// The fields of the next event.
    fn fields(&mut self, kind: &'static str, event: Value) -> Map<String, Value> {
        let mut fields = map(event);
        fields.insert("type".into(), json!(kind));
        fields.insert("sequence_number".into(), json!(self.next_number()));
        fields
    }

    /// Adds what was said, with its tokens that show, if log probabilities are wanted, and the number of tokens that were thoughts.
    pub fn push(
        &mut self,
        tokenizer: &dyn Tokenizer,
        said: Vec<Said>,
        shown: Vec<Shown>,
        reasoning_tokens: usize,
    ) -> Vec<Event> {
        self.reasoning_tokens += reasoning_tokens;
        self.shown.extend(shown);
        let mut events = Vec::new();
        for said in said {
            match said {
                Said::Thoughts(text) => events.extend(self.thoughts(tokenizer, &text)),
                Said::Text(text) => events.extend(self.text(tokenizer, &text)),
                Said::Call { id, name, .. } => {
                    self.space = Held::default();
                    events.extend(self.close(tokenizer, "completed"));
                    let (namespace, name) = match self.namespaces.get(&name) {
                        Some(place) => (Some(place.namespace.clone()), place.name.clone()),
                        None => (None, name),
                    };
                    let call = Open::Call { call_id: id, namespace, name, arguments: String::new() };
                    events.extend(self.open(call));
                }
                Said::Arguments { text, .. } => events.extend(self.arguments(&text)),
            }
        }
        events
    }

    /// Ends the last item. `cut`: it is not complete.
    pub fn finish(&mut self, tokenizer: &dyn Tokenizer, cut: bool) -> Vec<Event> {
        let mut events = Vec::new();
        if self.open.is_none() && self.items.is_empty() {
            // An answer has an item, even if it says nothing.
            events.extend(self.open(Open::Text { text: String::new(), shown: Vec::new() }));
            let space = self.space.take();
            events.extend(self.text_delta(tokenizer, &space));
        } else if !self.shown.is_empty() {
            events.extend(self.text_delta(tokenizer, ""));
        }
        events.extend(self.close(tokenizer, if cut { "incomplete" } else { "completed" }));
        events
    }

    fn thoughts(&mut self, tokenizer: &dyn Tokenizer, more: &str) -> Vec<Event> {
        let mut events = Vec::new();
        if !matches!(self.open, Some(Open::Thoughts(_))) {
            events.extend(self.close(tokenizer, "completed"));
            events.extend(self.open(Open::Thoughts(String::new())));
        }
        if let Some(Open::Thoughts(text)) = &mut self.open {
            text.push_str(more);
        }
        let delta = self.of_part(json!({"delta": more}));
        events.push(self.event("response.reasoning_text.delta", delta));
        events
    }

    fn text(&mut self, tokenizer: &dyn Tokenizer, more: &str) -> Vec<Event> {
        if matches!(self.open, Some(Open::Text { .. })) {
            return self.text_delta(tokenizer, more);
        }
        self.space.push(more);
        if self.space.skip_space().is_empty() {
            return Vec::new();
        }
        let text = self.space.take();
        let mut events = self.close(tokenizer, "completed");
        events.extend(self.open(Open::Text { text: String::new(), shown: Vec::new() }));
        events.extend(self.text_delta(tokenizer, &text));
        events
    }

    /// Adds to the text that is open; nothing without one, or without anything to add.
    fn text_delta(&mut self, tokenizer: &dyn Tokenizer, more: &str) -> Vec<Event> {
        let Some(Open::Text { text, shown }) = &mut self.open else { return Vec::new() };
        if more.is_empty() && self.shown.is_empty() {
            return Vec::new();
        }
        text.push_str(more);
        let new = std::mem::take(&mut self.shown);
        shown.extend_from_slice(&new);
        let delta = self.of_part(json!({"delta": more, "logprobs": null}));
        vec![self.event_with("response.output_text.delta", delta, "logprobs", list(tokenizer, &new))]
    }

    fn arguments(&mut self, more: &str) -> Vec<Event> {
        let Some(Open::Call { arguments, .. }) = &mut self.open else { return Vec::new() };
        arguments.push_str(more);
        let delta = self.of_item(json!({"delta": more}));
        vec![self.event("response.function_call_arguments.delta", delta)]
    }

    fn open(&mut self, open: Open) -> Vec<Event> {
        let item = open.bare_item(&self.item_id(&open), "in_progress");
        let part = open.bare_part();
        self.open = Some(open);
        let index = self.items.len();
        let mut events =
            vec![self.event("response.output_item.added", json!({"output_index": index, "item": item}))];
        if let Some(part) = part {
            let added = self.of_part(json!({"part": part}));
            events.push(self.event("response.content_part.added", added));
        }
        events
    }

    /// Ends the item that is open, if there is one.
    fn close(&mut self, tokenizer: &dyn Tokenizer, status: &'static str) -> Vec<Event> {
        let mut events = Vec::new();
        if let Some(Open::Call { arguments, .. }) = &self.open
            && arguments.is_empty()
            && status == "completed"
        {
            // Clients read arguments as JSON, so absent arguments become an empty object.
            events.extend(self.arguments("{}"));
        }
        let Some(open) = &self.open else { return events };
        match open {
            Open::Thoughts(text) => {
                let done = self.of_part(json!({"text": text}));
                events.push(self.event("response.reasoning_text.done", done));
            }
            Open::Text { text, .. } => {
                let done = self.of_part(json!({"text": text, "logprobs": null}));
                let open = self.open.take();
                if let Some(Open::Text { shown, .. }) = &open {
                    let logprobs = list(tokenizer, shown);
                    events.push(self.event_with("response.output_text.done", done, "logprobs", logprobs));
                }
                self.open = open;
            }
            Open::Call { name, arguments, .. } => {
                let done = self.of_item(json!({"name": name, "arguments": arguments}));
                events.push(self.event("response.function_call_arguments.done", done));
            }
        }
        let done = self.of_part(json!({"part": null}));
        let Some(content) = self.open.take() else { return events };
        if let Some(part) = content.part(tokenizer, self.logprobs) {
            events.push(self.event_with("response.content_part.done", done, "part", part));
        }
        let item = Item { id: self.item_id(&content), status, content };
        let done = json!({"output_index": self.items.len(), "item": null});
        let object = item.object(tokenizer, self.logprobs);
        events.push(self.event_with("response.output_item.done", done, "item", object));
        self.items.push(item);
        events
    }

    /// Fields of an event about the item that is open.
    fn of_item(&self, mut event: Value) -> Value {
        event["output_index"] = json!(self.items.len());
        if let Some(open) = &self.open {
            event["item_id"] = json!(self.item_id(open));
        }
        event
    }

    /// Fields of an event about its only part.
    fn of_part(&self, mut event: Value) -> Value {
        event["content_index"] = json!(0);
        self.of_item(event)
    }

    /// The id of the next item, which is another one than that of a call.
    fn item_id(&self, open: &Open) -> String {
        let kind = match open {
            Open::Thoughts(_) => "rs",
            Open::Text { .. } => "msg",
            Open::Call { .. } => "fc",
        };
        format!("{kind}_{}_{}", self.id, self.items.len())
    }
}

impl Item {
    /// The item, to be written.
    fn object<'a>(&'a self, tokenizer: &'a dyn Tokenizer, with_logprobs: bool) -> Object<'a> {
        let part = self.content.part(tokenizer, with_logprobs);
        Object { fields: map(self.content.bare_item(&self.id, self.status)), part }
    }
}

impl Open {
    /// The item without its content, which follows or is written into its place.
    fn bare_item(&self, id: &str, status: &str) -> Value {
        let mut item = match self {
            Self::Thoughts(_) => json!({"type": "reasoning", "summary": [], "content": []}),
            Self::Text { .. } => json!({"type": "message", "role": "assistant", "content": []}),
            Self::Call { call_id, name, arguments, .. } => {
                json!({"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})
            }
        };
        if let Self::Call { namespace: Some(namespace), .. } = self {
            item["namespace"] = json!(namespace);
        }
        item["id"] = json!(id);
        item["status"] = json!(status);
        item
    }

    /// The only part of its content, as it begins.
    fn bare_part(&self) -> Option<Value> {
        match self {
            Self::Thoughts(_) => Some(json!({"type": "reasoning_text", "text": ""})),
            Self::Text { .. } => {
                Some(json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []}))
            }
            Self::Call { .. } => None,
        }
    }

    /// The only part of its content, to be written.
    fn part<'a>(&'a self, tokenizer: &'a dyn Tokenizer, with_logprobs: bool) -> Option<ContentPart<'a>> {
        let mut fields = map(self.bare_part()?);
        let (text, shown): (&str, &[Shown]) = match self {
            Self::Thoughts(text) => (text, &[]),
            Self::Text { text, shown } => (text, if with_logprobs { shown } else { &[] }),
            Self::Call { .. } => return None,
        };
        fields.insert("text".into(), Value::from(text));
        Some(ContentPart { fields, tokenizer, shown })
    }
}

/// A part of an item's content.
struct ContentPart<'a> {
    fields: Map<String, Value>,
    tokenizer: &'a dyn Tokenizer,
    /// Tokens whose log probabilities are told.
    shown: &'a [Shown],
}

impl Serialize for ContentPart<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let value = list(self.tokenizer, self.shown);
        With { object: &self.fields, name: "logprobs", value }.serialize(serializer)
    }
}

/// An item with its content.
struct Object<'a> {
    fields: Map<String, Value>,
    part: Option<ContentPart<'a>>,
}

impl Serialize for Object<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let value: Vec<&ContentPart<'_>> = self.part.iter().collect();
        With { object: &self.fields, name: "content", value }.serialize(serializer)
    }
}

/// The fields of an object.
fn map(object: Value) -> Map<String, Value> {
    match object {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::ByteTokenizer;
    use crate::text::work::steps;

    /// The items that these texts make, as JSON.
    fn items<'a>(texts: impl IntoIterator<Item = &'a str>) -> Value {
        let tokenizer = ByteTokenizer::new(300);
        let mut output = Output::new("r".to_owned(), false, Namespaces::default());
        for text in texts {
            output.push(&tokenizer, vec![Said::Text(text.to_owned())], Vec::new(), 0);
        }
        output.finish(&tokenizer, false);
        json!(output.texts(&tokenizer))
    }

    #[test]
    fn held_white_space_is_looked_at_once() {
        let answer = " ".repeat(20_000) + "x";
        let (taken, letters) = steps(|| items(answer.split("")));
        assert_eq!(letters[0]["content"][0]["text"], answer.as_str());
        assert_eq!(letters, items([answer.as_str()]));
        assert!(taken <= 4 * answer.len(), "{taken} steps for {} bytes", answer.len());
    }
}
