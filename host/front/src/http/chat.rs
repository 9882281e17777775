//! `POST /v1/chat/completions`.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use host_wire::clock;
use serde_json::{Map, Value, json};

use super::answer::{End, Piece, Shown, stop_reason};
use super::ask::{Ask, check_model, not_empty};
use super::error::ApiError;
use super::fields::Fields;
use super::record::Usage;
use super::respond::{Item, Prepared, Shape, serve};
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
    ask.take_serving(&mut fields)?;
    let old = fields.integer("max_tokens", 1..=i64::from(u32::MAX))?;
    let new = fields.integer("max_completion_tokens", 1..=i64::from(u32::MAX))?;
    if new.is_some() {
        ask.answer_field = "max_completion_tokens";
    }
    ask.limit(new.or(old).and_then(|max| u32::try_from(max).ok()))?;
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
    let mut extra = for_template(&mut fields)?;
    // The template writes the special tokens.
    fields.refuse_unless("add_special_tokens", |value| value == &Value::Bool(false))?;
    fields.refuse_rest(|_| None)?;
    if let Some(tools) = &tools {
        extra.insert("tools".into(), tools.given.clone());
    }
    let text = rendered(app, &messages, &extra, has_calls)?;
    // The template has written the special tokens itself.
    let prompt = not_empty("messages", prompt::encode(app, &text, false)?)?;
    let thoughts = || app.text.dialect.thinks.then(|| Thoughts::after(&text));
    let thinks = app.text.dialect.thinks;
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
    if let Some(grammar) = ask.grammar.as_ref().filter(|_| thinks && !closes_thoughts(&text)) {
        ask.grammar = Some(grammar.after_thoughts(opens_thoughts(&text)));
    }
    let most = if tools.as_ref().is_some_and(|tools| tools.parallel) { usize::MAX } else { 1 };
    let answer = || Answer {
        begun: false,
        spoken: Spoken::new(thoughts(), reads.map(|(tools, format)| format.reader(&tools.names())), most),
        waiting: Vec::new(),
    };
    let shape = Chat {
        id: format!("chatcmpl-{}", id.0),
        created: clock::unix_seconds(),
        model: app.model.clone(),
        logprobs,
        include_usage: ask.include_usage,
        cache_details: ask.cache_details,
        thinks,
        // A call of a named tool ends as text does, with OpenAI too.
        named: reads.is_some_and(|(tools, _)| matches!(tools.choice, Choice::Named(_))),
        answers: (0..ask.n).map(|_| answer()).collect(),
    };
    Ok(Prepared { items: vec![Item { prompt, ask }], shape })
}

/// The tokens of a conversation. `special`: with those that a plain prompt is given, too.
pub(super) fn tokens(app: &App, fields: &mut Fields, special: bool) -> Result<Vec<u32>, ApiError> {
    let mut messages = messages(fields)?;
    let has_calls = tools::prepare(&mut messages)?;
    let extra = for_template(fields)?;
    let text = rendered(app, &messages, &extra, has_calls)?;
    not_empty("messages", prompt::encode(app, &text, special)?)
}

/// What a request adds to what its template sees.
fn for_template(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let mut extra = fields.object("chat_template_kwargs", "chat_template_kwargs.")?.into_map();
    if let Some(add) = fields.boolean("add_generation_prompt")? {
        extra.insert("add_generation_prompt".into(), Value::Bool(add));
    }
    Ok(extra)
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
    cache_details: bool,
    thinks: bool,
    /// The request named the tool to call.
    named: bool,
    /// As many as the request wants.
    answers: Vec<Answer>,
}

/// One of the answers to a request.
struct Answer {
    /// The event with the role was sent.
    begun: bool,
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

    fn event(&self, choice: Value) -> Value {
        let mut event = self.object("chat.completion.chunk", json!([choice]));
        if self.include_usage {
            event["usage"] = Value::Null;
        }
        event
    }

    fn delta(&self, number: usize, delta: Value, logprobs: Option<Value>) -> Value {
        self.event(json!({"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": null}))
    }

    fn begin(&mut self, number: usize) -> Vec<Value> {
        let Some(answer) = self.answers.get_mut(number) else { return Vec::new() };
        if std::mem::replace(&mut answer.begun, true) {
            return Vec::new();
        }
        vec![self.delta(number, json!({"role": "assistant", "content": ""}), None)]
    }

    /// One event for each delta; the first has the log probabilities of all tokens that wait.
    fn deltas(
        &mut self,
        number: usize,
        tokenizer: &dyn Tokenizer,
        mut deltas: Vec<Value>,
        last: bool,
    ) -> Vec<Value> {
        let Some(answer) = self.answers.get_mut(number) else { return Vec::new() };
        if deltas.is_empty() && !answer.waiting.is_empty() && (last || answer.spoken.is_plain()) {
            deltas.push(json!({"content": ""}));
        }
        let shown = if deltas.is_empty() { Vec::new() } else { std::mem::take(&mut answer.waiting) };
        let mut logprobs = self.logprobs.then(|| logprobs::of_chat(tokenizer, &shown));
        deltas.into_iter().map(|delta| self.delta(number, delta, logprobs.take())).collect()
    }

    fn reason(&self, number: usize, end: &End) -> &'static str {
        let calls = self.answers.get(number).is_some_and(|answer| answer.spoken.calls() > 0);
        if end.reason == "stop" && calls && !self.named { "tool_calls" } else { end.reason }
    }
}

impl Shape for Chat {
    fn piece(&mut self, number: usize, tokenizer: &dyn Tokenizer, piece: Piece) -> Vec<Value> {
        let mut events = self.begin(number);
        let Some(answer) = self.answers.get_mut(number) else { return events };
        answer.waiting.extend(piece.shown);
        let deltas = answer.spoken.push(&piece.text);
        events.extend(self.deltas(number, tokenizer, deltas, false));
        events
    }

    fn end(&mut self, number: usize, tokenizer: &dyn Tokenizer, end: &End) -> Vec<Value> {
        let mut events = self.begin(number);
        let Some(answer) = self.answers.get_mut(number) else { return events };
        let rest = answer.spoken.finish();
        events.extend(self.deltas(number, tokenizer, rest, true));
        let mut last = self.event(json!({
            "index": number,
            "delta": {},
            "logprobs": null,
            "finish_reason": self.reason(number, end),
            "stop_reason": stop_reason(end),
        }));
        if self.cache_details {
            last["sglext"] = end.cache_details();
        }
        events.push(last);
        events
    }

    fn close(&mut self, usage: &Usage) -> Vec<Value> {
        if !self.include_usage {
            return Vec::new();
        }
        let mut last = self.object("chat.completion.chunk", json!([]));
        last["usage"] = usage.json();
        vec![last]
    }

    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Vec<(Piece, End)>, usage: &Usage) -> Value {
        let mut choices = Vec::new();
        for (number, (piece, end)) in all.iter().enumerate() {
            let Some(answer) = self.answers.get_mut(number) else { break };
            let message = answer.spoken.whole(&piece.text).message(self.thinks);
            let logprobs = self.logprobs.then(|| logprobs::of_chat(tokenizer, &piece.shown));
            choices.push(json!({
                "index": number,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": self.reason(number, end),
                "stop_reason": stop_reason(end),
            }));
        }
        let mut answer = self.object("chat.completion", Value::Array(choices));
        answer["usage"] = usage.json();
        if let Some((_, end)) = all.first().filter(|_| self.cache_details) {
            answer["sglext"] = end.cache_details();
        }
        answer
    }
}
