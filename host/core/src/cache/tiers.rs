//! The offload tiers in the life of a request: waiting for storage, and restores into the pages of an admitted one.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Cache, Holding, Restore};
use crate::hierarchy::{End, Hierarchy, HierarchyStats, Progress, TierAction, TierEvent};
use crate::ids::{Room, Time};

impl Cache {
    /// Whether there are offload tiers.
    pub(crate) fn has_tiers(&self) -> bool {
        self.tiers.is_some()
    }

    /// Whether a waiting request waits for what is being read for it.
    pub(crate) fn waits_for_storage(&self, room: Room) -> bool {
        self.tiers.as_ref().is_some_and(|tiers| tiers.waits(room))
    }

    /// A waiting request waits for something that storage cannot give, and may be skipped.
    pub(crate) fn yields(&mut self, room: Room) {
        if let Some(tiers) = &mut self.tiers {
            tiers.yields(room);
        }
    }

    /// A request is admitted, its first `in_l1` pages being in L1: begins to restore what the tiers have for it. Returns the page
    /// behind that, if there is any.
    pub(super) fn begin_restore(
        &mut self,
        now: Time,
        room: Room,
        kv: &mut Holding,
        in_l1: usize,
    ) -> Option<usize> {
        let tiers = self.tiers.as_mut()?;
        let end = in_l1 + tiers.restore(now, room, in_l1);
        if end == in_l1 {
            return None;
        }
        tiers.restore_into(room, &kv.table[in_l1..end]);
        kv.restore = Some(Restore::Pending(in_l1..end));
        Some(end)
    }

    /// The same for one that continues at an end, with window parts from the tiers.
    pub(super) fn restore_to(
        &mut self,
        now: Time,
        room: Room,
        kv: &mut Holding,
        in_l1: usize,
        end: &End,
    ) -> Option<usize> {
        let tiers = self.tiers.as_mut()?;
        let restored = in_l1..end.reach.end.max(in_l1);
        let pages = [&kv.table[restored.clone()], kv.window.own.ids()].concat();
        if !tiers.restore_end(now, room, in_l1, end, &pages) {
            return None;
        }
        let end = restored.end;
        kv.restored_window = Some(end).filter(|_| !kv.window.own.ids().is_empty());
        kv.restore = Some(Restore::Pending(restored));
        Some(end)
    }

    /// Something happened in a tier.
    pub(crate) fn tier_event(&mut self, now: Time, event: TierEvent) -> Vec<Room> {
        let ended = self.tiers.as_mut().and_then(|tiers| tiers.handle(now, event));
        ended.map(|load| self.load_ended(load)).unwrap_or_default()
    }

    /// Gives up what takes too long in the tiers.
    pub(crate) fn expire_tiers(&mut self, now: Time) -> Vec<TierAction> {
        self.with_tiers(|tiers, actions| tiers.expire(now, actions))
    }

    /// Begins what the tiers can take.
    pub(crate) fn start_tiers(&mut self, now: Time) -> Vec<TierAction> {
        self.with_tiers(|tiers, actions| tiers.start(now, actions))
    }

    fn with_tiers(&mut self, act: impl FnOnce(&mut Hierarchy, &mut Vec<TierAction>)) -> Vec<TierAction> {
        let mut actions = Vec::new();
        if let Some(tiers) = &mut self.tiers {
            act(tiers, &mut actions);
        }
        actions
    }

    /// Requests of whose restores something has changed since the last call. Pages of copies that have ended are free.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<Room> {
        let Some(tiers) = &mut self.tiers else { return BTreeSet::new() };
        let (changed, released) = (tiers.take_changed(), tiers.take_released());
        self.released(released);
        changed
    }

    /// Takes note of how a request's restore is doing. Returns whether it has ended, well or not.
    pub(crate) fn restored(&mut self, room: Room, kv: &mut Holding) -> bool {
        let Some(tiers) = &mut self.tiers else { return false };
        kv.restore = match tiers.progress(room) {
            None | Some(Progress::Pending) => return false,
            Some(Progress::Done) => None,
            Some(Progress::Failed(missing)) => {
                let stats = tiers.stats_mut();
                stats.restores_failed += 1;
                stats.not_restored += missing.len() as u64;
                Some(Restore::Missing(missing))
            }
        };
        tiers.forget(room);
        true
    }

    /// A request continues behind so many pages, whatever it was to get: what its restore lacks is computed. Returns the position
    /// at which computing begins, which is before these pages while a window is recomputed.
    pub(crate) fn continue_at(&self, kv: &mut Holding, pages: usize) -> usize {
        kv.restore = None;
        kv.computed = match kv.recompute.is_empty() {
            true => pages * self.page_tokens,
            false => kv.recompute.start,
        };
        kv.computed
    }

    /// Counts something of the tiers.
    pub(crate) fn count(&mut self, count: impl FnOnce(&mut HierarchyStats)) {
        if let Some(tiers) = &mut self.tiers {
            count(tiers.stats_mut());
        }
    }

    /// A step with so many tokens of prompts and nothing else took so long: the cost model learns it.
    pub(crate) fn learn_computing(&mut self, tokens: usize, time: Duration) {
        if let Some(tiers) = &mut self.tiers {
            tiers.computed(tokens, time);
        }
    }

    /// So many pages had arrived so long after they were asked for: the cost model learns it.
    pub(crate) fn learn_transferring(&mut self, pages: usize, time: Duration) {
        if let Some(tiers) = &mut self.tiers {
            tiers.transferred(pages, time);
        }
    }

    /// So many tokens of prompts are computed before those of requests that come now.
    pub(crate) fn set_backlog(&mut self, tokens: impl FnOnce() -> usize) {
        if let Some(tiers) = &mut self.tiers {
            tiers.set_backlog(tokens());
        }
    }
}
