//! The offload tiers in the life of a request: waiting for storage, and restores into the pages of an admitted request.

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

    /// Whether a waiting request waits for pages that are being read for it.
    pub(crate) fn waits_for_storage(&self, room: Room) -> bool {
        self.tiers.as_ref().is_some_and(|tiers| tiers.waits(room))
    }

    /// Takes note that a waiting request waits for something other than storage, and may be skipped.
    pub(crate) fn yields(&mut self, room: Room) {
        if let Some(tiers) = &mut self.tiers {
            tiers.yields(room);
        }
    }

    /// Begins to restore the pages that the tiers have for an admitted request, whose first `in_l1` pages are in L1. Returns the
    /// page behind the last restored one, if there is any.
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

    /// The same for a request that continues at `end`, with window parts from the tiers.
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

    /// Handles an event of a tier. Returns the rooms whose pages nothing touches any more.
    pub(crate) fn tier_event(&mut self, now: Time, event: TierEvent) -> Vec<Room> {
        let ended = self.tiers.as_mut().and_then(|tiers| tiers.handle(now, event));
        ended.map(|load| self.load_ended(load)).unwrap_or_default()
    }

    /// Gives up work of the tiers that takes too long.
    pub(crate) fn expire_tiers(&mut self, now: Time) -> Vec<TierAction> {
        self.with_tiers(|tiers, actions| tiers.expire(now, actions))
    }

    /// Begins as much waiting work as the tiers can take.
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

    /// Requests whose restores have changed since the last call. Also frees the pages of saves that have ended.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<Room> {
        let Some(tiers) = &mut self.tiers else { return BTreeSet::new() };
        let (changed, released) = (tiers.take_changed(), tiers.take_released());
        self.released(released);
        changed
    }

    /// Updates the state of a request's restore. Returns whether the restore has ended, successfully or not.
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

    /// Lets a request continue behind its first `pages` pages. Pages that its restore still lacks are computed. Returns the
    /// position at which computing begins. While a window is recomputed, that is before the end of these pages.
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

    /// Tells the cost model how long a step with so many tokens of prompts took.
    pub(crate) fn learn_computing(&mut self, tokens: usize, time: Duration) {
        if let Some(tiers) = &mut self.tiers {
            tiers.computed(tokens, time);
        }
    }

    /// Tells the cost model how long so many pages took from the request for them to their arrival.
    pub(crate) fn learn_transferring(&mut self, pages: usize, time: Duration) {
        if let Some(tiers) = &mut self.tiers {
            tiers.transferred(pages, time);
        }
    }

    /// Tells the cost model how many tokens of prompts are computed before those of requests that come now.
    pub(crate) fn set_backlog(&mut self, tokens: impl FnOnce() -> usize) {
        if let Some(tiers) = &mut self.tiers {
            tiers.set_backlog(tokens());
        }
    }
}
