//! The fields that requests of all endpoints share.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
use host_core::radix::NamespaceKey;
use host_grammar::Source;
use host_wire::clock::{self, Instant};
use host_wire::proto::Sampling;
use serde_json::Value;

use super::error::ApiError;
use super::fields::{Fields, empty};
use super::structured::{self, Named};
use super::{App, sampling};
use crate::router::{Deadline, Failure, Job, Pages};
use crate::text::{Specials, Stops};

/// All fields of a request except its prompt.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub max_new_tokens: Option<u32>,
    /// The name that this endpoint or this request uses for `max_new_tokens`.
    pub answer_field: &'static str,
    pub default_max_tokens: u32,
    pub sampling: Sampling,
    /// `Some(n)`: the log probabilities of the prompt's tokens are wanted, too, each with those of the n likeliest tokens.
    pub scores: Option<u32>,
    /// Whether an answer is wanted, beside what is told of the prompt.
    pub answers: bool,
    pub grammar: Option<Source>,
    /// Grammars that have to compile before the request is served. Clones share them.
    pub named: Arc<Vec<Named>>,
    pub stops: Stops,
    /// The model's end tokens, unless they are ignored.
    pub end_tokens: Vec<u32>,
    /// The stop tokens of the request itself.
    pub stop_tokens: Vec<u32>,
    /// Whether the stop string or stop token that ended the answer is part of its text.
    pub shows_stop: bool,
    pub specials: Specials,
    /// The number of answers, and the number of candidates from which they are chosen.
    pub n: u32,
    pub best_of: u32,
    pub stream: bool,
    pub include_usage: bool,
    /// Whether every event has the usage so far.
    pub usage_in_all: bool,
    /// Whether the answer tells where cached tokens were.
    pub cache_details: bool,
    pub namespace: NamespaceKey,
    pub no_cache: bool,
    /// A hash of the session's name, see [`session`].
    pub session: Option<u64>,
    /// Requests with smaller numbers go first. If absent, the priority of the key, or 0.
    pub priority: Option<i32>,
    /// The client's time limit, from the arrival of the request to the end of its answer.
    pub timeout: Option<Duration>,
}

/// Most bytes of the settings of all answers to one request: each answer has its own.
const MOST_SETTINGS: usize = 16 << 20;
/// Most answers to one request.
pub(super) const MOST_ANSWERS: usize = 128;
/// Most tokens of the prompts of all answers to one request: each answer's workers get a copy.
pub(super) const MOST_PROMPT_TOKENS: usize = 1 << 21;
/// Fields of features that this server does not have. They are accepted only with values that ask for nothing.
pub(super) const ABSENT: [&str; 12] = [
    "tools",
    "functions",
    "function_call",
    "suffix",
    "audio",
    "prediction",
    "web_search_options",
    "use_beam_search",
    "stop_regex",
    "logits_processors",
    "custom_logit_processor",
    "continue_final_message",
];

pub(super) const MAX_SESSION: usize = 256;
/// The usual header, and Dynamo's.
const SESSION_HEADERS: [&str; 2] = ["x-session-id", "x-dynamo-session-id"];
const TIMEOUT_HEADER: &str = "x-request-timeout";
/// Longest time limit that a client may give: a day. `--request-timeout` may end the request earlier.
pub(super) const MOST_SECONDS: f64 = 86_400.0;
pub(super) const MAX_STOPS: usize = 16;
pub(super) const MAX_STOP_BYTES: usize = 1024;
pub(super) const MAX_STOP_TOKENS: usize = 128;

impl Ask {
    /// Takes the fields that all endpoints share. `seed` is the name of the seed's field.
    pub fn take(app: &App, fields: &mut Fields, seed: &str) -> Result<Self, ApiError> {
        let vocabulary = app.text.tokenizer.vocabulary();
        let stop_tokens = fields.token_list("stop_token_ids", MAX_STOP_TOKENS, vocabulary)?;
        let ignores_end = fields.boolean("ignore_eos")?.unwrap_or(false);
        let ends = [&app.text.end[..], &stop_tokens].concat();
        let sampling = sampling::take(app, fields, seed, ends)?;
        let shows_stop = fields.boolean("include_stop_str_in_output")?;
        let shows_stop = shows_stop.or(fields.boolean("no_stop_trim")?).unwrap_or(false);
        let hides = fields.boolean("skip_special_tokens")?.unwrap_or(true);
        let most = i64::try_from(MOST_ANSWERS).unwrap_or(i64::MAX);
        let n = fields.integer("n", 1..=most)?.and_then(|n| u32::try_from(n).ok()).unwrap_or(1);
        let mut ask = Self {
            max_new_tokens: None,
            answer_field: "max_tokens",
            default_max_tokens: app.default_max_tokens,
            sampling,
            scores: None,
            answers: true,
            grammar: None,
            named: Arc::default(),
            stops: Stops::default(),
            end_tokens: if ignores_end { Vec::new() } else { app.text.end.clone() },
            stop_tokens,
            shows_stop,
            specials: if hides { Specials::Hidden } else { Specials::Shown },
            n,
            best_of: n,
            stream: false,
            include_usage: false,
            usage_in_all: false,
            cache_details: false,
            namespace: NamespaceKey { model: app.model.clone(), ..NamespaceKey::default() },
            no_cache: false,
            session: None,
            priority: None,
            timeout: None,
        };
        if let Some(named) = structured::take(fields)? {
            ask.follow(named.source.clone(), [named]);
        }
        ask.stops = stops(fields)?.into();
        Ok(ask)
    }

    /// Makes the answer follow a grammar. `named`: grammars that have to compile first.
    pub fn follow(&mut self, grammar: Source, named: impl IntoIterator<Item = Named>) {
        self.grammar = Some(grammar);
        Arc::make_mut(&mut self.named).extend(named);
    }

    /// Takes the caching, the session, the priority and the timeout of another request.
    pub fn serve_as(&mut self, other: &Self) {
        let Self { namespace, no_cache, cache_details, session, priority, timeout, .. } = other;
        self.namespace.clone_from(namespace);
        (self.no_cache, self.cache_details, self.session) = (*no_cache, *cache_details, *session);
        (self.priority, self.timeout) = (*priority, *timeout);
    }

    /// Takes `best_of`: the number of candidates, of which the likeliest are returned.
    pub fn take_best_of(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        let most = i64::try_from(MOST_ANSWERS).unwrap_or(i64::MAX);
        let Some(best_of) = fields.integer("best_of", 1..=most)? else { return Ok(()) };
        self.best_of = u32::try_from(best_of).unwrap_or(1);
        if self.best_of < self.n {
            let message = format!("best_of is {best_of}, and n is {}: it must be n or more", self.n);
            return Err(ApiError::field("best_of", message));
        }
        if self.best_of > self.n && self.stream {
            let message =
                "best_of is more than n, so answers are chosen when all are there: leave stream out";
            return Err(ApiError::field("best_of", message));
        }
        Ok(())
    }

    /// Sets how many tokens the answer may have.
    pub fn limit(&mut self, max_new_tokens: Option<u32>) -> Result<(), ApiError> {
        self.max_new_tokens = max_new_tokens;
        let least = self.sampling.min_tokens;
        match max_new_tokens {
            Some(most) if least > most => {
                let message = format!(
                    "min_tokens is {least}, and {} is {most}: it must not be less",
                    self.answer_field
                );
                Err(ApiError::field("min_tokens", message))
            }
            _ => Ok(()),
        }
    }

    /// Whether the token ends the answer.
    pub fn ends_at(&self, token: u32) -> bool {
        self.end_tokens.contains(&token) || self.stop_tokens.contains(&token)
    }

    /// The settings for each of so many prompts.
    ///
    /// # Errors
    /// When they have more bytes together than a request may have.
    pub fn for_prompts(self, prompts: usize) -> Result<Vec<Self>, ApiError> {
        self.check_for(prompts * self.candidates())?;
        Ok(vec![self; prompts])
    }

    /// Bytes of these settings in so many answers.
    ///
    /// # Errors
    /// When they are more than a request may have.
    pub fn check_for(&self, answers: usize) -> Result<usize, ApiError> {
        let bytes = self.memory() * answers + self.stops.memory();
        if bytes > MOST_SETTINGS {
            let message = format!(
                "the settings of {answers} answers have {bytes} bytes (grammar, bad words, stop strings, biases), and {MOST_SETTINGS} is \
                 the limit; send several requests"
            );
            return Err(ApiError::invalid(message));
        }
        Ok(bytes)
    }

    /// Bytes of the settings whose length the client chooses, without the stop strings, which all answers share.
    pub fn memory(&self) -> usize {
        let Sampling { end_tokens, logit_bias, allowed_tokens, bad_words, .. } = &self.sampling;
        let tokens = end_tokens.len() + allowed_tokens.len() + self.end_tokens.len() + self.stop_tokens.len();
        let words: usize =
            bad_words.iter().map(|word| size_of_val(word) + word.tokens.len() * size_of::<u32>()).sum();
        let grammar = self.grammar.as_ref().map_or(0, |grammar| grammar.text.len());
        // The answer has them, and its request to workers.
        2 * (tokens * size_of::<u32>() + size_of_val(&logit_bias[..]) + words + grammar)
    }

    /// Answers that are computed.
    pub fn candidates(&self) -> usize {
        self.best_of as usize
    }

    /// The fields of one candidate. Its seed is the request's seed plus its number.
    pub fn candidate(&self, number: usize) -> Self {
        let mut ask = self.clone();
        ask.sampling.seed = ask.sampling.seed.wrapping_add(number as u64);
        if self.best_of > self.n {
            // Candidates are compared by their log probabilities.
            ask.sampling.logprobs.get_or_insert(0);
        }
        ask
    }

    /// Takes the fields about the use of cached KV (SGLang's `extra_key`, vLLM's `cache_salt`, and `no_cache`), and about when the
    /// request is served.
    pub fn take_serving(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        self.namespace.extra_key = fields.short_string("extra_key", NamespaceKey::MAX_PART)?;
        self.namespace.salt = fields.short_string("cache_salt", NamespaceKey::MAX_PART)?;
        self.no_cache = fields.boolean("no_cache")?.unwrap_or(false);
        self.cache_details = fields.boolean("return_cached_tokens_details")?.unwrap_or(false);
        let priority = fields.integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?;
        self.priority = priority.and_then(|priority| i32::try_from(priority).ok());
        self.timeout = fields.number("timeout", 0.0, MOST_SECONDS, false)?.map(Duration::from_secs_f64);
        let session = fields.short_string("session_id", MAX_SESSION)?;
        // OpenAI's key for requests whose prompts begin alike. It is not a session, but it has the same effect.
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
            Some(_) if !self.stream => {
                return Err(ApiError::field(
                    "stream_options",
                    "stream_options is only for requests with stream",
                ));
            }
            Some(Value::Object(options)) => {
                let mut options = Fields::within("stream_options.", options);
                self.include_usage = options.boolean("include_usage")?.unwrap_or(false);
                self.usage_in_all = options.boolean("continuous_usage_stats")?.unwrap_or(false);
                // The field is checked only: this server never pads events.
                options.boolean("include_obfuscation")?;
                options.refuse_rest(|_| None)?;
            }
            Some(other) => return Err(fields.wrong("stream_options", "an object", &other)),
        }
        Ok(())
    }

    /// Refuses fields of OpenAI's endpoints that this server does not have, where their values would change the answer.
    pub fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
        // Tools that may not be called do not change the answer.
        let choice = fields.take("tool_choice");
        match choice.as_ref().and_then(Value::as_str) {
            Some("none") => drop(fields.take("tools")),
            Some("auto") => {}
            _ => {
                if let Some(choice) = choice {
                    return Err(fields.unsupported("tool_choice", &choice));
                }
            }
        }
        fields.refuse_unless("length_penalty", |value| matches!(value.as_f64(), Some(0.0 | 1.0)))?;
        for name in ABSENT {
            fields.refuse_unless(name, empty)?;
        }
        // For this field, 0 is not the same as absent.
        fields.refuse_unless("prompt_logprobs", |value| value == &Value::Bool(false))?;
        fields.refuse_unless("detokenize", |value| value == &Value::Bool(true))?;
        fields.refuse_unless("modalities", |value| {
            value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind == "text"))
        })
    }

    /// The request in tokens, as the router takes it. `arrived`: when the request arrived.
    pub fn job(&self, request_id: String, prompt: Arc<Vec<u32>>, pages: Pages, arrived: Instant) -> Job {
        let ends = [&self.end_tokens[..], &self.stop_tokens].concat();
        Job {
            request_id,
            prompt,
            pages,
            max_new_tokens: self.max_new_tokens,
            answer_field: self.answer_field,
            default_max_tokens: self.default_max_tokens,
            ignore_stop: ends.is_empty(),
            stop_tokens: ends,
            sampling: self.sampling.clone(),
            scores: self.scores,
            answers: self.answers,
            grammar: self.grammar.clone(),
            restartable: !self.stream,
            namespace: self.namespace.clone(),
            no_cache: self.no_cache,
            session: self.session,
            priority: self.priority.unwrap_or(0),
            arrived,
            deadline: self.timeout.map(|given| Deadline { at: arrived + given, given }),
        }
    }
}

/// A hash of the session's name for the router, or none if the name is empty or too long.
pub(super) fn session_hash(name: &str) -> Option<u64> {
    static KEYS: std::sync::LazyLock<RandomState> = std::sync::LazyLock::new(RandomState::new);
    (!name.is_empty() && name.len() <= MAX_SESSION).then(|| KEYS.hash_one(name))
}

/// The session that the request's headers name.
pub(super) fn session(headers: &HeaderMap) -> Option<u64> {
    SESSION_HEADERS.iter().find_map(|name| session_hash(headers.get(*name)?.to_str().ok()?))
}

/// The time limit that the request's header sets.
pub(super) fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, ApiError> {
    let Some(given) = headers.get(TIMEOUT_HEADER) else { return Ok(None) };
    let seconds = given.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok());
    match seconds {
        Some(seconds) if seconds > 0.0 && seconds <= MOST_SECONDS => {
            Ok(Some(Duration::from_secs_f64(seconds)))
        }
        _ => {
            let message =
                format!("the header {TIMEOUT_HEADER} must be seconds, above 0 and up to {MOST_SECONDS}");
            Err(ApiError::field(TIMEOUT_HEADER, message))
        }
    }
}

/// Work of a request before it is sent to workers: its body arrives, waits for its turn, and its grammars compile. `given`: the client's
/// time limit, if it is known.
///
/// # Errors
/// Those of the work, and an error when the request's time is over.
pub(super) async fn in_time<T>(
    app: &App,
    arrived: Instant,
    given: Option<Duration>,
    work: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    let longest = app.router.longest();
    tokio::select! {
        done = work => done,
        () = clock::sleep_until(arrived + given.map_or(longest, |given| given.min(longest))) => match given {
            Some(given) if given <= longest => Err(Failure::Late(given).into()),
            _ => Err(ApiError::busy(format!(
                "the request did not arrive and begin within {} s, which is the limit (--request-timeout); send it faster if the network is \
                 slow, or try again soon",
                longest.as_secs_f64()
            ))),
        },
    }
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

/// Checks that the request names this server's model, or no model.
pub(super) fn check_model(app: &App, fields: &mut Fields) -> Result<(), ApiError> {
    fields.string("model")?.map_or(Ok(()), |model| app.check_name(&model))
}

/// Checks that a prompt has at least one token.
pub(super) fn not_empty(name: &str, prompt: Vec<u32>) -> Result<Vec<u32>, ApiError> {
    if prompt.is_empty() {
        return Err(ApiError::field(name, format!("{name} is empty: it must have at least one token")));
    }
    Ok(prompt)
}
