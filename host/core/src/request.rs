//! Requests as a worker sees them, and how they end.

use crate::ids::{Instance, Room};
use crate::radix::{NamespaceKey, PageHash};
use crate::sampling::Sampling;

/// A prefill worker, as the decode leg of a request names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRef {
    /// The process.
    pub instance: Instance,
    /// Its control address.
    pub address: String,
}

/// One request, or one leg of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Names the try on all workers.
    pub room: Room,
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Tokens at the prompt's end that an earlier try drew: they are part of the answer.
    pub answered: u32,
    /// Tokens to generate at most, at least one. A prefill leg always generates one.
    pub max_new_tokens: u32,
    /// Tokens that end the answer. They are counted but not sent.
    pub stop_tokens: Vec<u32>,
    /// Generate until `max_new_tokens`, even after a stop token.
    pub ignore_stop: bool,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Smaller numbers go first. The number is the same on both legs.
    pub priority: i32,
    /// A number for the client that sent the request, so that clients get fair turns. 0: not known.
    pub client: u64,
    /// Where the prompt's KV comes from. Set on decode legs only.
    pub prefill: Option<PeerRef>,
    /// The request may share cached pages with other requests of this namespace only. It is the same on both legs.
    pub namespace: NamespaceKey,
    /// Whether the request runs without the cache: it uses no pages that others left, and leaves none.
    pub no_cache: bool,
    /// `Some(n)`: the request has no answer. It asks for the log probability of each token of the prompt but the first, and for
    /// those of the n likeliest tokens there. Its prompt is computed as a whole, and enters the cache.
    pub scores: Option<u8>,
    /// Names of the first whole pages of the prompt, as far as [they have been named](Self::name). The scheduler names
    /// the others if it needs them.
    pub names: Vec<PageHash>,
}

impl Request {
    /// Names all whole pages of the prompt, for a worker with this identity and pages of so many tokens. That takes
    /// milliseconds for a long prompt, so the caller does it on a thread of its own.
    pub fn name(&mut self, identity: &PageHash, page_tokens: u32) {
        let mut last = identity.namespace(&self.namespace);
        let next = |tokens: &[u32]| {
            last = last.next(tokens);
            last
        };
        self.names = self.prompt.chunks_exact(page_tokens as usize).map(next).collect();
    }
}

/// Why an answer is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn, or an event said that the answer is complete.
    Stop,
    /// `max_new_tokens` were generated.
    Length,
    /// This was the prefill leg, and decode has taken over.
    Prefill,
}

impl FinishReason {
    /// As the control plane writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Prefill => "prefill",
        }
    }
}

/// The tokens and pages that a finished request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens drawn, a stop token included.
    pub output_tokens: u32,
    /// Prompt tokens whose KV was not computed for this request.
    pub cached_tokens: u32,
    /// Of these, the ones that came from the worker's offload tiers.
    pub offload_tokens: u32,
    /// Pages that came in through a transfer backend.
    pub transferred_pages: u32,
}

/// Why a request ended without a complete answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The kind of failure, for programs.
    pub code: FailureCode,
    /// The explanation, for people.
    pub message: String,
    /// Whether another try, perhaps on another worker, may succeed.
    pub retryable: bool,
}

/// Kinds of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FailureCode {
    /// The request itself is wrong.
    Invalid,
    /// Prompt and answer do not fit this worker.
    TooLong,
    /// The queue is full.
    Busy,
    /// The client went away, or the router gave the leg up.
    Cancelled,
    /// The two workers of the pair do not fit each other.
    PeerRefused,
    /// The other worker died, or stopped answering.
    PeerLost,
    /// The other leg failed.
    PeerFailed,
    /// The KV pages did not arrive, or not intact.
    Transfer,
    /// The model could not be computed.
    Executor,
    /// A deadline passed.
    Timeout,
    /// The worker is shutting down.
    ShuttingDown,
    /// The worker lacks what it needs to begin the request, as memory for a thread. Nothing was begun.
    Unable,
}

impl FailureCode {
    /// As metrics and the control plane write it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            FailureCode::Invalid => "invalid",
            FailureCode::TooLong => "too_long",
            FailureCode::Busy => "busy",
            FailureCode::Cancelled => "cancelled",
            FailureCode::PeerRefused => "peer_refused",
            FailureCode::PeerLost => "peer_lost",
            FailureCode::PeerFailed => "peer_failed",
            FailureCode::Transfer => "transfer",
            FailureCode::Executor => "executor",
            FailureCode::Timeout => "timeout",
            FailureCode::ShuttingDown => "shutting_down",
            FailureCode::Unable => "unable",
        }
    }

    /// Whether another try may succeed, as a rule.
    #[must_use]
    pub fn retryable(self) -> bool {
        !matches!(self, FailureCode::Invalid | FailureCode::TooLong | FailureCode::Cancelled)
    }
}

impl Failure {
    /// A failure that is retryable if failures of its code usually are.
    #[must_use]
    pub fn new(code: FailureCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retryable: code.retryable() }
    }
}
