//! Counters of the offload tiers.

use super::questions::Query;
use super::{Hierarchy, HostCounts};
use crate::histogram::Histogram;
use crate::ids::Room;

/// Counters since start and present states, in pages unless a field says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HierarchyStats {
    /// Slots of host memory by their states.
    pub host: HostCounts,
    /// Slots with a pin.
    pub host_pinned: usize,
    /// Pages that were evicted from host memory for others.
    pub host_evicted: u64,
    /// Promised to a request from host memory.
    pub promised_host: u64,
    /// Promised to a request from storage.
    pub promised_storage: u64,
    /// Promised pages that are pages of window parts.
    pub promised_windows: u64,
    /// Copied from host memory into the pool for a request.
    pub loaded: u64,
    /// Of those, promised from storage.
    pub loaded_from_storage: u64,
    /// Promised, and not restored.
    pub not_restored: u64,
    /// Requests for which a promised page was not restored.
    pub restores_failed: u64,
    /// Requests for which prefill was asked to send pages that were not restored.
    pub renegotiated: u64,
    /// Pages that prefill was asked to send then.
    pub renegotiated_pages: u64,
    /// Requests that computed pages that were not restored, because prefill was gone.
    pub computed_instead: u64,
    /// In host memory or storage, and not restored because computing or sending them is quicker.
    pub skipped_by_cost: u64,
    /// Copied to host memory.
    pub saved: u64,
    /// Not copied to host memory, for want of slots there.
    pub not_saved: u64,
    /// Not copied although they were to be, because a request needed the pool's pages at once.
    pub dropped: u64,
    /// Pages of the pool that are evicted and being copied now.
    pub writing_back: usize,
    /// Promised to requests, and neither loaded nor given up so far.
    pub loads_under_way: usize,
    /// Waiting to be copied to host memory, or being copied.
    pub saves_under_way: usize,
    /// How long batches of copies from host memory took.
    pub load_times: Histogram,
    /// How long batches of copies to host memory took.
    pub save_times: Histogram,
}

/// Counters of one storage tier, in pages unless a field says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Queried.
    pub queried: u64,
    /// Of those, found in the tier.
    pub found: u64,
    /// Read.
    pub read: u64,
    /// Not read although they were there before.
    pub read_failed: u64,
    /// Read, with other contents than were written.
    pub damaged: u64,
    /// Written, or there already.
    pub written: u64,
    /// Not taken: no space, or read only.
    pub write_refused: u64,
    /// Not written because something failed.
    pub write_failed: u64,
    /// Not written because too many waited.
    pub write_dropped: u64,
    /// Batches that took longer than the core waits.
    pub deadlines_missed: u64,
    /// Queried, or about to be, and not answered.
    pub questions_under_way: usize,
    /// Waiting to be read, or being read.
    pub reads_under_way: usize,
    /// Waiting to be written, or being written.
    pub writes_under_way: usize,
    /// Whether the tier missed deadlines and rests for a while.
    pub resting: bool,
    /// How long answers to batches of questions took.
    pub answer_times: Histogram,
    /// How long batches of reads took.
    pub read_times: Histogram,
    /// How long batches of writes took.
    pub write_times: Histogram,
}

impl Hierarchy {
    pub(crate) fn stats(&self) -> HierarchyStats {
        HierarchyStats {
            host: self.host.counts(),
            host_pinned: self.host.pinned(),
            host_evicted: self.host.evicted(),
            writing_back: self.evicted_pages(),
            loads_under_way: self.unloaded,
            saves_under_way: self.saves.iter().map(|queued| queued.pages.len()).sum::<usize>()
                + self.pages(self.saving_bytes),
            ..self.stats
        }
    }

    /// Whether there is a fetch for a request.
    pub(crate) fn knows(&self, room: Room) -> bool {
        self.fetches.contains_key(&room)
    }

    pub(crate) fn stats_mut(&mut self) -> &mut HierarchyStats {
        &mut self.stats
    }

    pub(crate) fn tier_stats(&self) -> Vec<TierStats> {
        let tiers = self.tiers.iter().map(|tier| TierStats {
            questions_under_way: tier.questions.len()
                + tier.queries.values().map(Query::pages).sum::<usize>(),
            reads_under_way: tier.to_read.len() + self.pages(tier.reading_bytes),
            writes_under_way: tier.to_write.len() + self.pages(tier.writing_bytes),
            resting: tier.rests_until.is_some(),
            ..tier.stats
        });
        tiers.collect()
    }

    fn pages(&self, bytes: u64) -> usize {
        usize::try_from(bytes / self.config.page_bytes).unwrap_or(usize::MAX)
    }
}
