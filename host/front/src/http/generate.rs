//! `POST /generate`, in SGLang's shape, with figures for benchmarks of prefill/decode split.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value, json};

use super::answer::{Delta, End, Matched, Shown};
use super::apart::write_apart;
use super::ask::{Ask, MOST_ANSWERS, not_empty};
use super::error::ApiError;
use super::fields::{Fields, empty};
use super::logprobs::{top_triples, triples};
use super::record::Usage;
use super::respond::{Event, Item, Prepared, Shape, serve, written};
use super::sampling::drawn_seed;
use super::{App, RequestId, Shared, prompt};
use crate::text::Tokenizer;

/// Fields of `sampling_params` that clients often put beside it by mistake.
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

/// Limits the number of events of a stream: an event comes when the answer has grown by 1/`EVENTS`. Each event repeats everything
/// before it, as SGLang's do, so one event for each token would add up to bytes that grow with the square of the answer. With
/// this limit they add up to at most `EVENTS` times the last event. Each of the first `EVENTS` tokens has an event of its own.
const EVENTS: usize = 512;
/// The same with log probabilities, which are many times as long as the text.
const EVENTS_WITH_LOGPROBS: usize = 64;
/// Longest `rid`, in bytes: each event repeats it.
pub(super) const MAX_RID: usize = 256;

/// SGLang's default.
pub(super) const DEFAULT_MAX_TOKENS: i64 = 128;

pub(super) async fn handle(
    State(app): Shared,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(&app, "/generate", id, request, |app, id, body, _most_text| prepare(app, id, body)).await
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
    let from = fields.integer("logprob_start_len", -1..=i64::from(u32::MAX))?;
    // Log probabilities of the prompt are wanted from this token on.
    let from = from.filter(|_from| logprobs.is_some()).and_then(|from| usize::try_from(from).ok());
    for name in ["token_ids_logprob", "bootstrap_host", "bootstrap_room"] {
        fields.refuse_unless(name, empty)?;
    }
    let ids = rid(&mut fields)?;
    let (input_ids, text) = (fields.take("input_ids"), fields.take("text"));
    let (prompts, is_list) = read_prompts(app, input_ids, text)?;
    let asks = asks(app, params, prompts.len())?;
    let mut items = Vec::with_capacity(prompts.len());
    let mut told = Vec::new();
    for (index, (prompt, mut ask)) in prompts.into_iter().zip(asks).enumerate() {
        (ask.stream, ask.sampling.logprobs) = (stream, logprobs);
        let name = match ids.as_ref() {
            Some(Value::String(name)) if !is_list => name.clone(),
            Some(Value::Array(names)) => names.get(index).and_then(Value::as_str).unwrap_or(&id.0).to_owned(),
            _ => id.0.clone(),
        };
        if let Some(from) = from.filter(|from| *from > prompt.len()) {
            let message =
                format!("logprob_start_len is {from}, and the prompt has {} tokens: lower it", prompt.len());
            return Err(ApiError::field("logprob_start_len", message));
        }
        ask.scores = logprobs.filter(|_top| from.is_some());
        let one = Told { id: name, prompt_tokens: prompt.len(), from, ..Told::default() };
        let seed = ask.sampling.seed;
        told.extend(
            (0..ask.n)
                .map(|number| Told { seed: seed.wrapping_add(number.into()).cast_signed(), ..one.clone() }),
        );
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
    Ok(Prepared { items, shape: Generate { logprobs: logprobs.is_some(), is_list, told, bytes: 0 } })
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

/// Takes `rid`: a name, or one for each prompt.
fn rid(fields: &mut Fields) -> Result<Option<Value>, ApiError> {
    let given = fields.take("rid");
    let names = match &given {
        Some(Value::Array(names)) => &names[..],
        Some(name) => std::slice::from_ref(name),
        None => &[],
    };
    match names.iter().find(|name| name.as_str().is_some_and(|name| name.len() > MAX_RID)) {
        Some(long) => Err(fields.wrong("rid", format!("names of at most {MAX_RID} bytes"), long)),
        None => Ok(given),
    }
}

/// The settings of each prompt: `sampling_params` is one object for all, or one for each.
fn asks(app: &App, given: Option<Value>, prompts: usize) -> Result<Vec<Ask>, ApiError> {
    let wrong = |got: &Value| {
        Fields::default().wrong("sampling_params", "a JSON object, or one for each prompt", got)
    };
    let one = match given {
        None => Map::new(),
        Some(Value::Object(one)) => one,
        Some(Value::Array(list)) if list.len() == prompts => {
            let asks = list.into_iter().map(|params| match params {
                Value::Object(params) => ask(app, params),
                other => Err(wrong(&other)),
            });
            return asks.collect();
        }
        Some(other) => return Err(wrong(&other)),
    };
    // They are read once, however many prompts there are. Without a seed each prompt gets one of its own.
    let has_seed = one.get("sampling_seed").is_some_and(|seed| !seed.is_null());
    let mut asks = ask(app, one)?.for_prompts(prompts)?;
    if !has_seed {
        for ask in asks.iter_mut().skip(1) {
            ask.sampling.seed = drawn_seed()?;
        }
    }
    Ok(asks)
}

/// The settings in an object.
fn ask(app: &App, params: Map<String, Value>) -> Result<Ask, ApiError> {
    let mut params = Fields::within("sampling_params.", params);
    Ask::refuse_unsupported(&mut params)?;
    let mut ask = Ask::take(app, &mut params, "sampling_seed")?;
    ask.answer_field = "sampling_params.max_new_tokens";
    let max = params.integer("max_new_tokens", 1..=i64::from(u32::MAX))?.unwrap_or(DEFAULT_MAX_TOKENS);
    ask.limit(u32::try_from(max).ok())?;
    params.refuse_rest(|_| None)?;
    Ok(ask)
}

struct Generate {
    logprobs: bool,
    /// Whether there are several answers: each event then has an index, and a whole answer is a list.
    is_list: bool,
    /// The answers. Each event repeats everything before it, as SGLang's clients expect.
    told: Vec<Told>,
    /// Bytes of the deltas that were told.
    bytes: usize,
}

/// An answer, as far as the client is told it.
#[derive(Clone, Default)]
struct Told {
    id: String,
    /// The seed that its draws depend on, as a request names it.
    seed: i64,
    prompt_tokens: usize,
    text: String,
    tokens: Vec<u32>,
    /// The first token of the prompt whose log probability was requested.
    from: Option<usize>,
    /// The tokens of the prompt from that one on.
    prompt: Vec<Shown>,
    /// Tokens that have begun to show, when log probabilities were requested.
    shown: Vec<Shown>,
    /// Bytes of its deltas.
    bytes: usize,
    /// Tokens in the last event.
    tokens_told: usize,
}

impl Told {
    fn add(&mut self, delta: Delta) {
        self.bytes += delta.kept();
        self.text.push_str(&delta.text);
        self.tokens.extend(delta.tokens);
        self.prompt.extend(delta.prompt.into_iter().skip(self.from.unwrap_or(0)));
        self.shown.extend(delta.shown);
    }

    /// Whether the answer has grown enough for an event.
    fn is_due(&self) -> bool {
        let tokens = self.tokens.len();
        let events = if self.shown.is_empty() { EVENTS } else { EVENTS_WITH_LOGPROBS };
        tokens <= events || tokens - self.tokens_told >= tokens.div_ceil(events)
    }
}

/// An answer as JSON.
#[derive(serde::Serialize)]
struct Object<'a, M> {
    text: &'a str,
    output_ids: &'a [u32],
    meta_info: M,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
}

impl Generate {
    fn object<'a>(
        &self,
        tokenizer: &'a dyn Tokenizer,
        number: usize,
        all: &'a Told,
        end: Option<&End>,
    ) -> impl Serialize + use<'a> {
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
        meta.insert("sampling_seed".into(), json!(all.seed));
        if self.logprobs {
            meta.insert("output_token_logprobs".into(), Value::Null);
            meta.insert("output_top_logprobs".into(), Value::Null);
            // They may be long, so a stream has them at its end alone.
            if end.is_some() {
                meta.insert("input_token_logprobs".into(), Value::Null);
                meta.insert("input_top_logprobs".into(), Value::Null);
            }
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
        let meta_info = Meta { tokenizer, prompt: &all.prompt, shown: &all.shown, fields: meta };
        let index = self.is_list.then_some(number);
        Object { text: &all.text, output_ids: &all.tokens, meta_info, index }
    }
}

impl Generate {
    /// An event with all of an answer so far.
    fn event(&self, tokenizer: &dyn Tokenizer, number: usize, end: Option<&End>) -> Vec<Event> {
        let Some(told) = self.told.get(number) else { return Vec::new() };
        vec![write_apart(told.bytes, || Event::written(None, &self.object(tokenizer, number, told, end)))]
    }
}

impl Shape for Generate {
    const REPEATS: bool = true;

    fn on_delta(&mut self, number: usize, tokenizer: &dyn Tokenizer, delta: Delta) -> Vec<Event> {
        let nothing = delta.tokens.is_empty() && delta.text.is_empty() && delta.shown.is_empty();
        let Some(told) = self.told.get_mut(number) else { return Vec::new() };
        self.bytes += delta.kept();
        told.add(delta);
        if nothing || !told.is_due() {
            return Vec::new();
        }
        told.tokens_told = told.tokens.len();
        self.event(tokenizer, number, None)
    }

    fn end(&mut self, number: usize, tokenizer: &dyn Tokenizer, end: &End) -> Vec<Event> {
        self.event(tokenizer, number, Some(end))
    }

    fn keeps(&self) -> usize {
        self.bytes
    }

    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Vec<(Vec<Delta>, End)>, _usage: &Usage) -> String {
        let mut ends = Vec::with_capacity(all.len());
        for ((deltas, end), told) in all.into_iter().zip(&mut self.told) {
            deltas.into_iter().for_each(|delta| told.add(delta));
            ends.push(end);
        }
        let answers = self.told.iter().zip(&ends).enumerate();
        let objects = answers.map(|(number, (told, end))| self.object(tokenizer, number, told, Some(end)));
        let mut objects: Vec<_> = objects.collect();
        if self.is_list { written(&objects) } else { written(&objects.pop()) }
    }
}

/// The figures of an answer.
struct Meta<'a> {
    tokenizer: &'a dyn Tokenizer,
    prompt: &'a [Shown],
    shown: &'a [Shown],
    /// With placeholders for log probabilities, if they are wanted.
    fields: Map<String, Value>,
}

impl Serialize for Meta<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_map(Some(self.fields.len()))?;
        for (name, value) in &self.fields {
            match name.as_str() {
                "output_token_logprobs" => {
                    object.serialize_entry(name, &triples(self.tokenizer, self.shown, false))?
                }
                "output_top_logprobs" => object.serialize_entry(name, &top_triples(self.shown, false))?,
                "input_token_logprobs" => {
                    object.serialize_entry(name, &triples(self.tokenizer, self.prompt, true))?
                }
                "input_top_logprobs" => object.serialize_entry(name, &top_triples(self.prompt, true))?,
                _ => object.serialize_entry(name, value)?,
            }
        }
        object.end()
    }
}

#[cfg(test)]
mod tests {
    use host_wire::proto::{Token, TopToken};

    use super::*;

    /// Bytes of all events of an answer that grows token by token, bytes of its last event, and the number of events.
    fn streamed(tokens: usize, logprobs: bool) -> (usize, usize, usize) {
        let tokenizer = crate::text::ByteTokenizer::new(300);
        let mut shape = Generate { logprobs, is_list: false, told: vec![Told::default()], bytes: 0 };
        let (mut bytes, mut last, mut events) = (0, 0, 0);
        for _ in 0..tokens {
            let top = vec![TopToken { token: 65, logprob: -1.5 }; 20];
            let token = Token { token: 66, logprob: Some(-0.5), top };
            let shown = if logprobs { vec![Shown::at_the_beginning(token)] } else { Vec::new() };
            let delta = Delta { text: "word ".into(), shown, tokens: vec![12345], ..Delta::default() };
            for event in shape.on_delta(0, &tokenizer, delta) {
                let Event::Written { json, .. } = event else { panic!("a value") };
                last = json.len();
                bytes += last;
                events += 1;
            }
        }
        assert_eq!(shape.told[0].tokens.len(), tokens, "the end has all of them");
        (bytes, last, events)
    }

    #[test]
    fn short_answers_have_an_event_for_each_token() {
        assert_eq!(streamed(EVENTS, false).2, EVENTS);
        assert_eq!(streamed(EVENTS_WITH_LOGPROBS, true).2, EVENTS_WITH_LOGPROBS);
    }

    #[test]
    fn the_bytes_of_a_stream_grow_with_the_answer_and_not_with_its_square() {
        for (tokens, logprobs, events) in [(20_000, false, EVENTS), (2_000, true, EVENTS_WITH_LOGPROBS)] {
            let (bytes, last, _) = streamed(tokens, logprobs);
            assert!(bytes <= (events + 1) * last, "{bytes} bytes in all, {last} in the last event");
        }
    }

    #[test]
    fn what_a_stream_keeps_is_counted() {
        let tokenizer = crate::text::ByteTokenizer::new(300);
        let mut shape = Generate { logprobs: true, is_list: false, told: vec![Told::default()], bytes: 0 };
        let top = vec![TopToken { token: 65, logprob: -1.5 }; 20];
        let token = Token { token: 66, logprob: Some(-0.5), top };
        let shown = Shown::at_the_beginning(token);
        let bytes = 3 * (4 + shown.memory());
        assert!(shown.memory() > 20 * size_of::<TopToken>());
        let delta = Delta { shown: vec![shown], text: "text".into(), ..Delta::default() };
        (0..3).for_each(|_| drop(shape.on_delta(0, &tokenizer, delta.clone())));
        assert_eq!(shape.keeps(), bytes);
    }
}
