//! Turns tokens into what a client reads: text, stop strings, log probabilities, usage, and the figures for metrics.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use host_wire::clock::{self, Instant};
use host_wire::proto::{Began, Finished, Token, TopToken};
use tokio::sync::watch;

use super::apart::write_apart;
use super::ask::{Ask, MAX_STOP_BYTES};
use crate::metrics::Metrics;
use crate::router::{Event, Failure, Generation, ServedBy};
use crate::text::{StopMatcher, TextStream, Tokenizer};

/// A token whose text is shown.
#[derive(Clone, Debug)]
pub(super) struct Shown {
    /// The token with its log probabilities.
    pub token: Token,
    /// Where its text begins in the answer's text, in characters.
    pub offset: usize,
    /// Where its text begins in bytes.
    begins: usize,
}

/// What one step of a generation adds to the answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Delta {
    /// Text that is final.
    pub text: String,
    /// All tokens of the prompt, when their log probabilities were requested. They come once, before anything else.
    pub prompt: Vec<Shown>,
    /// Tokens whose text has begun to show, when log probabilities were requested.
    pub shown: Vec<Shown>,
    /// Tokens that workers generated, end tokens included.
    pub tokens: Vec<u32>,
}

/// Most tokens without text that wait for the next token that has one, before they count as shown.
const MOST_HIDDEN: usize = 16;
/// Most tokens that wait until it is known whether their text is part of a stop string.
const MOST_WAITING: usize = MAX_STOP_BYTES + MOST_HIDDEN;
/// Bytes of a token's log probability in an answer: the names of its fields and a number.
const LOGPROB: usize = 64;
/// The same for each byte of the token: in its name, which may be escaped, and in decimal digits.
const LOGPROB_BYTE: usize = 10;

impl Shown {
    /// One without text before it.
    #[cfg(test)]
    pub fn at_the_beginning(token: Token) -> Self {
        Self { token, offset: 0, begins: 0 }
    }

    /// Bytes that it takes, about.
    pub fn memory(&self) -> usize {
        size_of::<Self>() + self.token.top.len() * size_of::<TopToken>()
    }

    /// Bytes of its log probabilities as JSON, at most.
    pub fn written(&self, tokenizer: &dyn Tokenizer) -> usize {
        let logprob = |token: u32| LOGPROB + LOGPROB_BYTE * tokenizer.token_bytes(token).len();
        let top: usize = self.token.top.iter().map(|top| logprob(top.token)).sum();
        logprob(self.token.token) + top
    }
}

impl Delta {
    /// Bytes that it takes, about, with those that it takes when it is written as JSON.
    pub fn memory(&self, tokenizer: &dyn Tokenizer) -> usize {
        let all = self.prompt.iter().chain(&self.shown);
        let written: usize = all.map(|shown| shown.written(tokenizer)).sum();
        size_of::<Self>() + self.kept() + written
    }

    /// Bytes that it adds to an answer that is kept.
    pub fn kept(&self) -> usize {
        let shown: usize = self.prompt.iter().chain(&self.shown).map(Shown::memory).sum();
        self.text.len() + size_of_val(&self.tokens[..]) + shown
    }
}

/// Joins deltas into one.
pub(super) fn joined(deltas: &[Delta]) -> Delta {
    let mut all = Delta::default();
    for delta in deltas {
        all.text.push_str(&delta.text);
        all.prompt.extend_from_slice(&delta.prompt);
        all.shown.extend_from_slice(&delta.shown);
        all.tokens.extend_from_slice(&delta.tokens);
    }
    all
}

/// How an answer ended.
#[derive(Clone, Debug)]
pub(super) struct End {
    /// "stop" or "length".
    pub reason: &'static str,
    /// The stop string or the token that ended it.
    pub matched: Option<Matched>,
    /// Whether that token is a stop token of the request, and not an end token of the model.
    pub is_own_stop: bool,
    /// The sum of the log probabilities of its tokens, if they were requested.
    pub logprobs: f64,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// The decode worker's report. If a stop string ended the answer here, the part that the worker had reported by then.
    pub finished: Option<Finished>,
    pub served_by: Option<ServedBy>,
    pub first_token: Duration,
    pub elapsed: Duration,
}

/// What ended an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Matched {
    Text(String),
    Token(u32),
}

/// vLLM's `stop_reason`: the stop string, or the request's own token, that ended an answer.
pub(super) fn stop_reason(end: &End) -> Option<serde_json::Value> {
    match end.matched.as_ref()? {
        Matched::Text(text) => Some(text.as_str().into()),
        Matched::Token(token) => end.is_own_stop.then(|| (*token).into()),
    }
}

/// The next part of an answer.
#[derive(Debug)]
pub(super) enum Next {
    Delta(Delta),
    /// All deltas so far are void, and the answer begins again.
    Restarted,
    End(Box<End>),
}

/// An answer under way. Dropping it cancels the request.
pub(super) struct Answer {
    /// Absent once the client has all that it wants.
    generation: Option<Generation>,
    metrics: Arc<Metrics>,
    tokenizer: Arc<dyn Tokenizer>,
    ask: Ask,
    /// Becomes true when the KV of the whole prompt is there. Other answers to the same prompt wait for it.
    leads: watch::Sender<bool>,
    follows: Option<watch::Receiver<bool>>,
    /// The tokens of the prompt with their log probabilities, which the first answer to a prompt brings for all.
    prompt: Arc<OnceLock<Vec<Shown>>>,
    /// Whether they have not been told yet, or not since the answer began again.
    owes_prompt: bool,
    text: Box<dyn TextStream>,
    stops: StopMatcher,
    /// Bytes of text decoded, and of these shown.
    decoded: usize,
    shown: usize,
    /// Characters of text decoded.
    characters: usize,
    waiting: VecDeque<Shown>,
    /// The first token of its prompt.
    prompt_first: Option<u32>,
    prompt_tokens: u32,
    output_tokens: u32,
    /// The worker's report on the prompt's KV, as far as it came.
    began: Option<Began>,
    /// The token that ended the answer, if one did.
    ended_by: Option<u32>,
    end: Option<End>,
    arrived: Instant,
    first: Option<Instant>,
    last: Instant,
    /// The sum of the log probabilities of its tokens, as far as they were requested.
    logprobs: f64,
}

impl Answer {
    pub fn new(
        generation: Generation,
        tokenizer: Arc<dyn Tokenizer>,
        ask: Ask,
        prompt: &[u32],
        arrived: Instant,
        metrics: Arc<Metrics>,
    ) -> Self {
        let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        metrics.prompt_tokens.inc_by(u64::from(prompt_tokens));
        Self {
            generation: Some(generation),
            metrics,
            leads: watch::Sender::new(false),
            follows: None,
            prompt: Arc::default(),
            owes_prompt: true,
            text: Arc::clone(&tokenizer).stream(ask.specials),
            tokenizer,
            stops: StopMatcher::new(ask.stops.clone()).showing(ask.shows_stop),
            ask,
            decoded: 0,
            shown: 0,
            characters: 0,
            waiting: VecDeque::new(),
            prompt_first: prompt.first().copied(),
            prompt_tokens,
            output_tokens: 0,
            began: None,
            ended_by: None,
            end: None,
            arrived,
            first: None,
            last: arrived,
            logprobs: 0.0,
        }
    }

    /// Makes this answer begin only when the KV of `leader`'s prompt is there, or `leader` has ended. Both have the same prompt.
    pub fn after(self, leader: &Answer) -> Self {
        Self { follows: Some(leader.leads.subscribe()), prompt: Arc::clone(&leader.prompt), ..self }
    }

    /// Returns when workers were chosen and called. Returns at once for an answer that follows another.
    pub async fn admitted(&mut self) -> Result<(), Failure> {
        if self.follows.is_some() {
            return Ok(());
        }
        match self.next_event().await? {
            Event::Dispatched => Ok(()),
            event => Err(Failure::Internal(format!("a request began with {event:?}"))),
        }
    }

    /// Tokens of its prompt.
    pub fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    async fn next_event(&mut self) -> Result<Event, Failure> {
        self.begins().await;
        match &mut self.generation {
            Some(generation) => generation.next().await,
            None => Err(Failure::Internal("an answer was asked for more than it has".to_owned())),
        }
    }

    /// Waits for the answer that this one follows.
    async fn begins(&mut self) {
        if let Some(leader) = &mut self.follows {
            // An error means that the leader has ended or failed: then this answer begins, too.
            drop(leader.wait_for(|began| *began).await);
            self.follows = None;
        }
    }

    /// The tokens of the prompt, if they are there and have not been told.
    fn owed_prompt(&mut self) -> Option<Delta> {
        let prompt = self.prompt.get().filter(|_| self.owes_prompt)?.clone();
        self.owes_prompt = false;
        Some(Delta { prompt, ..Delta::default() })
    }

    /// Keeps the log probabilities of the prompt's tokens, all but the first, for the answers to it.
    fn scored(&mut self, scores: Vec<Token>) {
        let mut text = Arc::clone(&self.tokenizer).stream(self.ask.specials);
        let (mut begins, mut offset, bytes) = (0, 0, scores.len() * LOGPROB);
        let first = self.prompt_first.map(|token| Token { token, logprob: None, top: Vec::new() });
        let shown = first.into_iter().chain(scores).map(|token| {
            let new = text.push(token.token);
            let shown = Shown { token, offset, begins };
            begins += new.len();
            offset += new.chars().count();
            shown
        });
        // It is set once: a prompt's log probabilities are found once.
        drop(self.prompt.set(write_apart(bytes, || shown.collect())));
        if !self.ask.answers {
            self.leads.send_replace(true);
        }
    }

    /// Returns the next delta, or the end. Must not be called after the end or an error.
    pub async fn next(&mut self) -> Result<Next, Failure> {
        if let Some(end) = self.end.take() {
            return Ok(Next::End(Box::new(end)));
        }
        self.begins().await;
        let event = loop {
            if let Some(prompt) = self.owed_prompt() {
                return Ok(Next::Delta(prompt));
            }
            match self.next_event().await? {
                Event::Dispatched => {}
                Event::Began(began) => self.began(began),
                Event::Scored(scores) => self.scored(scores),
                event => break event,
            }
        };
        match event {
            Event::Dispatched | Event::Began(_) | Event::Scored(_) => unreachable!("taken in the loop above"),
            Event::Token(token) => Ok(Next::Delta(self.token(token))),
            Event::Restarted => {
                self.text = Arc::clone(&self.tokenizer).stream(self.ask.specials);
                self.stops = StopMatcher::new(self.ask.stops.clone()).showing(self.ask.shows_stop);
                (self.decoded, self.characters, self.shown, self.output_tokens) = (0, 0, 0, 0);
                (self.began, self.ended_by, self.logprobs) = (None, None, 0.0);
                self.waiting.clear();
                self.owes_prompt = true;
                Ok(Next::Restarted)
            }
            Event::Finished(finished) => {
                let tail = self.text.finish();
                let mut text = self.stops.push(&tail);
                self.decoded += tail.len();
                text.push_str(&self.stops.finish());
                let by_length = finished.reason == "length" && !self.stops.stopped();
                if self.began.is_none() {
                    // For a worker that did not report it before.
                    self.began(Began {
                        transferred_bytes: finished.transferred_bytes,
                        transfer_plugin: finished.transfer_plugin.clone(),
                        cached_tokens: finished.cached_tokens,
                        offload_tokens: finished.offload_tokens,
                    });
                }
                let reason = if by_length { "length" } else { "stop" };
                let delta = self.delta(text, Vec::new(), true);
                self.end = Some(self.ended(reason, Some(finished)));
                Ok(Next::Delta(delta))
            }
        }
    }

    /// Notes that the prompt's KV is there. Counts its figures now and not at the end: the KV of an answer that is cancelled or
    /// ends at a stop string was moved, too.
    fn began(&mut self, began: Began) {
        self.metrics.cached_tokens.inc_by(u64::from(began.cached_tokens));
        self.metrics.transferred_bytes.inc_by(began.transferred_bytes);
        self.leads.send_replace(true);
        self.began = Some(began);
    }

    fn token(&mut self, token: Token) -> Delta {
        let now = clock::now();
        match self.first {
            None => {
                self.first = Some(now);
                self.metrics.first_token.observe((now - self.arrived).as_secs_f64());
            }
            Some(_) => self.metrics.inter_token.observe((now - self.last).as_secs_f64()),
        }
        self.last = now;
        self.output_tokens += 1;
        // Counted now and not at the end: an answer that is cancelled or begins again was work, too.
        self.metrics.output_tokens.inc();
        let id = token.token;
        self.logprobs += f64::from(token.logprob.unwrap_or(0.0));
        if self.ask.ends_at(id) {
            // The worker ends the answer after this token. An end token is no part of the text.
            self.ended_by = Some(id);
            if self.ask.shows_stop && self.ask.stop_tokens.contains(&id) {
                let new = self.text.push(id);
                self.decoded += new.len();
                let text = self.stops.push(&new);
                return self.delta(text, vec![id], false);
            }
            return Delta { tokens: vec![id], ..Delta::default() };
        }
        let new = self.text.push(id);
        if self.ask.sampling.logprobs.is_some() {
            self.waiting.push_back(Shown { token, offset: self.characters, begins: self.decoded });
        }
        self.decoded += new.len();
        self.characters += new.chars().count();
        // As in vLLM, no stop string that is complete by then ends the answer before it has `min_tokens`.
        let text = match self.output_tokens > self.ask.sampling.min_tokens {
            true => self.stops.push(&new),
            false => self.stops.pass(&new),
        };
        if self.stops.stopped() {
            // The worker's own end will not arrive, because the request is cancelled here.
            let finished = self.began.clone().map(|began| Finished {
                reason: "stop".to_owned(),
                prompt_tokens: self.prompt_tokens,
                output_tokens: self.output_tokens,
                transferred_bytes: began.transferred_bytes,
                transfer_plugin: began.transfer_plugin,
                cached_tokens: began.cached_tokens,
                offload_tokens: began.offload_tokens,
            });
            self.end = Some(self.ended("stop", finished));
            if let Some(generation) = self.generation.take() {
                generation.enough();
            }
        }
        self.delta(text, vec![id], false)
    }

    /// Makes a delta of this text and these tokens. `last`: nothing is held back any more.
    fn delta(&mut self, text: String, tokens: Vec<u32>, last: bool) -> Delta {
        self.shown += text.len();
        let all = last && !self.stops.stopped();
        let mut shown = Vec::new();
        loop {
            // Hidden tokens have no text that could show. Few of them may wait for the next one that has.
            let is_hidden =
                matches!(self.waiting.get(1), Some(next) if next.begins == self.waiting[0].begins);
            let many = is_hidden && self.waiting.len() > MOST_HIDDEN;
            let too_many = self.waiting.len() > MOST_WAITING;
            let is_shown = |token: &mut Shown| {
                all || too_many || token.begins < self.shown || many && token.begins == self.shown
            };
            match self.waiting.pop_front_if(is_shown) {
                Some(token) => shown.push(token),
                None => break,
            }
        }
        Delta { text, prompt: Vec::new(), shown, tokens }
    }

    fn ended(&self, reason: &'static str, finished: Option<Finished>) -> End {
        End {
            reason,
            matched: match self.stops.matched() {
                Some(stop) => Some(Matched::Text(stop.to_owned())),
                None => self.ended_by.map(Matched::Token),
            },
            is_own_stop: self.ended_by.is_some_and(|token| self.ask.stop_tokens.contains(&token)),
            logprobs: self.logprobs,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            finished,
            served_by: self.generation.as_ref().and_then(|generation| generation.served_by().cloned()),
            first_token: self.first.map_or(Duration::ZERO, |first| first - self.arrived),
            elapsed: clock::now() - self.arrived,
        }
    }
}

impl End {
    /// Where the cached tokens were, in SGLang's form: on the worker (`device`), or in its offload tiers (`host`).
    pub fn cache_details(&self) -> serde_json::Value {
        let offload = self.finished.as_ref().map_or(0, |finished| finished.offload_tokens);
        let device = self.cached_tokens().saturating_sub(offload);
        serde_json::json!({"cached_tokens_details": {"device": device, "host": offload}})
    }

    /// The mean log probability of its tokens, if they were requested.
    pub fn mean_logprob(&self) -> f64 {
        self.logprobs / f64::from(self.output_tokens.max(1))
    }

    /// Tokens of the prompt that were not computed for it.
    pub fn cached_tokens(&self) -> u32 {
        self.finished.as_ref().map_or(0, |finished| finished.cached_tokens)
    }
}
