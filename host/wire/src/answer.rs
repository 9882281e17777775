//! The events of a request that its client gets.

use host_core::Sampled;
use host_core::request::{Failure, FinishReason, Usage};

/// An event of a request, for its client.
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
    /// Tokens of the prompt with their log probabilities. Some may come again.
    Scores {
        /// Position of the first of them in the prompt.
        first: u32,
        /// The tokens, in order.
        tokens: Vec<Sampled>,
    },
    /// The answer is complete.
    Finished {
        /// The reason.
        reason: FinishReason,
        /// The tokens that the request used.
        usage: Usage,
        /// Bytes of KV that came through the transfer plugin.
        transferred_bytes: u64,
    },
    /// The request failed, and there will be no complete answer.
    Failed(Failure),
}
