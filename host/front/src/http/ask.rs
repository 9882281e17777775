//! The fields that requests of all endpoints share.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use axum::http::HeaderMap;
use host_core::radix::NamespaceKey;
use host_grammar::Source;
use host_wire::proto::Sampling;
use host_wire::random::random_u64;
use serde_json::Value;

use super::App;
use super::error::ApiError;
use super::fields::{Fields, empty};
use super::structured;
use crate::router::Job;

/// Everything but the prompt.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub max_new_tokens: Option<u32>,
    /// The name of its field in this endpoint, or in this request.
    pub answer_field: &'static str,
    pub default_max_tokens: u32,
    pub sampling: Sampling,
    pub grammar: Option<Source>,
    pub stop: Vec<String>,
    pub stop_tokens: Vec<u32>,
    pub ignore_stop: bool,
    pub stream: bool,
    pub include_usage: bool,
    pub namespace: NamespaceKey,
    pub no_cache: bool,
    /// A hash of the session's name, see [`session`].
    pub session: Option<u64>,
}

const MAX_SESSION: usize = 256;
/// The usual one, and Dynamo's.
const SESSION_HEADERS: [&str; 2] = ["x-session-id", "x-dynamo-session-id"];
const MAX_STOPS: usize = 4;
const MAX_STOP_BYTES: usize = 1024;
const MAX_STOP_TOKENS: usize = 64;

impl Ask {
    /// Takes the fields that all endpoints share. `seed` is the name of the seed's field.
    pub fn take(app: &App, fields: &mut Fields, seed: &str) -> Result<Self, ApiError> {
        let temperature = fields.number("temperature", 0.0, 2.0, true)?.unwrap_or(1.0);
        let top_p = fields.number("top_p", 0.0, 1.0, false)?.unwrap_or(1.0);
        let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(0);
        let seed = match fields.integer(seed, i64::MIN..=i64::MAX)? {
            Some(seed) => seed.cast_unsigned(),
            None => random_u64()
                .map_err(|error| ApiError::internal(format!("no randomness for a seed: {error}")))?,
        };
        let vocabulary = app.text.tokenizer.vocabulary();
        let mut stop_tokens = app.text.end.clone();
        match fields.take("stop_token_ids") {
            None => {}
            Some(Value::Array(ids)) if ids.len() <= MAX_STOP_TOKENS => {
                stop_tokens.extend(fields.token_ids("stop_token_ids", &ids, vocabulary)?);
            }
            Some(other) => {
                let expected = format!("a list of up to {MAX_STOP_TOKENS} token ids");
                return Err(fields.wrong("stop_token_ids", expected, &other));
            }
        }
        #[expect(clippy::cast_possible_truncation, reason = "f32 is what sampling computes in")]
        let sampling = Sampling {
            temperature: temperature as f32,
            // A tiny positive number must stay in (0, 1].
            top_p: (top_p as f32).max(f32::MIN_POSITIVE),
            // In other servers -1 stands for "all".
            top_k: u32::try_from(top_k).unwrap_or(0),
            seed,
            logprobs: None,
        };
        Ok(Self {
            max_new_tokens: None,
            answer_field: "max_tokens",
            default_max_tokens: app.default_max_tokens,
            sampling,
            grammar: structured::take(fields)?,
            stop: stops(fields)?,
            stop_tokens,
            ignore_stop: fields.boolean("ignore_eos")?.unwrap_or(false),
            stream: false,
            include_usage: false,
            namespace: NamespaceKey { model: app.model.clone(), ..NamespaceKey::default() },
            no_cache: false,
            session: None,
        })
    }

    /// Takes the fields about the use of cached KV: SGLang's `extra_key`, vLLM's `cache_salt`, and `no_cache`.
    pub fn take_caching(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        self.namespace.extra_key = fields.short_string("extra_key", NamespaceKey::MAX_PART)?;
        self.namespace.salt = fields.short_string("cache_salt", NamespaceKey::MAX_PART)?;
        self.no_cache = fields.boolean("no_cache")?.unwrap_or(false);
        let session = fields.short_string("session_id", MAX_SESSION)?;
        // OpenAI's name for requests that begin alike. It is no session, but it has the same effect.
        let prompt_cache_key = fields.take("prompt_cache_key");
        self.session = session_hash(&session).or_else(|| session_hash(prompt_cache_key.as_ref()?.as_str()?));
        Ok(())
    }

    /// Takes `stream` and `stream_options`.
    pub fn take_stream(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        self.stream = fields.boolean("stream")?.unwrap_or(false);
        let given = fields.take("stream_options");
        match given {
            None => {}
            Some(Value::Object(options)) if self.stream => {
                self.include_usage = options.get("include_usage").and_then(Value::as_bool).unwrap_or(false);
            }
            Some(other) if self.stream => return Err(fields.wrong("stream_options", "an object", &other)),
            Some(_) => {
                return Err(ApiError::field(
                    "stream_options",
                    "stream_options is only for requests with stream",
                ));
            }
        }
        Ok(())
    }

    /// Refuses what OpenAI's endpoints have and this server has not, where a value would change the answer.
    pub fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
        let number = |wanted: f64| move |value: &Value| value.as_f64() == Some(wanted);
        let one_of = |values: &'static [&'static str]| {
            move |value: &Value| value.as_str().is_some_and(|text| values.contains(&text))
        };
        if let Some(n) = fields.integer("n", 1..=i64::from(u32::MAX))?
            && n != 1
        {
            return Err(ApiError::unsupported(
                "n",
                format!("n must be 1, got {n}: send {n} requests instead"),
            ));
        }
        for name in [
            "presence_penalty",
            "frequency_penalty",
            "min_p",
            "min_tokens",
            "min_new_tokens",
            "length_penalty",
        ] {
            fields.refuse_unless(name, number(0.0))?;
        }
        for name in ["best_of", "repetition_penalty"] {
            fields.refuse_unless(name, number(1.0))?;
        }
        for name in [
            "logit_bias",
            "tools",
            "functions",
            "function_call",
            "echo",
            "suffix",
            "audio",
            "prediction",
            "web_search_options",
            "use_beam_search",
            "prompt_logprobs",
            "stop_regex",
            "allowed_token_ids",
            "bad_words",
            "logits_processors",
            "custom_logit_processor",
            "continue_final_message",
            "include_stop_str_in_output",
            "no_stop_trim",
        ] {
            fields.refuse_unless(name, empty)?;
        }
        for name in ["skip_special_tokens", "spaces_between_special_tokens", "detokenize"] {
            fields.refuse_unless(name, |value| value == &Value::Bool(true))?;
        }
        fields.refuse_unless("tool_choice", one_of(&["none", "auto"]))?;
        fields.refuse_unless("modalities", |value| {
            value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind == "text"))
        })
    }

    /// The request in tokens.
    pub fn job(&self, request_id: String, prompt: Vec<u32>) -> Job {
        Job {
            request_id,
            prompt: Arc::new(prompt),
            max_new_tokens: self.max_new_tokens,
            answer_field: self.answer_field,
            default_max_tokens: self.default_max_tokens,
            stop_tokens: self.stop_tokens.clone(),
            ignore_stop: self.ignore_stop,
            sampling: self.sampling,
            grammar: self.grammar.clone(),
            restartable: !self.stream,
            namespace: self.namespace.clone(),
            no_cache: self.no_cache,
            session: self.session,
        }
    }
}

/// Names the session for the router, if there is a name.
fn session_hash(name: &str) -> Option<u64> {
    static KEYS: std::sync::LazyLock<RandomState> = std::sync::LazyLock::new(RandomState::new);
    (!name.is_empty() && name.len() <= MAX_SESSION).then(|| KEYS.hash_one(name))
}

/// The session that headers name.
pub(super) fn session(headers: &HeaderMap) -> Option<u64> {
    SESSION_HEADERS.iter().find_map(|name| session_hash(headers.get(*name)?.to_str().ok()?))
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let given = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![Value::String(stop)],
        Some(Value::Array(stops)) if stops.len() <= MAX_STOPS => stops,
        Some(other) => {
            return Err(fields.wrong("stop", format!("a string or up to {MAX_STOPS} strings"), &other));
        }
    };
    given
        .into_iter()
        .map(|stop| match stop {
            Value::String(stop) if !stop.is_empty() && stop.len() <= MAX_STOP_BYTES => Ok(stop),
            other => Err(fields.wrong("stop", format!("strings of 1 to {MAX_STOP_BYTES} bytes"), &other)),
        })
        .collect()
}

/// Checks that the request means this server's model; leaving it out means that too.
pub(super) fn check_model(app: &App, fields: &mut Fields) -> Result<(), ApiError> {
    match fields.string("model")? {
        Some(model) if model != app.model => Err(ApiError::unknown_model(&model, &app.model)),
        _ => Ok(()),
    }
}

/// At least one token.
pub(super) fn not_empty(name: &str, prompt: Vec<u32>) -> Result<Vec<u32>, ApiError> {
    if prompt.is_empty() {
        return Err(ApiError::field(name, format!("{name} is empty: it must have at least one token")));
    }
    Ok(prompt)
}
