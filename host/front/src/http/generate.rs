//! `POST /generate`, in SGLang's shape, with figures for benchmarks of split prefill and decode.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::answer::{End, Piece, Shown};
use super::ask::{Ask, not_empty};
use super::error::ApiError;
use super::fields::{Fields, empty};
use super::respond::{Prepared, Shape, serve};
use super::{App, RequestId, Shared, prompt};
use crate::text::Tokenizer;

/// Fields that belong into `sampling_params`, and are often put beside it.
const SAMPLING: [&str; 9] = [
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "sampling_seed",
];

/// An event of a stream comes when the answer has grown by one part of so many. Each event repeats everything before it, as
/// SGLang's do, so one for each token would add up to bytes that grow with the square of the answer. These add up to at most
/// so many times the last one. Up to this many tokens each has an event of its own.
const EVENTS: usize = 512;

/// SGLang's default.
const DEFAULT_MAX_TOKENS: i64 = 128;

pub(super) async fn handle(
    State(app): Shared,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(&app, "/generate", id, request, prepare).await
}

/// Whether a request with this body would be carried out.
pub(super) fn is_accepted(app: &App, id: &RequestId, body: &[u8]) -> bool {
    prepare(app, id, body).is_ok()
}

fn prepare(app: &App, id: &RequestId, body: &[u8]) -> Result<Prepared<Generate>, ApiError> {
    let mut fields = Fields::parse(body)?;
    for name in ["input_embeds", "image_data", "lora_path", "session_params"] {
        fields.refuse_unless(name, empty)?;
    }
    let mut params = fields.object("sampling_params", "sampling_params.")?;
    Ask::refuse_unsupported(&mut params)?;
    let mut ask = Ask::take(app, &mut params, "sampling_seed")?;
    let max = params.integer("max_new_tokens", 1..=i64::from(u32::MAX))?.unwrap_or(DEFAULT_MAX_TOKENS);
    ask.max_new_tokens = u32::try_from(max).ok();
    ask.answer_field = "sampling_params.max_new_tokens";
    ask.take_caching(&mut fields)?;
    ask.stream = fields.boolean("stream")?.unwrap_or(false);
    let logprobs = fields.boolean("return_logprob")?.unwrap_or(false);
    let top = fields.integer("top_logprobs_num", 0..=20)?.unwrap_or(0);
    ask.sampling.logprobs = if logprobs { u32::try_from(top).ok() } else { None };
    // Log probabilities of the prompt are not computed.
    fields.refuse_unless("logprob_start_len", |value| value.as_i64() == Some(-1))?;
    for name in ["return_hidden_states", "token_ids_logprob", "bootstrap_host", "bootstrap_room"] {
        fields.refuse_unless(name, empty)?;
    }
    params.refuse_rest(|_| None)?;
    let (input_ids, text) = (fields.take("input_ids"), fields.take("text"));
    fields.refuse_rest(|name| {
        SAMPLING
            .contains(&name)
            .then(|| format!("put it into sampling_params: {{\"sampling_params\": {{\"{name}\": …}}}}"))
    })?;
    let fields = Fields::default();
    let prompt = match (input_ids, text) {
        (Some(Value::Array(ids)), None) => {
            let ids = fields.token_ids("input_ids", &ids, app.text.tokenizer.vocabulary())?;
            not_empty("input_ids", ids)?
        }
        (None, Some(Value::String(text))) => not_empty("text", prompt::encode(app, &text, true)?)?,
        (Some(other), None) => return Err(fields.wrong("input_ids", "a list of token ids", &other)),
        (None, Some(other)) => return Err(fields.wrong("text", "a string", &other)),
        (None, None) => return Err(ApiError::field("text", "the prompt is missing: give text or input_ids")),
        (Some(_), Some(_)) => return Err(ApiError::field("text", "give either text or input_ids")),
    };
    let shape = Generate { id: id.0.clone(), prompt_tokens: prompt.len(), logprobs, so_far: Told::default() };
    Ok(Prepared { prompt, ask, shape })
}

struct Generate {
    id: String,
    prompt_tokens: usize,
    logprobs: bool,
    /// Each event repeats everything, as SGLang's clients expect.
    so_far: Told,
}

/// An answer as it is told.
#[derive(Default)]
struct Told {
    text: String,
    tokens: Vec<u32>,
    /// Of each token that has begun to show, `[logprob, id, text]`; and the likeliest in its place.
    logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    /// Tokens in the last event.
    tokens_told: usize,
}

impl Told {
    fn add(&mut self, tokenizer: &dyn Tokenizer, piece: Piece) {
        self.text.push_str(&piece.text);
        self.tokens.extend(piece.tokens);
        for Shown { token, .. } in piece.shown {
            let bytes = tokenizer.token_bytes(token.token);
            self.logprobs.push(json!([token.logprob, token.token, String::from_utf8_lossy(&bytes)]));
            self.top_logprobs
                .push(token.top.iter().map(|top| json!([top.logprob, top.token, null])).collect());
        }
    }

    /// Whether it has grown enough since the last event.
    fn is_due(&self) -> bool {
        let tokens = self.tokens.len();
        tokens <= EVENTS || tokens - self.tokens_told >= tokens.div_ceil(EVENTS)
    }
}

impl Generate {
    fn object(&self, all: &Told, end: Option<&End>) -> Value {
        let reason = end.map(|end| match end.reason {
            "length" => json!({"type": "length", "length": end.output_tokens}),
            reason => json!({"type": reason}),
        });
        let mut meta = Map::new();
        meta.insert("id".into(), json!(self.id));
        meta.insert("finish_reason".into(), json!(reason));
        meta.insert("prompt_tokens".into(), json!(self.prompt_tokens));
        meta.insert("completion_tokens".into(), json!(all.tokens.len()));
        let finished = end.and_then(|end| end.finished.as_ref());
        meta.insert("cached_tokens".into(), json!(finished.map_or(0, |finished| finished.cached_tokens)));
        if self.logprobs {
            meta.insert("output_token_logprobs".into(), all.logprobs.clone().into());
            meta.insert("output_top_logprobs".into(), all.top_logprobs.clone().into());
        }
        if let Some(end) = end {
            meta.insert("e2e_latency".into(), json!(end.elapsed.as_secs_f64()));
            meta.insert("ttft".into(), json!(end.first_token.as_secs_f64()));
            meta.insert(
                "transferred_bytes".into(),
                json!(finished.map(|finished| finished.transferred_bytes)),
            );
            meta.insert("transfer_plugin".into(), json!(finished.map(|finished| &finished.transfer_plugin)));
            let served_by = end.served_by.as_ref();
            meta.insert("prefill_worker".into(), json!(served_by.and_then(|by| by.prefill.as_ref())));
            meta.insert("decode_worker".into(), json!(served_by.map(|by| &by.decode)));
        }
        json!({"text": all.text, "output_ids": all.tokens, "meta_info": meta})
    }
}

impl Shape for Generate {
    fn piece(&mut self, tokenizer: &dyn Tokenizer, piece: Piece) -> Vec<Value> {
        let nothing = piece.tokens.is_empty() && piece.text.is_empty() && piece.shown.is_empty();
        self.so_far.add(tokenizer, piece);
        if nothing || !self.so_far.is_due() {
            return Vec::new();
        }
        self.so_far.tokens_told = self.so_far.tokens.len();
        vec![self.object(&self.so_far, None)]
    }

    fn end(&mut self, _tokenizer: &dyn Tokenizer, end: &End) -> Vec<Value> {
        vec![self.object(&self.so_far, Some(end))]
    }

    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Piece, end: &End) -> Value {
        let mut told = Told::default();
        told.add(tokenizer, all);
        self.object(&told, Some(end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of all events of an answer that grows token by token, bytes of its last event, and the number of events.
    fn streamed(tokens: usize) -> (usize, usize, usize) {
        let tokenizer = crate::text::ByteTokenizer::new(300);
        let mut shape =
            Generate { id: "r".into(), prompt_tokens: 1, logprobs: false, so_far: Told::default() };
        let (mut bytes, mut last, mut events) = (0, 0, 0);
        for _ in 0..tokens {
            let piece = Piece { text: "word ".into(), shown: Vec::new(), tokens: vec![12345] };
            for event in shape.piece(&tokenizer, piece) {
                last = event.to_string().len();
                bytes += last;
                events += 1;
            }
        }
        assert_eq!(shape.so_far.tokens.len(), tokens, "the end has all of them");
        (bytes, last, events)
    }

    #[test]
    fn short_answers_have_an_event_for_each_token() {
        assert_eq!(streamed(EVENTS).2, EVENTS);
    }

    #[test]
    fn the_bytes_of_a_stream_grow_with_the_answer_and_not_with_its_square() {
        let (bytes, last, _) = streamed(20_000);
        assert!(bytes <= (EVENTS + 1) * last, "{bytes} bytes in all, {last} in the last event");
    }
}
