//! Thresholds and limits of the offload tiers, which the file alone has.

use serde::Deserialize;

use super::Bytes;

/// `[hicache]` of the configuration file. What is not set is as [`host_core::hierarchy::HierarchyConfig::new`] has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct HicacheSettings {
    /// Milliseconds that `timeout` waits at most.
    pub wait_ms: Option<u64>,
    /// Milliseconds more for each 1024 tokens that are read.
    pub wait_ms_per_1024_tokens: Option<u64>,
    /// Milliseconds that a request waits for storage at most, under any policy.
    pub longest_wait_ms: Option<u64>,
    /// Pages that storage must add to the hit in pool and host memory before any is read.
    pub fewest_pages: Option<u64>,
    /// Uses after which `write_through_selective` writes a page.
    pub write_after_hits: Option<u64>,
    /// Pages that `write_back` keeps free or on their way out.
    pub write_back_ahead_pages: Option<u64>,
    /// Pages in one batch of reads, writes or copies.
    pub batch_pages: Option<u64>,
    /// Bytes of pages being read from one tier at once, for example 256MiB.
    pub read_bytes: Option<Bytes>,
    /// Bytes of pages being written to one tier at once.
    pub write_bytes: Option<Bytes>,
    /// Bytes of pages being copied between pool and host memory at once, each way.
    pub copy_bytes: Option<Bytes>,
    /// Pages that may wait for their write to one tier.
    pub queued_write_pages: Option<u64>,
    /// Times that are given instead of measured.
    pub costs: Option<CostSettings>,
}

/// `[hicache.costs]`: all of them, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct CostSettings {
    /// Computing one token of a prompt.
    pub compute_token_us: u64,
    /// One page that prefill sends, from the request for it to its arrival.
    pub send_page_us: u64,
    /// Copying one page between the pool and host memory.
    pub copy_page_us: u64,
    /// An answer of a storage tier, without its pages.
    pub read_us: u64,
    /// Each page of an answer of a storage tier.
    pub read_page_us: u64,
}
