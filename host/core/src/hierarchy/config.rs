//! The configuration of offload tiers.

use std::time::Duration;

/// When pages are copied from the pool to host memory, and from there to storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WritePolicy {
    /// As soon as they enter the radix tree.
    #[default]
    WriteThrough,
    /// When they enter or are used, once they were matched so many times ([`HierarchyConfig::write_after_hits`]).
    WriteThroughSelective,
    /// When they are about to be evicted. Evicting pages before they are needed hides the time of the copy. Pages that
    /// must be freed at once are dropped.
    WriteBack,
}

/// How long a request waits for pages that are being read from storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefetchPolicy {
    /// Not at all: the request uses the pages that are in host memory when it could begin.
    BestEffort,
    /// Until all are there or have failed, [`HierarchyConfig::longest_wait`] at most.
    WaitComplete,
    /// As long as it would take to compute the pages or to have them sent. At least 10 ms, and at most
    /// [`HierarchyConfig::wait_base`] plus [`HierarchyConfig::wait_per_1024_tokens`] for the tokens that are being read.
    #[default]
    Timeout,
}

macro_rules! named {
    ($policy:ident, $($variant:ident = $name:literal),+) => {
        impl $policy {
            /// As flags write it.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $($policy::$variant => $name),+
                }
            }
        }
    };
}

named!(
    WritePolicy,
    WriteThrough = "write_through",
    WriteThroughSelective = "write_through_selective",
    WriteBack = "write_back"
);
named!(PrefetchPolicy, BestEffort = "best_effort", WaitComplete = "wait_complete", Timeout = "timeout");

/// One storage tier.
///
/// Its number is its place in [`HierarchyConfig::tiers`]. A page that several tiers have is read from the first of them.
#[derive(Clone, Debug, PartialEq)]
pub struct TierConfig {
    /// Whether pages are written to it. A tier that is shared and filled by others may be read only.
    pub writes: bool,
    /// Time of the smallest read, until reads were measured.
    pub latency: Duration,
    /// Bytes read per second, until reads were measured.
    pub bytes_per_second: f64,
}

/// Times that are given instead of measured.
///
/// Whether a restore is begun, and how long a request waits for it, then follows from the request and from these numbers only.
/// Meant for simulations, tests, and runs that must decide alike. A tier that misses a deadline rests all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostModel {
    /// Computing one token of a prompt.
    pub compute_token: Duration,
    /// One page that prefill sends, from the request for it to its arrival.
    pub send_page: Duration,
    /// Copying one page between the pool and host memory.
    pub copy_page: Duration,
    /// The fixed time of an answer of a storage tier, whatever it carries.
    pub read: Duration,
    /// The additional time for each page that an answer carries.
    pub read_page: Duration,
}

/// L2 and L3 of one worker.
#[derive(Clone, Debug, PartialEq)]
pub struct HierarchyConfig {
    /// Pages that the host pool holds: those of L2, and those on their way between the pool and storage.
    pub host_slots: u32,
    /// Bytes of one page, over all ranks, heads and layers. Costs are computed from this.
    pub page_bytes: u64,
    /// The storage tiers (L3), in the order in which they are asked. Empty for a worker with host memory only.
    pub tiers: Vec<TierConfig>,
    /// When pages are copied to the offload tiers.
    pub write: WritePolicy,
    /// Matches after which [`WritePolicy::WriteThroughSelective`] writes a page.
    pub write_after_hits: u32,
    /// [`WritePolicy::WriteBack`] keeps so many pages free or on their way out, by evicting them before they are
    /// needed.
    pub write_back_ahead: u32,
    /// How long requests wait for pages from storage.
    pub prefetch: PrefetchPolicy,
    /// See [`PrefetchPolicy::Timeout`].
    pub wait_base: Duration,
    /// See [`PrefetchPolicy::Timeout`].
    pub wait_per_1024_tokens: Duration,
    /// No request waits longer than this for storage, and a read or write that takes longer is cancelled.
    pub longest_wait: Duration,
    /// Fewest pages that storage must add to those in L1 and host memory. With fewer, nothing is read from it.
    pub fewest_pages: u32,
    /// Pages in one batch of reads, writes or copies at most.
    pub batch_pages: u32,
    /// Bytes of pages being read from one tier at once at most. One batch may always be read, whatever its size.
    pub read_bytes: u64,
    /// The same for writes to one tier.
    pub write_bytes: u64,
    /// The same for copies between pool and host memory, each direction.
    pub copy_bytes: u64,
    /// Batches of questions that a tier may leave unanswered at once. It is asked no more until it answers.
    pub questions: u32,
    /// Pages that may wait for their write to one tier. Further pages are not written, only counted.
    pub queued_writes: u32,
    /// Given times of reads, copies, computing and transfers. With `None` they follow from measurements.
    pub costs: Option<CostModel>,
}

impl HierarchyConfig {
    /// A hierarchy with this much host memory and these tiers, and defaults for everything else.
    #[must_use]
    pub fn new(host_slots: u32, page_bytes: u64, tiers: Vec<TierConfig>) -> Self {
        Self {
            host_slots,
            page_bytes,
            tiers,
            write: WritePolicy::default(),
            write_after_hits: 2,
            write_back_ahead: 64,
            prefetch: PrefetchPolicy::default(),
            wait_base: Duration::from_secs(1),
            wait_per_1024_tokens: Duration::from_millis(250),
            longest_wait: Duration::from_secs(30),
            fewest_pages: 1,
            batch_pages: 128,
            read_bytes: 256 << 20,
            write_bytes: 128 << 20,
            copy_bytes: 128 << 20,
            questions: 8,
            queued_writes: 16_384,
            costs: None,
        }
    }

    /// # Panics
    /// When a limit that must be positive is zero.
    pub(crate) fn check(&self) {
        assert!(
            self.host_slots > 0
                && self.page_bytes > 0
                && self.batch_pages > 0
                && self.questions > 0
                && self.tiers.len() < usize::from(u8::MAX)
                && self.tiers.iter().all(|tier| tier.bytes_per_second > 0.0),
            "limits must be positive, and tiers few: {self:?}"
        );
    }
}
