//! The end of a world: its counters, and the check that everything was given back.

use host_core::hierarchy::HierarchyStats;
use host_core::scheduler::Stats;

use super::{Clients, World};
use crate::faults::Outcome;

impl<C: Clients> World<C> {
    /// What has happened so far, in living and dead workers.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        let mut outcome = self.outcome;
        (0..self.workers.len()).for_each(|place| outcome += self.counted(place));
        outcome
    }

    /// Keeps the counters of a worker that is about to die.
    pub(super) fn count(&mut self, place: usize) {
        self.outcome += self.counted(place);
    }

    fn counted(&self, place: usize) -> Outcome {
        let scheduler = &self.workers[place].scheduler;
        let stats: Stats = scheduler.stats();
        let tiers: HierarchyStats = stats.hierarchy;
        Outcome {
            integrity_failures: stats.integrity_failures,
            messages_repeated: stats.messages_repeated,
            messages_stale: stats.messages_stale,
            cached_tokens: stats.cached_tokens,
            evicted_pages: stats.evicted_pages,
            layer_parts_sent: stats.layer_parts_sent,
            shared_transfers: stats.shared_transfers,
            retractions: stats.retractions,
            restored_tokens: stats.restored_tokens,
            restored_offload_tokens: stats.restored_offload_tokens,
            drafted_tokens: stats.drafted_tokens,
            drafts_right: stats.drafts_right,
            late_draws: stats.late_draws,
            recomputed_tokens: stats.recomputed_tokens,
            window_recomputed_tokens: stats.window_recomputed_tokens,
            promised_host: tiers.promised_host,
            promised_storage: tiers.promised_storage,
            promised_windows: tiers.promised_windows,
            loaded: tiers.loaded,
            restores_failed: tiers.restores_failed,
            renegotiated: tiers.renegotiated,
            computed_instead: tiers.computed_instead,
            saved: tiers.saved,
            dropped: tiers.dropped,
            written: scheduler.tier_stats().iter().map(|tier| tier.written).sum(),
            ..Outcome::default()
        }
    }

    /// Checks that a world at rest has given everything back.
    pub(super) fn check_rest(&self) {
        for worker in &self.workers {
            let (stats, at) = (worker.scheduler.stats(), worker.instance);
            assert_eq!((stats.pool.held, stats.pool.quarantined), (0, 0), "{at:?} leaks pages");
            let host = stats.hierarchy.host;
            let unsettled = (host.filling, host.spoilt, host.abandoned, stats.hierarchy.host_pinned);
            assert_eq!(unsettled, (0, 0, 0, 0), "{at:?} leaks slots");
            let left = (stats.queued, stats.active, stats.unanswered, stats.locked_pages);
            assert_eq!(left, (0, 0, 0, 0), "{at:?} has something left to do");
            assert!(worker.rooms.is_empty(), "{at:?} has not forgotten its rooms");
            worker.check_told();
        }
        let rooms: Vec<_> = self.open_requests.keys().collect();
        assert!(rooms.is_empty(), "{rooms:?} never ended");
    }
}
