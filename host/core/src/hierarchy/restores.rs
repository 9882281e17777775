//! Restoring pages from the offload tiers into the pages of an admitted request.

use std::ops::Range;

use super::fetch::{FetchState, Phase};
use super::{FoundSlot, Hierarchy, PrefetchPolicy};
use crate::ids::{PageId, Room, Time};

/// State of a restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Pending,
    /// All pages are in the pool.
    Done,
    /// These pages of the prompt must come from elsewhere. If window parts are restored too, only the length of the
    /// range counts: the number of missing items. Nothing of the restore is under way.
    Failed(Range<usize>),
}

impl Hierarchy {
    /// Decides how many pages are restored for an admitted request, behind its first `in_l1` pages, which are in L1.
    /// Unless the result is 0, the caller must call [`restore_into`](Self::restore_into) next.
    pub(crate) fn restore(&mut self, now: Time, room: Room, in_l1: usize) -> usize {
        self.passes(room);
        let Some(fetch) = self.fetches.get(&room) else { return 0 };
        let in_flight = fetch.is_sent && self.config.prefetch != PrefetchPolicy::BestEffort;
        let mut end = in_l1;
        while end < fetch.names.len() {
            match self.host.find(&fetch.names[end]) {
                Some(FoundSlot::Ready(_)) => {}
                Some(FoundSlot::Filling(_)) if in_flight => {}
                _ => break,
            }
            end += 1;
        }
        let slow = end > in_l1 && self.load_seconds(end - in_l1) > self.seconds_without(fetch, in_l1..end);
        if slow && !self.load_trial.is_due(now) {
            self.stats.skipped_by_cost += (end - in_l1) as u64;
            end = in_l1;
        }
        if !self.restore_items(room, &(in_l1..end).collect::<Vec<usize>>()) {
            return 0;
        }
        let wait = self.longest_wait(room, in_l1..end);
        let until = self.fetches[&room].fills().then(|| now.after(wait));
        self.set_deadline(room, until);
        end - in_l1
    }

    /// Restores these items, which are all in host memory or on their way, and nothing else. Forgets the request if
    /// there are no items. Returns whether there are any.
    pub(super) fn restore_items(&mut self, room: Room, items: &[usize]) -> bool {
        let Some(fetch) = self.fetches.get(&room) else { return false };
        let outside: Vec<usize> =
            fetch.items.keys().copied().filter(|item| items.binary_search(item).is_err()).collect();
        let inside: Vec<usize> =
            items.iter().copied().filter(|item| !fetch.items.contains_key(item)).collect();
        let from_storage = items.iter().filter(|item| fetch.stored(**item).is_some()).count();
        for page in outside {
            self.drop_item(room, page);
        }
        for page in inside {
            let item = match self.host.find(&self.fetches[&room].name(page)) {
                Some(FoundSlot::Ready(slot)) => FetchState::Ready(slot),
                Some(FoundSlot::Filling(slot)) => FetchState::Filling(slot),
                None => unreachable!("item {page} of {room:?} was there before"),
            };
            self.add_item(room, page, item);
        }
        if items.is_empty() {
            self.forget(room);
            return false;
        }
        self.stats.promised_storage += from_storage as u64;
        self.stats.promised_host += (items.len() - from_storage) as u64;
        let pages = self.fetches[&room].names.len();
        self.stats.promised_windows += items.iter().filter(|item| **item >= pages).count() as u64;
        self.set_deadline(room, None);
        self.unloaded += items.len();
        if let Some(fetch) = self.fetches.get_mut(&room) {
            fetch.phase = Phase::Restoring;
        }
        true
    }

    /// Sets the pages of the pool into which a restore goes, and queues its loads.
    pub(crate) fn restore_into(&mut self, room: Room, pages: &[PageId]) {
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        assert!(
            pages.len() == fetch.items.len(),
            "{} pages for a restore of {}",
            pages.len(),
            fetch.items.len()
        );
        fetch.table = fetch.items.keys().copied().zip(pages.iter().copied()).collect();
        self.loadable.push_back(room);
    }

    /// State of a restore, or `None` for a request without one.
    pub(crate) fn progress(&self, room: Room) -> Option<Progress> {
        let fetch = self.fetches.get(&room).filter(|fetch| fetch.phase == Phase::Restoring)?;
        let under_way = |item: &FetchState| {
            matches!(item, FetchState::Filling(_) | FetchState::Ready(_) | FetchState::Loading(_))
        };
        if fetch.items.values().any(under_way) {
            return Some(Progress::Pending);
        }
        let mut missing =
            fetch.items.iter().filter(|(_, item)| **item != FetchState::Loaded).map(|(page, _)| *page);
        if fetch.windows.is_some() {
            let count = missing.count();
            return Some(if count == 0 { Progress::Done } else { Progress::Failed(0..count) });
        }
        Some(match missing.next() {
            None => Progress::Done,
            Some(first) => Progress::Failed(first..missing.next_back().unwrap_or(first) + 1),
        })
    }
}
