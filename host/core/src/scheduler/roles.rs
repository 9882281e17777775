//! What the role of a worker changes in its scheduler, each decision once. No other file of the scheduler looks at the role.
//!
//! | | prefill | decode | aggregated |
//! | --- | --- | --- | --- |
//! | KV of a new prompt | computed | sent by a prefill worker | computed |
//! | a request is admitted | when decode has asked for its KV | when its prefill worker is connected | at once |
//! | tokens of an answer | the first, then the KV is sent | all, the first from prefill | all |
//! | requests in the steps | prompts take turns | as many as a batch has | prompts take turns |
//! | a target for the time between tokens | not kept: one token has none | kept | kept |
//! | guessed tokens | none | yes | yes |
//! | log probabilities of a prompt | computed, without decode | refused | computed |
//! | preemption | always | if the transfer backend proves that writes have settled | always |
//!
//! The two sides of a hand-over are types of their own: [`Outgoing`](crate::hand_over::Outgoing) and
//! [`Incoming`](crate::hand_over::Incoming).

use crate::config::Role;
use crate::request::Request;

/// What must be there before a request that has pages is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counterpart {
    /// Nothing.
    None,
    /// The reserve of the decode worker, which says where the KV goes.
    Reserve,
    /// The connection to the prefill worker, which sends the KV.
    Connection,
}

impl Role {
    /// What this request waits for besides pages.
    pub(super) fn counterpart_of(self, request: &Request) -> Counterpart {
        if request.scores.is_some() { Counterpart::None } else { self.counterpart() }
    }

    /// What a request with an answer waits for besides pages.
    pub(super) fn counterpart(self) -> Counterpart {
        match self {
            Role::Prefill => Counterpart::Reserve,
            Role::Decode => Counterpart::Connection,
            Role::Aggregated => Counterpart::None,
        }
    }

    /// Whether a request's KV comes from its prefill worker unless the request was preempted.
    pub(super) fn is_sent_kv(self) -> bool {
        self.counterpart() == Counterpart::Connection
    }

    /// Tokens of the request's answer that the worker draws.
    pub(super) fn answer_tokens(self, request: &Request) -> usize {
        if self.draws_whole_answers() { request.max_new_tokens as usize } else { 1 }
    }

    /// Whether an answer has a time between two of its tokens, which a target may limit, and tokens that can be guessed.
    pub(super) fn draws_whole_answers(self) -> bool {
        self != Role::Prefill
    }

    /// Most requests in the steps if no target limits them.
    pub(super) fn most_in_steps(self, max_batch: usize) -> usize {
        match self {
            Role::Decode => max_batch,
            // Prompts take turns in their batches, and have no first token yet.
            Role::Prefill | Role::Aggregated => usize::MAX,
        }
    }

    /// Requests whose transfers run ahead of the steps, beside the `limit` that a target allows in the steps.
    pub(super) fn transfers_ahead(self, limit: usize) -> usize {
        if self.is_sent_kv() { limit / 4 + 2 } else { 0 }
    }

    /// Most tokens of prompts in a step that also decodes, without a target. A worker that is sent its prompts recomputes in small
    /// chunks, so that running answers are hardly delayed.
    pub(super) fn chunk_beside(self, chunk: usize) -> usize {
        if self.is_sent_kv() { chunk / 8 } else { chunk }
    }

    /// Whether every step may have to compute chunks of prompts beside answers.
    pub(super) fn mixes_steps(self) -> bool {
        self == Role::Aggregated
    }

    /// Whether this worker preempts requests. One that is sent KV must not give the pages to other requests unless the transfer
    /// backend proves that the transfer has `settled`. Without preemption, admission leaves room for whole answers.
    pub(super) fn preempts(self, settles: bool) -> bool {
        settles || !self.is_sent_kv()
    }
}
