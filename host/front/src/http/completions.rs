//! `POST /v1/completions`.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use host_wire::clock;
use serde_json::{Value, json};

use super::answer::{End, Piece};
use super::ask::{Ask, check_model, not_empty};
use super::error::ApiError;
use super::fields::Fields;
use super::respond::{Prepared, Shape, serve};
use super::{App, RequestId, Shared, logprobs, prompt};
use crate::text::Tokenizer;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: i64 = 16;

pub(super) async fn handle(
    State(app): Shared,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(&app, "/v1/completions", id, request, prepare).await
}

/// Whether a request with this body would be carried out.
pub(super) fn is_accepted(app: &App, id: &RequestId, body: &[u8]) -> bool {
    prepare(app, id, body).is_ok()
}

fn prepare(app: &App, id: &RequestId, body: &[u8]) -> Result<Prepared<Completion>, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(app, &mut fields)?;
    Ask::refuse_unsupported(&mut fields)?;
    let mut ask = Ask::take(app, &mut fields, "seed")?;
    ask.take_stream(&mut fields)?;
    ask.take_caching(&mut fields)?;
    let max = fields.integer("max_tokens", 1..=i64::from(u32::MAX))?.unwrap_or(DEFAULT_MAX_TOKENS);
    ask.max_new_tokens = u32::try_from(max).ok();
    ask.sampling.logprobs = fields.integer("logprobs", 0..=5)?.and_then(|count| u32::try_from(count).ok());
    // Texts are always given the special tokens that the model begins with.
    fields.refuse_unless("add_special_tokens", |value| value == &Value::Bool(true))?;
    let prompt = fields.take("prompt");
    fields.refuse_rest(|_| None)?;
    let prompt = not_empty("prompt", read_prompt(app, prompt)?)?;
    let shape = Completion {
        id: format!("cmpl-{}", id.0),
        created: clock::unix_seconds(),
        model: app.model.clone(),
        logprobs: ask.sampling.logprobs.is_some(),
        include_usage: ask.include_usage,
    };
    Ok(Prepared { prompt, ask, shape })
}

/// A string, a list of token ids, or a list of one of either.
fn read_prompt(app: &App, given: Option<Value>) -> Result<Vec<u32>, ApiError> {
    let fields = Fields::default();
    let Some(mut given) = given else {
        return Err(ApiError::field("prompt", "prompt is missing"));
    };
    if let Value::Array(items) = &mut given
        && matches!(items.first(), Some(Value::String(_) | Value::Array(_)))
    {
        if items.len() > 1 {
            let message = format!("prompt has {} entries; send one request for each", items.len());
            return Err(ApiError::unsupported("prompt", message));
        }
        given = items.swap_remove(0);
    }
    match given {
        Value::String(text) => prompt::encode(app, &text, true),
        Value::Array(items) => fields.token_ids("prompt", &items, app.text.tokenizer.vocabulary()),
        other => Err(fields.wrong("prompt", "a string or a list of token ids", &other)),
    }
}

struct Completion {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    include_usage: bool,
}

impl Completion {
    fn object(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn choice(&self, tokenizer: &dyn Tokenizer, piece: &Piece, reason: Option<&str>) -> Value {
        let logprobs = self.logprobs.then(|| logprobs::of_completion(tokenizer, &piece.shown));
        json!([{"index": 0, "text": piece.text, "logprobs": logprobs, "finish_reason": reason}])
    }

    fn event(&self, choices: Value) -> Value {
        let mut event = self.object(choices);
        if self.include_usage {
            event["usage"] = Value::Null;
        }
        event
    }
}

impl Shape for Completion {
    fn piece(&mut self, tokenizer: &dyn Tokenizer, piece: Piece) -> Vec<Value> {
        if piece.text.is_empty() && piece.shown.is_empty() {
            return Vec::new();
        }
        vec![self.event(self.choice(tokenizer, &piece, None))]
    }

    fn end(&mut self, tokenizer: &dyn Tokenizer, end: &End) -> Vec<Value> {
        let mut events = vec![self.event(self.choice(tokenizer, &Piece::default(), Some(end.reason)))];
        if self.include_usage {
            let mut usage = self.object(json!([]));
            usage["usage"] = end.usage();
            events.push(usage);
        }
        events
    }

    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Piece, end: &End) -> Value {
        let mut answer = self.object(self.choice(tokenizer, &all, Some(end.reason)));
        answer["usage"] = end.usage();
        answer
    }
}
