//! The counters of a scheduler.

use super::PaceStats;
use crate::hierarchy::HierarchyStats;
use crate::histogram::Histogram;
use crate::pool::PoolCounts;

/// Counters since start, and present states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Pages by their states.
    pub pool: PoolCounts,
    /// Requests waiting.
    pub queued: usize,
    /// Requests past the queue.
    pub active: usize,
    /// Rooms whose pages are in quarantine.
    pub quarantined_rooms: usize,
    /// Cached pages that a request uses.
    pub locked_pages: usize,
    /// Requests that keep a cached prefix, even one without pages.
    pub prefix_locks: usize,
    /// Cache namespaces that hold pages, or that a request uses.
    pub namespaces: usize,
    /// Cached pages that were evicted because free ones were short.
    pub evicted_pages: u64,
    /// Prompt tokens found cached at admission.
    pub cached_tokens: u64,
    /// Prompt tokens, behind the cached ones, that were to be restored from the offload tiers.
    pub offload_tokens: u64,
    /// The offload tiers. All counts are zero without any.
    pub hierarchy: HierarchyStats,
    /// Times of steps, and the limits that follow from them.
    pub pace: PaceStats,
    /// Time between two tokens of an answer, as they were drawn.
    pub between_tokens: Histogram,
    /// Of [`cached_tokens`](Self::cached_tokens), those of prompts that were completed with them.
    pub delivered_tokens: u64,
    /// Of [`offload_tokens`](Self::offload_tokens), those of prompts that were completed with them.
    pub delivered_offload_tokens: u64,
    /// Decode: verified transfers of whole prompts.
    pub full_transfers: u64,
    /// Decode: verified transfers of the part of a prompt that was not cached.
    pub delta_transfers: u64,
    /// Decode: prompts that were cached completely, so that only the aux row moved.
    pub full_hits: u64,
    /// Decode: pages of prompts that were cached here and did not have to be sent.
    pub pages_saved: u64,
    /// Requests that waited for another one's pages instead of having their own sent or computed.
    pub shared_transfers: u64,
    /// Pages that were neither sent nor computed because of that.
    pub shared_pages: u64,
    /// 1 when the allocator is disabled for a wrong answer.
    pub page_source_faults: u64,
    /// Messages repeated until answered.
    pub unanswered: usize,
    /// Peers that were cut off, and of which it is not proven yet that none of their writes lands here any more.
    pub unfenced_peers: usize,
    /// Batches computed.
    pub batches: u64,
    /// Prompt tokens computed.
    pub prefill_tokens: u64,
    /// Positions of answers computed, without those of wrong drafts.
    pub decode_tokens: u64,
    /// Tokens that were drafted and verified.
    pub drafted_tokens: u64,
    /// Drafted tokens that were right. Each saved a step of its request.
    pub drafts_right: u64,
    /// Draws that a batch put off to a later one, because the tokens that may follow were not known in time.
    pub late_draws: u64,
    /// Preemptions: how often a request gave up its pages for others and went back to the queue.
    pub retractions: u64,
    /// Tokens whose KV a preempted request found cached when it continued, in the pool or in the offload tiers.
    pub restored_tokens: u64,
    /// Restored tokens that came from the offload tiers.
    pub restored_offload_tokens: u64,
    /// Tokens whose KV was recomputed after a preemption.
    pub recomputed_tokens: u64,
    /// Tokens recomputed only for the window at the end of a cached prefix: their other layers' KV was cached.
    pub window_recomputed_tokens: u64,
    /// Pages whose arrival was verified.
    pub pages_received: u64,
    /// Pages written to peers.
    pub pages_sent: u64,
    /// Parts of transfers that were sent while later layers of their pages were being computed.
    pub layer_parts_sent: u64,
    /// Transfers that arrived completely and failed verification.
    pub integrity_failures: u64,
    /// Transfers given up because they made no progress.
    pub transfers_stalled: u64,
    /// Messages repeated because no answer came.
    pub messages_repeated: u64,
    /// Messages dropped because their sender had given them up.
    pub messages_stale: u64,
    /// Requests finished.
    pub finished: u64,
    /// Requests failed.
    pub failed: u64,
}
