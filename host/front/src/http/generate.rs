//! `POST /generate`, in SGLang's shape, with figures for benchmarks of split prefill and decode.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::answer::{End, Matched, Piece, Shown};
use super::ask::{Ask, MOST_ANSWERS, not_empty};
use super::error::ApiError;
use super::fields::{Fields, empty};
use super::record::Usage;
use super::respond::{Item, Prepared, Shape, serve};
use super::{App, RequestId, Shared, prompt};
use crate::text::Tokenizer;

/// Fields that belong into `sampling_params`, and are often put beside it.
pub(super) const SAMPLING: [&str; 10] = [
    "n",
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
pub(super) const DEFAULT_MAX_TOKENS: i64 = 128;

pub(super) async fn handle(
    State(app): Shared,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(&app, "/generate", id, request, prepare).await
}

/// Whether a request with this body would be carried out.
pub(super) fn is_accepted(app: &App, id: &RequestId, body: &[u8]) -> bool {
    prepare(app, id, body).is_ok_and(|prepared| prepared.compiles(app))
}

fn prepare(app: &App, id: &RequestId, body: &[u8]) -> Result<Prepared<Generate>, ApiError> {
    let mut fields = Fields::parse(body)?;
    for name in ["input_embeds", "image_data", "audio_data", "video_data", "lora_path", "session_params"] {
        fields.refuse_unless(name, empty)?;
    }
    let params = fields.take("sampling_params");
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let logprobs = fields.boolean("return_logprob")?.unwrap_or(false);
    let top = fields.integer("top_logprobs_num", 0..=20)?.unwrap_or(0);
    let logprobs = if logprobs { u32::try_from(top).ok() } else { None };
    // Log probabilities of the prompt are not computed.
    fields.refuse_unless("logprob_start_len", |value| value.as_i64() == Some(-1))?;
    for name in ["token_ids_logprob", "bootstrap_host", "bootstrap_room"] {
        fields.refuse_unless(name, empty)?;
    }
    let ids = fields.take("rid");
    let (input_ids, text) = (fields.take("input_ids"), fields.take("text"));
    let (prompts, is_list) = read_prompts(app, input_ids, text)?;
    let mut params = sampling_params(params, prompts.len())?.into_iter();
    let mut items = Vec::with_capacity(prompts.len());
    let mut told = Vec::new();
    for (index, prompt) in prompts.into_iter().enumerate() {
        let mut params = Fields::within("sampling_params.", params.next().unwrap_or_default());
        Ask::refuse_unsupported(&mut params)?;
        let mut ask = Ask::take(app, &mut params, "sampling_seed")?;
        ask.answer_field = "sampling_params.max_new_tokens";
        let max = params.integer("max_new_tokens", 1..=i64::from(u32::MAX))?.unwrap_or(DEFAULT_MAX_TOKENS);
        ask.limit(u32::try_from(max).ok())?;
        params.refuse_rest(|_| None)?;
        (ask.stream, ask.sampling.logprobs) = (stream, logprobs);
        let name = match ids.as_ref() {
            Some(Value::String(name)) if !is_list => name.clone(),
            Some(Value::Array(names)) => names.get(index).and_then(Value::as_str).unwrap_or(&id.0).to_owned(),
            _ => id.0.clone(),
        };
        let one = Told { id: name, prompt_tokens: prompt.len(), ..Told::default() };
        told.extend((0..ask.n).map(|_| one.clone()));
        items.push(Item { prompt, ask });
    }
    let mut serving = items.first().map(|item| item.ask.clone());
    if let Some(serving) = &mut serving {
        serving.take_serving(&mut fields)?;
        for item in &mut items {
            item.ask.serve_as(serving);
        }
    }
    fields.refuse_rest(|name| {
        SAMPLING
            .contains(&name)
            .then(|| format!("put it into sampling_params: {{\"sampling_params\": {{\"{name}\": …}}}}"))
    })?;
    let is_list = is_list || told.len() > 1;
    Ok(Prepared { items, shape: Generate { logprobs: logprobs.is_some(), is_list, told } })
}

/// The prompts, and whether they came as a list of prompts.
fn read_prompts(
    app: &App,
    input_ids: Option<Value>,
    text: Option<Value>,
) -> Result<(Vec<Vec<u32>>, bool), ApiError> {
    let fields = Fields::default();
    let of_ids = |ids: &[Value]| {
        not_empty("input_ids", fields.token_ids("input_ids", ids, app.text.tokenizer.vocabulary())?)
    };
    let of_text = |text: &str| not_empty("text", prompt::encode(app, text, true)?);
    let within = |name: &str, prompts: usize| match prompts {
        1..=MOST_ANSWERS => Ok(()),
        _ => Err(ApiError::field(
            name,
            format!("{name} has {prompts} entries: it must have 1 to {MOST_ANSWERS}; send several requests"),
        )),
    };
    match (input_ids, text) {
        (Some(Value::Array(lists)), None) if matches!(lists.first(), Some(Value::Array(_))) => {
            within("input_ids", lists.len())?;
            let prompts: Result<_, _> = lists
                .iter()
                .map(|ids| match ids {
                    Value::Array(ids) => of_ids(ids),
                    other => Err(fields.wrong("input_ids", "a list of lists of token ids", other)),
                })
                .collect();
            Ok((prompts?, true))
        }
        (Some(Value::Array(ids)), None) => Ok((vec![of_ids(&ids)?], false)),
        (None, Some(Value::String(text))) => Ok((vec![of_text(&text)?], false)),
        (None, Some(Value::Array(texts))) => {
            within("text", texts.len())?;
            let prompts: Result<_, _> = texts
                .iter()
                .map(|text| match text {
                    Value::String(text) => of_text(text),
                    other => Err(fields.wrong("text", "a string or a list of strings", other)),
                })
                .collect();
            Ok((prompts?, true))
        }
        (Some(other), None) => Err(fields.wrong("input_ids", "a list of token ids", &other)),
        (None, Some(other)) => Err(fields.wrong("text", "a string or a list of strings", &other)),
        (None, None) => Err(ApiError::field("text", "the prompt is missing: give text or input_ids")),
        (Some(_), Some(_)) => Err(ApiError::field("text", "give either text or input_ids")),
    }
}

/// The settings of each prompt: one object for all, or one for each.
fn sampling_params(given: Option<Value>, prompts: usize) -> Result<Vec<Map<String, Value>>, ApiError> {
    let wrong = |got: &Value| {
        Fields::default().wrong("sampling_params", "a JSON object, or one for each prompt", got)
    };
    match given {
        None => Ok(vec![Map::new(); prompts]),
        Some(Value::Object(one)) => Ok(vec![one; prompts]),
        Some(Value::Array(list)) if list.len() == prompts => list
            .into_iter()
            .map(|params| match params {
                Value::Object(params) => Ok(params),
                other => Err(wrong(&other)),
            })
            .collect(),
        Some(other) => Err(wrong(&other)),
    }
}

struct Generate {
    logprobs: bool,
    /// Several answers: each is told with its index, and all at once as a list.
    is_list: bool,
    /// Each answer. Each event repeats everything, as SGLang's clients expect.
    told: Vec<Told>,
}

/// An answer as it is told.
#[derive(Clone, Default)]
struct Told {
    id: String,
    prompt_tokens: usize,
    text: String,
    tokens: Vec<u32>,
    /// `[logprob, id, text]` of each token that has begun to show. `top_logprobs` has the likeliest tokens in its place.
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
    fn object(&self, number: usize, all: &Told, end: Option<&End>) -> Value {
        let reason = end.map(|end| match (end.reason, &end.matched) {
            ("length", _) => json!({"type": "length", "length": end.output_tokens}),
            (reason, Some(Matched::Text(text))) => json!({"type": reason, "matched": text}),
            (reason, Some(Matched::Token(token))) => json!({"type": reason, "matched": token}),
            (reason, None) => json!({"type": reason}),
        });
        let mut meta = Map::new();
        meta.insert("id".into(), json!(all.id));
        meta.insert("finish_reason".into(), json!(reason));
        meta.insert("prompt_tokens".into(), json!(all.prompt_tokens));
        meta.insert("completion_tokens".into(), json!(all.tokens.len()));
        meta.insert("cached_tokens".into(), json!(end.map_or(0, End::cached_tokens)));
        if self.logprobs {
            meta.insert("output_token_logprobs".into(), all.logprobs.clone().into());
            meta.insert("output_top_logprobs".into(), all.top_logprobs.clone().into());
        }
        if let Some(end) = end {
            let finished = end.finished.as_ref();
            meta.extend(end.cache_details().as_object().cloned().unwrap_or_default());
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
        let mut object = json!({"text": all.text, "output_ids": all.tokens, "meta_info": meta});
        if self.is_list {
            object["index"] = json!(number);
        }
        object
    }
}

impl Shape for Generate {
    fn piece(&mut self, number: usize, tokenizer: &dyn Tokenizer, piece: Piece) -> Vec<Value> {
        let nothing = piece.tokens.is_empty() && piece.text.is_empty() && piece.shown.is_empty();
        let Some(told) = self.told.get_mut(number) else { return Vec::new() };
        told.add(tokenizer, piece);
        if nothing || !told.is_due() {
            return Vec::new();
        }
        told.tokens_told = told.tokens.len();
        vec![self.object(number, &self.told[number], None)]
    }

    fn end(&mut self, number: usize, _tokenizer: &dyn Tokenizer, end: &End) -> Vec<Value> {
        self.told.get(number).map(|told| self.object(number, told, Some(end))).into_iter().collect()
    }

    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Vec<(Vec<Piece>, End)>, _usage: &Usage) -> Value {
        let mut objects = Vec::with_capacity(all.len());
        for (number, (pieces, end)) in all.into_iter().enumerate() {
            let mut told = self.told.get(number).cloned().unwrap_or_default();
            for piece in pieces {
                told.add(tokenizer, piece);
            }
            objects.push(self.object(number, &told, Some(&end)));
        }
        if self.is_list { Value::Array(objects) } else { objects.pop().unwrap_or(Value::Null) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of all events of an answer that grows token by token, bytes of its last event, and the number of events.
    fn streamed(tokens: usize) -> (usize, usize, usize) {
        let tokenizer = crate::text::ByteTokenizer::new(300);
        let mut shape = Generate { logprobs: false, is_list: false, told: vec![Told::default()] };
        let (mut bytes, mut last, mut events) = (0, 0, 0);
        for _ in 0..tokens {
            let piece = Piece { text: "word ".into(), shown: Vec::new(), tokens: vec![12345] };
            for event in shape.piece(0, &tokenizer, piece) {
                last = event.to_string().len();
                bytes += last;
                events += 1;
            }
        }
        assert_eq!(shape.told[0].tokens.len(), tokens, "the end has all of them");
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
