//! `POST /v1/chat/completions`.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use host_wire::clock;
use serde_json::{Value, json};

use super::answer::{End, Piece, Shown, joined, stop_reason};
use super::ask::{Ask, check_model};
use super::conversation::{Conversation, Turn};
use super::error::ApiError;
use super::fields::Fields;
use super::record::Usage;
use super::respond::{Item, Prepared, Shape, serve};
use super::spoken::{Said, Spoken};
use super::tools::{Choice, Spelling, Tools};
use super::{App, RequestId, Shared, logprobs};
use crate::text::Tokenizer;

pub(super) async fn handle(
    State(app): Shared,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(&app, "/v1/chat/completions", id, request, prepare).await
}

/// Whether a request with this body would be carried out.
pub(super) fn is_accepted(app: &App, id: &RequestId, body: &[u8]) -> bool {
    prepare(app, id, body).is_ok_and(|prepared| prepared.compiles(app))
}

fn prepare(app: &App, id: &RequestId, body: &[u8]) -> Result<Prepared<Chat>, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(app, &mut fields)?;
    let tools = Tools::take(app, &mut fields, Spelling::Nested)?;
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
    let conversation = Conversation::take(&mut fields)?;
    // The template writes the special tokens.
    fields.refuse_unless("add_special_tokens", |value| value == &Value::Bool(false))?;
    fields.refuse_rest(|_| None)?;
    let turn = Turn::new(app, conversation, tools.as_ref(), &mut ask)?;
    let answer = || Answer { begun: false, spoken: turn.spoken(), waiting: Vec::new() };
    let shape = Chat {
        id: format!("chatcmpl-{}", id.0),
        created: clock::unix_seconds(),
        model: app.model.clone(),
        logprobs,
        include_usage: ask.include_usage,
        cache_details: ask.cache_details,
        thinks: app.text.dialect.thinks,
        // A call of a named tool ends as text does, with OpenAI too.
        named: tools.is_some_and(|tools| matches!(tools.choice, Choice::Named(_))),
        answers: (0..ask.n).map(|_| answer()).collect(),
    };
    Ok(Prepared { items: vec![Item { prompt: turn.prompt, ask }], shape })
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
    fn deltas(&mut self, number: usize, tokenizer: &dyn Tokenizer, said: &[Said], last: bool) -> Vec<Value> {
        let Some(answer) = self.answers.get_mut(number) else { return Vec::new() };
        let mut deltas: Vec<Value> = said.iter().map(Said::delta).collect();
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
        let said = answer.spoken.push(&piece.text);
        events.extend(self.deltas(number, tokenizer, &said, false));
        events
    }

    fn end(&mut self, number: usize, tokenizer: &dyn Tokenizer, end: &End) -> Vec<Value> {
        let mut events = self.begin(number);
        let Some(answer) = self.answers.get_mut(number) else { return events };
        let rest = answer.spoken.finish();
        events.extend(self.deltas(number, tokenizer, &rest, true));
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

    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Vec<(Vec<Piece>, End)>, usage: &Usage) -> Value {
        let mut choices = Vec::new();
        for (number, (pieces, end)) in all.iter().enumerate() {
            let Some(answer) = self.answers.get_mut(number) else { break };
            let piece = joined(pieces);
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
