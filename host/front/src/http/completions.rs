//! `POST /v1/completions`.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use host_wire::clock;
use serde_json::{Value, json};

use super::answer::{End, Piece, joined, stop_reason};
use super::ask::{Ask, MOST_ANSWERS, check_model, not_empty};
use super::error::ApiError;
use super::fields::Fields;
use super::record::Usage;
use super::respond::{Item, Prepared, Shape, serve};
use super::{App, RequestId, Shared, logprobs, prompt};
use crate::text::Tokenizer;

/// OpenAI's default.
pub(super) const DEFAULT_MAX_TOKENS: i64 = 16;

pub(super) async fn handle(
    State(app): Shared,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(&app, "/v1/completions", id, request, prepare).await
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
    let max = fields.integer("max_tokens", 1..=i64::from(u32::MAX))?.unwrap_or(DEFAULT_MAX_TOKENS);
    ask.limit(u32::try_from(max).ok())?;
    ask.sampling.logprobs = fields.integer("logprobs", 0..=5)?.and_then(|count| u32::try_from(count).ok());
    let echo = fields.boolean("echo")?.unwrap_or(false);
    if echo && ask.sampling.logprobs.is_some() {
        let message = "echo with logprobs asks for log probabilities of the prompt, which are not computed here: leave one of them out";
        return Err(ApiError::unsupported("echo", message));
    }
    // Texts are always given the special tokens that the model begins with.
    fields.refuse_unless("add_special_tokens", |value| value == &Value::Bool(true))?;
    let prompt = fields.take("prompt");
    fields.refuse_rest(|_| None)?;
    let prompts = read_prompts(app, prompt)?;
    let echoed = prompts.iter().map(|prompt| if echo { prompt.text(app, &ask) } else { String::new() });
    let shape = Completion {
        id: format!("cmpl-{}", id.0),
        created: clock::unix_seconds(),
        model: app.model.clone(),
        logprobs: ask.sampling.logprobs.is_some(),
        include_usage: ask.include_usage,
        cache_details: ask.cache_details,
        n: ask.n as usize,
        echoes: echoed.collect(),
        begun: vec![!echo; prompts.len() * ask.n as usize],
    };
    let items = prompts.into_iter().map(|prompt| Item { prompt: prompt.tokens, ask: ask.clone() }).collect();
    Ok(Prepared { items, shape })
}

/// One prompt.
struct Prompt {
    /// As it was given, if it was given as text.
    given: Option<String>,
    /// At least one.
    tokens: Vec<u32>,
}

impl Prompt {
    fn text(&self, app: &App, ask: &Ask) -> String {
        self.given.clone().unwrap_or_else(|| prompt::decode(app, &self.tokens, ask.specials))
    }
}

/// A string, a list of token ids, or a list of either.
fn read_prompts(app: &App, given: Option<Value>) -> Result<Vec<Prompt>, ApiError> {
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
            items.into_iter().map(|item| read_prompt(app, item)).collect()
        }
        Some(one) => Ok(vec![read_prompt(app, one)?]),
    }
}

fn read_prompt(app: &App, given: Value) -> Result<Prompt, ApiError> {
    let fields = Fields::default();
    let (given, tokens) = match given {
        Value::String(text) => {
            let tokens = prompt::encode(app, &text, true)?;
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
    cache_details: bool,
    /// Answers to each prompt.
    n: usize,
    /// What each prompt's answers begin with.
    echoes: Vec<String>,
    /// Of each answer, whether it has begun.
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

    /// One answer, or a piece of it. The first one has the prompt in front, if that is echoed.
    fn choice(
        &mut self,
        number: usize,
        tokenizer: &dyn Tokenizer,
        piece: &Piece,
        end: Option<&End>,
    ) -> Value {
        let logprobs = self.logprobs.then(|| logprobs::of_completion(tokenizer, &piece.shown));
        let begun = self.begun.get_mut(number).is_none_or(|begun| std::mem::replace(begun, true));
        let echo = if begun { "" } else { self.echoes.get(number / self.n).map_or("", String::as_str) };
        json!({
            "index": number,
            "text": format!("{echo}{}", piece.text),
            "logprobs": logprobs,
            "finish_reason": end.map(|end| end.reason),
            "stop_reason": end.and_then(stop_reason),
        })
    }

    fn event(&self, choice: Value) -> Value {
        let mut event = self.object(json!([choice]));
        if self.include_usage {
            event["usage"] = Value::Null;
        }
        event
    }
}

impl Shape for Completion {
    fn piece(&mut self, number: usize, tokenizer: &dyn Tokenizer, piece: Piece) -> Vec<Value> {
        if piece.text.is_empty() && piece.shown.is_empty() {
            return Vec::new();
        }
        let choice = self.choice(number, tokenizer, &piece, None);
        vec![self.event(choice)]
    }

    fn end(&mut self, number: usize, tokenizer: &dyn Tokenizer, end: &End) -> Vec<Value> {
        let choice = self.choice(number, tokenizer, &Piece::default(), Some(end));
        let mut event = self.event(choice);
        if self.cache_details {
            event["sglext"] = end.cache_details();
        }
        vec![event]
    }

    fn close(&mut self, usage: &Usage) -> Vec<Value> {
        if !self.include_usage {
            return Vec::new();
        }
        let mut last = self.object(json!([]));
        last["usage"] = usage.json();
        vec![last]
    }

    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Vec<(Vec<Piece>, End)>, usage: &Usage) -> Value {
        let choices = all.iter().enumerate();
        let choices: Vec<Value> = choices
            .map(|(number, (pieces, end))| self.choice(number, tokenizer, &joined(pieces), Some(end)))
            .collect();
        let mut answer = self.object(Value::Array(choices));
        answer["usage"] = usage.json();
        if let Some((_, end)) = all.first().filter(|_| self.cache_details) {
            answer["sglext"] = end.cache_details();
        }
        answer
    }
}
