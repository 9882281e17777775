//! What a client is told of its request.

use host_core::Sampled;
use host_core::request::{Failure, FinishReason, Usage};

/// What happens to a request, as its client is told.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The prompt's KV is complete. Tokens follow.
    Began {
        /// Prompt tokens whose KV was not computed for this request.
        cached_tokens: u32,
        /// Of these, the ones that came from the worker's offload tiers.
        offload_tokens: u32,
        /// Bytes of KV that came through the transfer plugin.
        transferred_bytes: u64,
    },
    /// One more token.
    Token(Sampled),
    /// The answer is complete.
    Finished {
        /// The reason.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
        /// Bytes of KV that came through the transfer plugin.
        transferred_bytes: u64,
    },
    /// There will be no complete answer.
    Failed(Failure),
}
