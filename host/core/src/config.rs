//! The configuration of a worker.

use std::time::Duration;

use crate::hierarchy::HierarchyConfig;
use crate::layer_groups::LayerGroups;
use crate::radix::{PageHash, Policy};
use crate::window::WindowShape;

/// What a worker does with requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Computes prompts and hands their KV over.
    Prefill,
    /// Takes prompts' KV over and generates.
    Decode,
    /// Does both, without a transfer. A prefill and a decode worker together must give the same results.
    Aggregated,
}

impl Role {
    /// Whether the worker sends the KV of prompts that it computes to others, and draws one token of each answer.
    #[must_use]
    pub(crate) fn sends_kv(self) -> bool {
        self == Role::Prefill
    }

    /// Whether others send the worker the KV of its prompts.
    #[must_use]
    pub(crate) fn receives_kv(self) -> bool {
        self == Role::Decode
    }

    /// As flags and the control plane write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Aggregated => "aggregated",
        }
    }
}

/// Limits and policies of one worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// What the worker does.
    pub role: Role,
    /// Pages in its pool.
    pub pages: u32,
    /// Tokens in a page.
    pub page_tokens: u32,
    /// Longest prompt + answer, in tokens.
    pub max_tokens: u32,
    /// Token ids are below this.
    pub vocabulary: u32,
    /// Prompt tokens computed in one batch at most.
    pub chunk_tokens: u32,
    /// Keep the KV of ended requests for later ones with the same prefix. The policy says which pages are evicted
    /// first.
    pub radix_cache: Option<Policy>,
    /// The offload tiers, if any. They need a radix cache.
    pub hierarchy: Option<HierarchyConfig>,
    /// Report pages that enter and leave the radix cache ([`Action::Cache`](crate::scheduler::Action::Cache)). Costs work, so it
    /// should be off when nothing listens.
    pub cache_events: bool,
    /// Digest of everything beside namespace and tokens that makes KV differ (see
    /// [`crate::radix::TreeConfig::identity`]). A router needs it to name this worker's pages from prompts.
    pub identity: PageHash,
    /// Tokens of each running answer for which pages must be available when another request is admitted, at least one.
    /// More makes preemptions rare, fewer lets more requests run at once.
    pub reserved_decode_tokens: u32,
    /// Mean time between two tokens of an answer that batches are to stay under. With `None` as many requests run as fit.
    pub target_itl: Option<Duration>,
    /// Most draft tokens that a step verifies behind an answer ([`drafting`](crate::scheduler)), or 0 for no drafts.
    pub draft_tokens: u32,
    /// Whether a request with a radix cache waits for another one under way that brings the same pages
    /// ([`sharing`](crate::scheduler)), instead of computing or receiving them itself.
    pub share_transfers: bool,
    /// A number that clients do not know (see [`crate::radix::TreeConfig::seed`]).
    pub seed: u64,
    /// Whether the transfer backend proves that nothing of a failed or cancelled write is in flight any more. Without that proof
    /// only a fence ends the writes to a peer, so the peer of a transfer that ends early is fenced. A decode worker then preempts
    /// no request: it admits each with headroom for its whole answer. A radix cache is not allowed then.
    pub settles: bool,
    /// Shape of the window parts of a model with sliding layers, or `None` for other models.
    pub window: Option<WindowShape>,
    /// The model's layers, and in how many groups of them pages are sent.
    pub layer_groups: LayerGroups,
    /// Sequences in one batch at most.
    pub max_batch: u32,
    /// Requests past the queue at most: computing, or with a transfer under way. Each has an aux row.
    pub max_running: u32,
    /// Requests in the queue at most. More are refused as busy.
    pub max_queued: u32,
    /// Transfers of one room at most, the first included.
    pub max_attempts: u32,
    /// How long a decode leg waits for a connection to its prefill worker, and a reserve for its request.
    pub bootstrap_timeout: Duration,
    /// How long a request may take in all.
    pub request_timeout: Duration,
    /// How long a prefill worker waits for progress in a transfer of which it has begun all parts: a write that settles,
    /// or decode's word that all has arrived.
    pub transfer_patience: Duration,
    /// How long a peer may leave a message unanswered before it counts as lost.
    pub peer_patience: Duration,
}

impl Config {
    /// Whether a sequence may draw in a later batch, which computes the last known token again. Prefill workers may not: layers of
    /// that token's page may have been sent already. Models that keep a state may not: the state already contains the token.
    #[must_use]
    pub fn may_draw_late(&self) -> bool {
        !self.role.sends_kv() && self.window.is_none_or(|window| !window.keeps_state())
    }
}
