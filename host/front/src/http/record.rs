//! The record of a request: its outcome in the metrics, and one line in the log.

use std::sync::Arc;
use std::time::Duration;

use host_wire::clock::{self, Instant};
use tracing::Span;

use super::answer::End;
use super::error::ApiError;
use crate::metrics::{Metrics, RequestLabels};

/// A request under way. Its outcome is counted and logged when it is dropped, also when its client goes away.
pub(super) struct Record {
    metrics: Arc<Metrics>,
    endpoint: &'static str,
    span: Span,
    /// Whether the request has a line in the log.
    logs: bool,
    arrived: Instant,
    outcome: &'static str,
    status: u16,
    code: Option<&'static str>,
    error: Option<String>,
    usage: Usage,
    first_token: Option<Duration>,
    prefill: Option<String>,
    decode: Option<String>,
}

/// Tokens of a request, over all its answers. A prompt counts once, however many answers it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    pub cached_tokens: u64,
}

impl Usage {
    /// Adds one answer. `leads` says that it is the first to its prompt.
    pub fn add(&mut self, end: &End, leads: bool) {
        self.output_tokens += u64::from(end.output_tokens);
        if leads {
            self.prompt_tokens += u64::from(end.prompt_tokens);
            self.cached_tokens += u64::from(end.cached_tokens());
        }
    }

    /// OpenAI's `usage`.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        })
    }
}

/// The status of a request whose client has gone, as nginx writes it.
const CLIENT_GONE: u16 = 499;

impl Record {
    pub fn new(metrics: Arc<Metrics>, endpoint: &'static str, logs: bool) -> Self {
        Self {
            metrics,
            endpoint,
            span: Span::current(),
            logs,
            arrived: clock::now(),
            outcome: "cancelled",
            status: CLIENT_GONE,
            code: None,
            error: None,
            usage: Usage::default(),
            first_token: None,
            prefill: None,
            decode: None,
        }
    }

    pub fn arrived(&self) -> Instant {
        self.arrived
    }

    /// Notes that one answer is complete.
    pub fn answered(&mut self, end: &End, leads: bool) {
        self.usage.add(end, leads);
        self.first_token = Some(self.first_token.map_or(end.first_token, |first| first.min(end.first_token)));
        if let Some(by) = &end.served_by {
            self.prefill.clone_from(&by.prefill);
            self.decode = Some(by.decode.clone());
        }
    }

    /// Notes that all answers are complete.
    pub fn ok(&mut self) {
        (self.outcome, self.status) = ("ok", 200);
    }

    pub fn failed(&mut self, error: &ApiError) {
        (self.outcome, self.status, self.code) = (error.outcome(), error.status.as_u16(), error.code());
        // A message about a client's own mistake may repeat the client's data, which must not be logged.
        self.error = self.is_fault().then(|| error.message().to_owned());
    }
}

impl Record {
    /// Whether it failed through this server's fault.
    fn is_fault(&self) -> bool {
        matches!(self.outcome, "failed" | "broken" | "unavailable")
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let labels = RequestLabels { endpoint: self.endpoint, outcome: self.outcome };
        self.metrics.requests.get_or_create(&labels).inc();
        // A failure that is this server's fault is logged even where other requests are not.
        let is_fault = self.is_fault();
        if !self.logs && !is_fault {
            return;
        }
        let Self { outcome, status, code, error, usage, first_token, prefill, decode, span, arrived, .. } =
            &*self;
        let took = clock::now() - *arrived;
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    parent: span,
                    status,
                    outcome,
                    prompt_tokens = usage.prompt_tokens,
                    output_tokens = usage.output_tokens,
                    cached_tokens = usage.cached_tokens,
                    first_token_ms = first_token.map(milliseconds),
                    ms = milliseconds(took),
                    prefill,
                    decode,
                    code,
                    error,
                    "request"
                )
            };
        }
        if is_fault { line!(warn) } else { line!(info) }
    }
}
