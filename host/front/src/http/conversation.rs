//! Turns a conversation into a prompt, and reads the answer to it.

use host_wire::clock;
use serde_json::{Map, Value, json};

use super::ask::{Ask, not_empty};
use super::error::ApiError;
use super::fields::{Fields, empty};
use super::spoken::Spoken;
use super::text_work::LONGEST_TEXT;
use super::tools::{self, Choice, Tools};
use super::{App, prompt};
use crate::text::TextError;
use crate::text::calls::Readers;
use crate::text::reasoning::{Thoughts, closes_thoughts, opens_thoughts};
use crate::text::template::LONGEST_PROMPT;

/// Most messages and calls of a conversation. A template may copy its whole text so far for each, so its work can grow with the
/// square of this number.
pub(super) const MOST_MESSAGES: usize = 4096;

/// The input of a chat template.
pub(super) struct Conversation {
    /// The name of the field that has the conversation.
    pub field: &'static str,
    /// A list of objects with `role` and `content`.
    pub messages: Value,
    /// Whether there are tool calls or tool results among the messages.
    pub has_calls: bool,
    /// Variables that the request adds to the template's input.
    pub extra: Map<String, Value>,
}

/// A conversation as the model gets it, and how its answer is read.
pub(super) struct Turn {
    pub prompt: Vec<u32>,
    thoughts: Option<Thoughts>,
    /// The format of the calls, and the tools.
    calls: Option<Readers>,
    /// Most calls that are passed on to the client.
    most_calls: usize,
}

impl Conversation {
    /// Takes the conversation from the fields of a chat request.
    ///
    /// # Errors
    /// When a field is wrong.
    pub fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let mut messages = messages(fields)?;
        let has_calls = tools::prepare(&mut messages)?;
        let mut extra = variables(fields)?;
        if let Some(add) = fields.boolean("add_generation_prompt")? {
            extra.insert("add_generation_prompt".into(), Value::Bool(add));
        }
        if let Some(effort) = fields.string("reasoning_effort")? {
            think(&mut extra, effort);
        }
        Ok(Self { field: "messages", messages, has_calls, extra })
    }

    /// Gives the tools of the request, if it has some, to the template.
    pub fn offer(&mut self, tools: Option<&Tools>) {
        if let Some(tools) = tools {
            self.extra.insert("tools".into(), tools.given.clone());
        }
    }

    /// The tokens of the conversation. `special`: with the special tokens that a plain prompt also gets. `most`: the longest text, in
    /// bytes, that may be made of it in the turn for text work that the request has.
    ///
    /// # Errors
    /// When the model has no template, its template refuses the messages, or the text is too long.
    pub fn tokens(mut self, app: &App, special: bool, most: usize) -> Result<Vec<u32>, ApiError> {
        not_empty(self.field, prompt::encode(app, &self.rendered(app, most)?, special)?)
    }

    /// The text that the template makes of the conversation, of at most so many bytes.
    fn rendered(&mut self, app: &App, most: usize) -> Result<String, ApiError> {
        let Some(template) = &app.text.template else {
            let add = match app.about.model_path {
                Some(_) => ", or add chat_template.jinja to the model's folder",
                None => "",
            };
            let message = format!("model {:?} has no chat template: use /v1/completions{add}", app.model);
            return Err(ApiError::invalid(message));
        };
        let calls = |message: &Value| message["tool_calls"].as_array().map_or(0, Vec::len);
        let count: usize =
            self.messages.as_array().into_iter().flatten().map(|message| 1 + calls(message)).sum();
        if count > MOST_MESSAGES {
            let message =
                format!("{} has {count} messages and calls; at most {MOST_MESSAGES} are taken", self.field);
            return Err(ApiError::field(self.field, message));
        }
        if self.has_calls && !template.takes_calls() {
            let message = format!(
                "model {:?} cannot be told of calls of tools and their results: its chat template has no place for them",
                app.model
            );
            return Err(ApiError::field(self.field, message));
        }
        if !template.knows("developer") {
            // `developer` is OpenAI's newer name of the role `system`. A template that does not know the name would leave the
            // message out.
            for message in self.messages.as_array_mut().into_iter().flatten() {
                if message["role"] == "developer" {
                    message["role"] = json!("system");
                }
            }
        }
        let limit = app.max_body.clamp(LONGEST_TEXT, LONGEST_PROMPT);
        let most = most.min(limit);
        let text = template.render_within(&self.messages, &self.extra, clock::unix_seconds(), most);
        text.map_err(|error| match error {
            TextError::TooLong(_) => ApiError::long_text(self.field, most, most < limit),
            other => other.into(),
        })
    }
}

/// The client's variables for the template.
///
/// # Errors
/// When they are not an object, or have too many entries in lists and objects: a template may do as much for each as for a message.
pub(super) fn variables(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    const FIELD: &str = "chat_template_kwargs";
    let mut variables = fields.object(FIELD, "chat_template_kwargs.")?.into_map();
    if let Some(thinks) = fields.boolean("enable_thinking")? {
        variables.entry("enable_thinking").or_insert(json!(thinks));
    }
    let mut thinking = match fields.take("thinking").filter(|value| !empty(value)) {
        None => Fields::within("thinking.", Map::new()),
        Some(Value::Object(map)) => Fields::within("thinking.", map),
        Some(other) => return Err(fields.wrong("thinking", "a JSON object", &other)),
    };
    match thinking.string("type")?.as_deref() {
        None => {}
        // Templates have either name.
        Some(word @ ("enabled" | "disabled")) => {
            for name in ["enable_thinking", "thinking"] {
                variables.entry(name).or_insert(json!(word == "enabled"));
            }
        }
        Some(other) => return Err(thinking.wrong("type", "enabled or disabled", &json!(other))),
    }
    thinking.refuse_rest(|_| None)?;
    let entries: usize = variables.values().map(entries).sum();
    if entries > MOST_MESSAGES {
        let message = format!(
            "{FIELD} has lists and objects with {entries} entries; at most {MOST_MESSAGES} are taken"
        );
        return Err(ApiError::field(FIELD, message));
    }
    Ok(variables)
}

/// Gives the template the effort of thoughts, where the client's variables do not. Templates call it `reasoning_effort`, and switch
/// thoughts off with `enable_thinking`.
pub(super) fn think(variables: &mut Map<String, Value>, effort: String) {
    if effort == "none" {
        variables.entry("enable_thinking").or_insert(json!(false));
    }
    variables.entry("reasoning_effort").or_insert(json!(effort));
}

/// Entries of all lists and objects in a value.
fn entries(value: &Value) -> usize {
    match value {
        Value::Array(values) => values.iter().map(|value| 1 + entries(value)).sum(),
        Value::Object(values) => values.values().map(|value| 1 + entries(value)).sum(),
        _ => 0,
    }
}

impl Turn {
    /// Gives the tools to the template, and gives the request the grammar of the calls that it demands. `most`: see
    /// [`Conversation::tokens`].
    ///
    /// # Errors
    /// When the template refuses the conversation or makes too long a text of it, or when a call cannot be demanded.
    pub fn new(
        app: &App,
        mut conversation: Conversation,
        tools: Option<&Tools>,
        ask: &mut Ask,
        most: usize,
    ) -> Result<Self, ApiError> {
        conversation.offer(tools);
        let text = conversation.rendered(app, most)?;
        // The template itself has written the special tokens.
        let prompt = not_empty(conversation.field, prompt::encode(app, &text, false)?)?;
        let thinks = app.text.dialect.thinks;
        let reads = tools.filter(|tools| tools.choice != Choice::None).zip(app.text.calls());
        if let Some((tools, format)) = reads {
            if let Some((calls, parameters)) = tools.grammar(format)? {
                // The structure limits the text of an answer, and an answer with a call has none.
                ask.follow(calls, parameters);
            } else if let Some(either) = ask.grammar.as_ref().and_then(|answer| tools.or(format, answer)) {
                ask.follow(either, []);
            }
        }
        if let Some(grammar) = ask.grammar.as_ref().filter(|_| thinks && !closes_thoughts(&text)) {
            ask.grammar = Some(grammar.after_thoughts(opens_thoughts(&text)));
        }
        Ok(Self {
            prompt,
            thoughts: thinks.then(|| Thoughts::after(&text)),
            calls: reads.map(|(tools, format)| format.readers(&tools.functions)),
            most_calls: if tools.is_some_and(|tools| tools.parallel) { usize::MAX } else { 1 },
        })
    }

    /// Makes a reader that takes one answer apart.
    pub fn spoken(&self) -> Spoken {
        let calls = self.calls.as_ref().map(Readers::reader);
        Spoken::new(self.thoughts.clone(), calls, self.most_calls)
    }

    /// Bytes that the readers of so many answers keep of the request until the answers end.
    pub fn memory(&self, answers: usize) -> usize {
        self.calls.as_ref().map_or(0, |calls| calls.memory(answers))
    }
}

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// The messages as templates expect them: content as one string.
fn messages(fields: &mut Fields) -> Result<Value, ApiError> {
    let mut messages = match fields.take("messages") {
        Some(Value::Array(messages)) if !messages.is_empty() => messages,
        Some(other) => return Err(fields.wrong("messages", "a list of at least one message", &other)),
        None => return Err(ApiError::field("messages", "messages is missing")),
    };
    for (index, message) in messages.iter_mut().enumerate() {
        let at = |field: &str| format!("messages[{index}]{field}");
        let Value::Object(message) = message else {
            return Err(fields.wrong(&at(""), "an object", message));
        };
        match message.get("role") {
            Some(Value::String(role)) if ROLES.contains(&role.as_str()) => {}
            other => {
                let expected = format!("one of {}", ROLES.join(", "));
                return Err(fields.wrong(&at(".role"), expected, other.unwrap_or(&Value::Null)));
            }
        }
        let content = match message.get("content") {
            None | Some(Value::Null) if message.get("role") == Some(&json!("assistant")) => continue,
            Some(Value::String(_)) => continue,
            Some(Value::Array(parts)) => text_of(parts, &at(".content"), fields)?,
            other => {
                let got = other.unwrap_or(&Value::Null);
                return Err(fields.wrong(&at(".content"), "a string or a list of text parts", got));
            }
        };
        message.insert("content".into(), Value::String(content));
    }
    Ok(Value::Array(messages))
}

fn text_of(parts: &[Value], name: &str, fields: &Fields) -> Result<String, ApiError> {
    let texts: Result<Vec<&str>, ApiError> = parts
        .iter()
        .map(|part| {
            match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
                (Some("text"), Some(text)) => Ok(text),
                _ => {
                    Err(fields.wrong(name, "parts of type text (this server takes no images or sound)", part))
                }
            }
        })
        .collect();
    Ok(texts?.join("\n"))
}
