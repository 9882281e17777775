//! `POST /v1/completions`.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use host_wire::clock;
use serde_json::{Map, Value, json};

use super::answer::{Delta, End, Shown, joined, stop_reason};
use super::apart::write_apart;
use super::ask::{Ask, MOST_ANSWERS, check_model, not_empty};
use super::error::ApiError;
use super::fields::Fields;
use super::logprobs::{OfCompletion, With};
use super::record::Usage;
use super::respond::{Event, Item, Prepared, Shape, serve, written};
use super::{App, RequestId, Shared, prompt};
use crate::text::Tokenizer;

/// OpenAI's default.
pub(super) const DEFAULT_MAX_TOKENS: i64 = 16;

pub(super) async fn handle(
    State(app): Shared,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(&app, "/v1/completions", id, request, |app, id, body, _most_text| prepare(app, id, body)).await
}

/// Whether a request with this body would be carried out.
pub(super) fn is_accepted(app: &App, id: &RequestId, body: &[u8]) -> bool {
    prepare(app, id, body).is_ok_and(|prepared| prepared.compiles(app))
}

fn prepare(app: &App, id: &RequestId, body: &[u8]) -> Result<Prepared<Completion>, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(app, &mut fields)?;
    Ask::refuse_unsupported(&mut fields)?;
    let mut ask = Ask::take(app, &mut fields, "seed")?;
    ask.take_stream(&mut fields)?;
    ask.take_serving(&mut fields)?;
    ask.take_best_of(&mut fields)?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let max = fields.integer("max_tokens", 0..=i64::from(u32::MAX))?.unwrap_or(DEFAULT_MAX_TOKENS);
    ask.answers = max > 0;
    if !ask.answers && !echo {
        let message = "max_tokens is 0, which asks for nothing: ask for at least one token, or for the prompt with echo";
        return Err(ApiError::field("max_tokens", message));
    }
    ask.limit(u32::try_from(max.max(1)).ok())?;
    ask.sampling.logprobs = fields.integer("logprobs", 0..=5)?.and_then(|count| u32::try_from(count).ok());
    // Without an answer, a worker still checks the prompt.
    ask.scores = ask.sampling.logprobs.or((!ask.answers).then_some(0)).filter(|_top| echo);
    let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let prompt = fields.take("prompt");
    fields.refuse_rest(|_| None)?;
    let mut prompts = read_prompts(app, prompt, special)?;
    let echoes = if echo { texts(app, &mut prompts, &ask)? } else { vec![String::new(); prompts.len()] };
    let shape = Completion {
        id: format!("cmpl-{}", id.0),
        created: clock::unix_seconds(),
        model: app.model.clone(),
        logprobs: ask.sampling.logprobs.is_some(),
        characters: echoes.iter().map(|echo| echo.chars().count()).collect(),
        include_usage: ask.include_usage,
        usage_in_all: ask.usage_in_all,
        cache_details: ask.cache_details,
        n: ask.n as usize,
        echoes,
        begun: vec![!echo; prompts.len() * ask.n as usize],
    };
    let asks = ask.for_prompts(prompts.len())?;
    let items =
        prompts.into_iter().zip(asks).map(|(prompt, ask)| Item { prompt: prompt.tokens, ask }).collect();
    Ok(Prepared { items, shape })
}

/// One prompt.
struct Prompt {
    /// The prompt as the request gave it, if it is a text.
    given: Option<String>,
    /// At least one.
    tokens: Vec<u32>,
}

/// The texts of all prompts, to be repeated in their answers.
///
/// # Errors
/// When they have more bytes together than a body may have: a token may stand for many.
fn texts(app: &App, prompts: &mut [Prompt], ask: &Ask) -> Result<Vec<String>, ApiError> {
    let most = app.max_body;
    let mut left = most;
    let mut text = |prompt: &mut Prompt| {
        let given = prompt.given.take().filter(|text| text.len() <= left);
        let text = given.or_else(|| prompt::decode_within(app, &prompt.tokens, ask.specials, left));
        left = left.saturating_sub(text.as_ref().map_or(0, String::len));
        text.ok_or_else(|| {
            let message = format!(
                "the text of the prompt has more than {most} bytes, which is the limit (--max-body-bytes); leave echo out"
            );
            ApiError::field("echo", message)
        })
    };
    prompts.iter_mut().map(&mut text).collect()
}

/// Reads the prompts: a string, a list of token ids, or a list of either. `special`: texts get the special tokens that the model
/// begins with.
fn read_prompts(app: &App, given: Option<Value>, special: bool) -> Result<Vec<Prompt>, ApiError> {
    match given {
        None => Err(ApiError::field("prompt", "prompt is missing")),
        Some(Value::Array(items)) if matches!(items.first(), Some(Value::String(_) | Value::Array(_))) => {
            if items.len() > MOST_ANSWERS {
                let message = format!(
                    "prompt has {} entries, and {MOST_ANSWERS} is the limit; send several requests",
                    items.len()
                );
                return Err(ApiError::field("prompt", message));
            }
            items.into_iter().map(|item| read_prompt(app, item, special)).collect()
        }
        Some(one) => Ok(vec![read_prompt(app, one, special)?]),
    }
}

fn read_prompt(app: &App, given: Value, special: bool) -> Result<Prompt, ApiError> {
    let fields = Fields::default();
    let (given, tokens) = match given {
        Value::String(text) => {
            let tokens = prompt::encode(app, &text, special)?;
            (Some(text), tokens)
        }
        Value::Array(items) => (None, fields.token_ids("prompt", &items, app.text.tokenizer.vocabulary())?),
        other => {
            return Err(fields.wrong("prompt", "a string, a list of token ids, or a list of either", &other));
        }
    };
    Ok(Prompt { given, tokens: not_empty("prompt", tokens)? })
}

struct Completion {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    include_usage: bool,
    usage_in_all: bool,
    cache_details: bool,
    /// Answers to each prompt.
    n: usize,
    /// The text with which the answers to each prompt begin.
    echoes: Vec<String>,
    /// Their characters.
    characters: Vec<usize>,
    /// For each answer, whether it has begun.
    begun: Vec<bool>,
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

    /// One answer, or a delta of it, without its log probabilities. The first one has the prompt in front, if that is echoed.
    fn choice(&mut self, number: usize, delta: &Delta, end: Option<&End>) -> Map<String, Value> {
        let begun = self.begun.get_mut(number).is_none_or(|begun| std::mem::replace(begun, true));
        let echo = if begun { "" } else { self.echoes.get(number / self.n).map_or("", String::as_str) };
        let mut choice = Map::new();
        choice.insert("index".into(), json!(number));
        choice.insert("text".into(), Value::from(format!("{echo}{}", delta.text)));
        choice.insert("logprobs".into(), Value::Null);
        choice.insert("finish_reason".into(), json!(end.map(|end| end.reason)));
        choice.insert("stop_reason".into(), json!(end.and_then(stop_reason)));
        choice
    }

    /// The log probabilities of these tokens, if they are wanted.
    fn logprobs<'a>(
        &self,
        number: usize,
        tokenizer: &'a dyn Tokenizer,
        (prompt, shown): (&'a [Shown], &'a [Shown]),
    ) -> Option<OfCompletion<'a>> {
        let behind = self.characters.get(number / self.n).copied().unwrap_or(0);
        self.logprobs.then_some(OfCompletion { tokenizer, prompt, shown, behind })
    }

    /// An event with a delta of an answer, of some tokens.
    fn event(&mut self, number: usize, tokenizer: &dyn Tokenizer, delta: &Delta, end: Option<&End>) -> Event {
        let choice = self.choice(number, delta, end);
        let mut event = self.object(Value::Null).as_object().cloned().unwrap_or_default();
        if self.include_usage && !self.usage_in_all {
            event.insert("usage".into(), Value::Null);
        }
        if let Some(end) = end.filter(|_| self.cache_details) {
            event.insert("sglext".into(), end.cache_details());
        }
        let value = self.logprobs(number, tokenizer, (&delta.prompt, &delta.shown));
        Event::written(
            None,
            &With {
                object: &event,
                name: "choices",
                value: [With { object: &choice, name: "logprobs", value }],
            },
        )
    }
}

impl Shape for Completion {
    fn on_delta(&mut self, number: usize, tokenizer: &dyn Tokenizer, delta: Delta) -> Vec<Event> {
        if delta.text.is_empty() && delta.shown.is_empty() && delta.prompt.is_empty() {
            return Vec::new();
        }
        // The first delta may have all tokens of a long prompt.
        vec![write_apart(delta.kept(), || self.event(number, tokenizer, &delta, None))]
    }

    fn end(&mut self, number: usize, tokenizer: &dyn Tokenizer, end: &End) -> Vec<Event> {
        vec![self.event(number, tokenizer, &Delta::default(), Some(end))]
    }

    fn close(&mut self, _tokenizer: &dyn Tokenizer, usage: &Usage) -> Vec<Event> {
        if !self.include_usage {
            return Vec::new();
        }
        let mut last = self.object(json!([]));
        last["usage"] = usage.json();
        vec![last.into()]
    }

    fn memory(&self) -> usize {
        self.echoes.iter().map(String::len).sum()
    }

    fn beside_pieces(&self) -> usize {
        // JSON writes a control character in six bytes.
        let written = |echo: &String| echo.bytes().map(|byte| if byte < b' ' { 6 } else { 1 }).sum::<usize>();
        self.echoes.iter().map(|echo| written(echo) * self.n).sum()
    }

    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Vec<(Vec<Delta>, End)>, usage: &Usage) -> String {
        let choices = all.iter().enumerate().map(|(number, (deltas, end))| {
            let delta = joined(deltas);
            (self.choice(number, &delta, Some(end)), delta)
        });
        let choices: Vec<_> = choices.collect();
        let choices = choices.iter().enumerate().map(|(number, (object, delta))| {
            let value = self.logprobs(number, tokenizer, (&delta.prompt, &delta.shown));
            With { object, name: "logprobs", value }
        });
        let choices: Vec<_> = choices.collect();
        let mut answer = self.object(Value::Null);
        answer["usage"] = usage.json();
        if let Some((_, end)) = all.first().filter(|_| self.cache_details) {
            answer["sglext"] = end.cache_details();
        }
        let answer = answer.as_object().cloned().unwrap_or_default();
        written(&With { object: &answer, name: "choices", value: choices })
    }
}
