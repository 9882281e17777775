//! `POST /v1/chat/completions`.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use host_wire::clock;
use serde_json::{Map, Value, json};

use super::answer::{End, Piece, Shown};
use super::ask::{Ask, check_model, not_empty};
use super::error::ApiError;
use super::fields::Fields;
use super::respond::{Prepared, Shape, serve};
use super::spoken::Spoken;
use super::tools::{self, Choice, Tools};
use super::{App, RequestId, Shared, logprobs, prompt};
use crate::text::Tokenizer;
use crate::text::reasoning::{Thoughts, closes_thoughts, opens_thoughts};

pub(super) async fn handle(
    State(app): Shared,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(&app, "/v1/chat/completions", id, request, prepare).await
}

/// Whether a request with this body would be carried out.
pub(super) fn is_accepted(app: &App, id: &RequestId, body: &[u8]) -> bool {
    prepare(app, id, body).is_ok()
}

fn prepare(app: &App, id: &RequestId, body: &[u8]) -> Result<Prepared<Chat>, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(app, &mut fields)?;
    let tools = Tools::take(app, &mut fields)?;
    Ask::refuse_unsupported(&mut fields)?;
    let mut ask = Ask::take(app, &mut fields, "seed")?;
    ask.take_stream(&mut fields)?;
    ask.take_caching(&mut fields)?;
    let old = fields.integer("max_tokens", 1..=i64::from(u32::MAX))?;
    let new = fields.integer("max_completion_tokens", 1..=i64::from(u32::MAX))?;
    if new.is_some() {
        ask.answer_field = "max_completion_tokens";
    }
    ask.max_new_tokens = new.or(old).and_then(|max| u32::try_from(max).ok());
    let logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=20)?.and_then(|count| u32::try_from(count).ok());
    ask.sampling.logprobs = match (logprobs, top) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            return Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs to be true"));
        }
    };
    let mut messages = messages(&mut fields)?;
    let has_calls = tools::prepare(&mut messages)?;
    let mut extra = fields.object("chat_template_kwargs", "chat_template_kwargs.")?.into_map();
    if let Some(add) = fields.boolean("add_generation_prompt")? {
        extra.insert("add_generation_prompt".into(), Value::Bool(add));
    }
    // The template writes the special tokens.
    fields.refuse_unless("add_special_tokens", |value| value == &Value::Bool(false))?;
    fields.refuse_rest(|_| None)?;
    if let Some(tools) = &tools {
        extra.insert("tools".into(), tools.given.clone());
    }
    let text = rendered(app, &messages, &extra, has_calls)?;
    // The template has written the special tokens itself.
    let prompt = not_empty("messages", prompt::encode(app, &text, false)?)?;
    let thoughts = app.text.dialect.thinks.then(|| Thoughts::after(&text));
    let reads = tools.as_ref().filter(|tools| tools.choice != Choice::None).zip(app.text.calls());
    if let Some((tools, format)) = reads
        && let Some(grammar) = tools.grammar(format)?
    {
        if ask.grammar.is_some() {
            let message =
                "response_format and a tool_choice that demands a call exclude each other: give one";
            return Err(ApiError::field("tool_choice", message));
        }
        ask.grammar = Some(grammar);
    }
    if let Some(grammar) = ask.grammar.as_ref().filter(|_| thoughts.is_some() && !closes_thoughts(&text)) {
        ask.grammar = Some(grammar.after_thoughts(opens_thoughts(&text)));
    }
    let most = if tools.as_ref().is_some_and(|tools| tools.parallel) { usize::MAX } else { 1 };
    let reader = reads.map(|(tools, format)| format.reader(&tools.names()));
    let shape = Chat {
        id: format!("chatcmpl-{}", id.0),
        created: clock::unix_seconds(),
        model: app.model.clone(),
        logprobs,
        include_usage: ask.include_usage,
        begun: false,
        thinks: thoughts.is_some(),
        // A call of a named tool ends as text does, with OpenAI too.
        named: reads.is_some_and(|(tools, _)| matches!(tools.choice, Choice::Named(_))),
        spoken: Spoken::new(thoughts, reader, most),
        waiting: Vec::new(),
    };
    Ok(Prepared { prompt, ask, shape })
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

/// What the template makes of messages.
fn rendered(
    app: &App,
    messages: &Value,
    extra: &Map<String, Value>,
    has_calls: bool,
) -> Result<String, ApiError> {
    let Some(template) = &app.text.template else {
        let message = format!(
            "model {:?} has no chat template: use /v1/completions, or add chat_template.jinja to the model's folder",
            app.model
        );
        return Err(ApiError::invalid(message));
    };
    if has_calls && !template.takes_calls() {
        let message = format!(
            "model {:?} cannot be told of calls of tools and their results: its chat template has no place for them",
            app.model
        );
        return Err(ApiError::field("messages", message));
    }
    Ok(template.render(messages, extra, clock::unix_seconds())?)
}

struct Chat {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    include_usage: bool,
    /// The event with the role was sent.
    begun: bool,
    thinks: bool,
    /// The request named the tool to call.
    named: bool,
    spoken: Spoken,
    /// Tokens whose log probabilities wait for an event.
    waiting: Vec<Shown>,
}

impl Chat {
    fn object(&self, kind: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn event(&self, delta: Value, logprobs: Option<Value>, reason: Option<&str>) -> Value {
        let choices = json!([{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]);
        let mut event = self.object("chat.completion.chunk", choices);
        if self.include_usage {
            event["usage"] = Value::Null;
        }
        event
    }

    fn begin(&mut self) -> Vec<Value> {
        if std::mem::replace(&mut self.begun, true) {
            return Vec::new();
        }
        vec![self.event(json!({"role": "assistant", "content": ""}), None, None)]
    }

    /// One event for each delta; the first has the log probabilities of all tokens that wait.
    fn deltas(&mut self, tokenizer: &dyn Tokenizer, mut deltas: Vec<Value>, last: bool) -> Vec<Value> {
        if deltas.is_empty() && !self.waiting.is_empty() && (last || self.spoken.is_plain()) {
            deltas.push(json!({"content": ""}));
        }
        let shown = if deltas.is_empty() { Vec::new() } else { std::mem::take(&mut self.waiting) };
        let mut logprobs = self.logprobs.then(|| logprobs::of_chat(tokenizer, &shown));
        deltas.into_iter().map(|delta| self.event(delta, logprobs.take(), None)).collect()
    }

    fn reason(&self, end: &End) -> &'static str {
        if end.reason == "stop" && self.spoken.calls() > 0 && !self.named { "tool_calls" } else { end.reason }
    }
}

impl Shape for Chat {
    fn piece(&mut self, tokenizer: &dyn Tokenizer, piece: Piece) -> Vec<Value> {
        let mut events = self.begin();
        self.waiting.extend(piece.shown);
        let deltas = self.spoken.push(&piece.text);
        events.extend(self.deltas(tokenizer, deltas, false));
        events
    }

    fn end(&mut self, tokenizer: &dyn Tokenizer, end: &End) -> Vec<Value> {
        let mut events = self.begin();
        let rest = self.spoken.finish();
        events.extend(self.deltas(tokenizer, rest, true));
        events.push(self.event(json!({}), None, Some(self.reason(end))));
        if self.include_usage {
            let mut usage = self.object("chat.completion.chunk", json!([]));
            usage["usage"] = end.usage();
            events.push(usage);
        }
        events
    }

    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Piece, end: &End) -> Value {
        let logprobs = self.logprobs.then(|| logprobs::of_chat(tokenizer, &all.shown));
        let message = self.spoken.whole(&all.text).message(self.thinks);
        let mut answer = self.object(
            "chat.completion",
            json!([{
                "index": 0,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": self.reason(end),
            }]),
        );
        answer["usage"] = end.usage();
        answer
    }
}
