//! From tokens to what a client reads: text, stop strings, log probabilities, usage, and the figures for metrics.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use host_wire::clock::{self, Instant};
use host_wire::proto::{Began, Finished, Token};

use super::ask::Ask;
use crate::metrics::{Metrics, RequestLabels};
use crate::router::{Event, Failure, Generation, ServedBy};
use crate::text::{StopMatcher, TextStream, Tokenizer};

/// A token whose text is shown.
#[derive(Clone, Debug)]
pub(super) struct Shown {
    /// The token with its log probabilities.
    pub token: Token,
    /// Where its text begins in the answer's text, in bytes.
    pub offset: usize,
}

/// What one step of a generation adds to the answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Piece {
    /// Text that will not be taken back.
    pub text: String,
    /// Tokens whose text has begun to show, when log probabilities were requested.
    pub shown: Vec<Shown>,
    /// Tokens that workers generated, end tokens included.
    pub tokens: Vec<u32>,
}

/// How an answer ended.
#[derive(Clone, Debug)]
pub(super) struct End {
    /// "stop" or "length".
    pub reason: &'static str,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// What the decode worker reported; when a stop string ended the answer here, what it had reported by then.
    pub finished: Option<Finished>,
    pub served_by: Option<ServedBy>,
    pub first_token: Duration,
    pub elapsed: Duration,
}

/// The next part of an answer.
#[derive(Debug)]
pub(super) enum Next {
    Piece(Piece),
    /// Everything so far is void; the answer begins again.
    Restarted,
    End(Box<End>),
}

/// An answer under way. Dropping it cancels the request.
pub(super) struct Answer {
    generation: Generation,
    tokenizer: Arc<dyn Tokenizer>,
    ask: Ask,
    text: Box<dyn TextStream>,
    stops: StopMatcher,
    /// Bytes of text decoded, and of these shown.
    decoded: usize,
    shown: usize,
    waiting: VecDeque<Shown>,
    prompt_tokens: u32,
    output_tokens: u32,
    /// The worker's report on the prompt's KV, as far as it came.
    began: Option<Began>,
    end: Option<End>,
    arrived: Instant,
    first: Option<Instant>,
    last: Instant,
    count: Count,
}

/// Counts the request's outcome exactly once, also when its client goes away.
pub(super) struct Count {
    metrics: Arc<Metrics>,
    endpoint: &'static str,
    outcome: &'static str,
}

impl Count {
    pub fn new(metrics: Arc<Metrics>, endpoint: &'static str) -> Self {
        Self { metrics, endpoint, outcome: "cancelled" }
    }

    pub fn set(&mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        let labels = RequestLabels { endpoint: self.endpoint, outcome: self.outcome };
        self.metrics.requests.get_or_create(&labels).inc();
    }
}

impl Answer {
    pub fn new(
        generation: Generation,
        tokenizer: Arc<dyn Tokenizer>,
        ask: Ask,
        prompt_tokens: usize,
        arrived: Instant,
        count: Count,
    ) -> Self {
        let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
        count.metrics.prompt_tokens.inc_by(u64::from(prompt_tokens));
        Self {
            generation,
            text: Arc::clone(&tokenizer).stream(),
            tokenizer,
            stops: StopMatcher::new(ask.stop.clone()),
            ask,
            decoded: 0,
            shown: 0,
            waiting: VecDeque::new(),
            prompt_tokens,
            output_tokens: 0,
            began: None,
            end: None,
            arrived,
            first: None,
            last: arrived,
            count,
        }
    }

    /// For logprob texts.
    pub fn tokenizer(&self) -> &dyn Tokenizer {
        &*self.tokenizer
    }

    /// The outcome's name in `host_requests_total`.
    pub fn set_outcome(&mut self, outcome: &'static str) {
        self.count.set(outcome);
    }

    /// The next piece, or the end. Not to be called after the end or an error.
    pub async fn next(&mut self) -> Result<Next, Failure> {
        if let Some(end) = self.end.take() {
            self.count.set("ok");
            return Ok(Next::End(Box::new(end)));
        }
        let event = loop {
            match self.generation.next().await? {
                Event::Began(began) => self.began(began),
                event => break event,
            }
        };
        match event {
            Event::Began(_) => unreachable!("taken in the loop above"),
            Event::Token(token) => Ok(Next::Piece(self.token(token))),
            Event::Restarted => {
                self.text = Arc::clone(&self.tokenizer).stream();
                self.stops = StopMatcher::new(self.ask.stop.clone());
                (self.decoded, self.shown, self.output_tokens) = (0, 0, 0);
                self.began = None;
                self.waiting.clear();
                Ok(Next::Restarted)
            }
            Event::Finished(finished) => {
                let tail = self.text.finish();
                let mut text = self.stops.push(&tail);
                self.decoded += tail.len();
                text.push_str(&self.stops.finish());
                let by_length = finished.reason == "length" && !self.stops.stopped();
                if self.began.is_none() {
                    // A worker that did not report it before.
                    self.began(Began {
                        transferred_bytes: finished.transferred_bytes,
                        transfer_plugin: finished.transfer_plugin.clone(),
                        cached_tokens: finished.cached_tokens,
                    });
                }
                let reason = if by_length { "length" } else { "stop" };
                let piece = self.piece(text, Vec::new(), true);
                self.end = Some(self.ended(reason, Some(finished)));
                Ok(Next::Piece(piece))
            }
        }
    }

    /// Counted now, not at the end: an answer that is cancelled or ends in a stop string had its KV moved, too.
    fn began(&mut self, began: Began) {
        let metrics = &self.count.metrics;
        metrics.cached_tokens.inc_by(u64::from(began.cached_tokens));
        metrics.transferred_bytes.inc_by(began.transferred_bytes);
        self.began = Some(began);
    }

    fn token(&mut self, token: Token) -> Piece {
        let now = clock::now();
        match self.first {
            None => {
                self.first = Some(now);
                self.count.metrics.first_token.observe((now - self.arrived).as_secs_f64());
            }
            Some(_) => self.count.metrics.inter_token.observe((now - self.last).as_secs_f64()),
        }
        self.last = now;
        self.output_tokens += 1;
        // Now, not at the end: an answer that is cancelled or begins again was work too.
        self.count.metrics.output_tokens.inc();
        let id = token.token;
        let ends = !self.ask.ignore_stop && self.ask.stop_tokens.contains(&id);
        if ends {
            // The worker's end follows; an end token is no part of the text.
            return Piece { tokens: vec![id], ..Piece::default() };
        }
        let new = self.text.push(id);
        if self.ask.sampling.logprobs.is_some() {
            self.waiting.push_back(Shown { token, offset: self.decoded });
        }
        self.decoded += new.len();
        let text = self.stops.push(&new);
        if self.stops.stopped() {
            // The worker's own end will not be heard.
            let finished = self.began.clone().map(|began| Finished {
                reason: "stop".to_owned(),
                prompt_tokens: self.prompt_tokens,
                output_tokens: self.output_tokens,
                transferred_bytes: began.transferred_bytes,
                transfer_plugin: began.transfer_plugin,
                cached_tokens: began.cached_tokens,
            });
            self.end = Some(self.ended("stop", finished));
        }
        self.piece(text, vec![id], false)
    }

    /// `last`: nothing is held back any more.
    fn piece(&mut self, text: String, tokens: Vec<u32>, last: bool) -> Piece {
        self.shown += text.len();
        let all = last && !self.stops.stopped();
        let mut shown = Vec::new();
        while let Some(token) = self.waiting.pop_front_if(|token| all || token.offset < self.shown) {
            shown.push(token);
        }
        Piece { text, shown, tokens }
    }

    fn ended(&self, reason: &'static str, finished: Option<Finished>) -> End {
        End {
            reason,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            finished,
            served_by: self.generation.served_by().cloned(),
            first_token: self.first.map_or(Duration::ZERO, |first| first - self.arrived),
            elapsed: clock::now() - self.arrived,
        }
    }
}

impl End {
    /// OpenAI's `usage`.
    pub fn usage(&self) -> serde_json::Value {
        let cached = self.finished.as_ref().map_or(0, |finished| finished.cached_tokens);
        serde_json::json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": u64::from(self.prompt_tokens) + u64::from(self.output_tokens),
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }
}
