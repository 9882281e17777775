//! Window parts in the offload tiers, for workers that compute models with sliding layers ([`crate::window`]).
//!
//! On such a worker a request can continue at a place where it has all pages before and the window that is seen there,
//! or where it recomputes that window ([`WindowShape::reach`]). All pages of a sequence are saved, but window parts at
//! a few places only. So a fetch looks for the place that leaves least to be computed, an *end*. Its window parts may
//! come from L1 up to the first one that is not there, and from the offload tiers from then on. Only items that belong
//! to that end are read. When one of them cannot be had, the fetch looks for the next end with the items that are
//! left. If there is none, it takes the end that L1 has alone.
//!
//! The items of a fetch are numbered: page by page, then part by part the pages of all window parts, in order. Storage is asked
//! for the first page of a part only, because all pages of a part are written together.

use std::collections::BTreeSet;
use std::ops::Range;

use super::fetch::Fetch;
use super::window_items::Windows;
use super::{FoundSlot, Hierarchy};
use crate::ids::{PageId, Room, Time};
use crate::radix::PageHash;
use crate::window::Reach;

/// The place at which a request continues, and the items that are restored for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    /// Pages before the end of the reach that are not in L1 are restored.
    pub reach: Reach,
    /// Token pages in front of the end whose window parts are restored. Earlier token pages of the window have their
    /// parts in L1.
    pub windows: Range<usize>,
    /// Pages that could be restored and are not, because computing them is quicker.
    pub skipped: usize,
    /// Whether the restore is a trial: by the cost model computing is quicker.
    trial: bool,
}

impl Fetch {
    /// Items for which storage is asked: pages that are neither in L1 nor in host memory, and parts of windows behind the
    /// one that L1 has.
    pub(super) fn unknown(&self, page_tokens: usize, is_here: impl Fn(&PageHash) -> bool) -> Vec<usize> {
        let pages = self.names.len();
        let mut wanted: Vec<usize> = (self.in_l1..pages).collect();
        if let Some(windows) = &self.windows {
            let shape = windows.shape;
            let seen = shape.seen_at(self.alone(page_tokens) + 1, page_tokens).start..pages;
            let lacking = seen.filter(|page| windows.in_l1.get(*page) != Some(&true));
            wanted.extend(lacking.map(|page| pages + page * windows.parts()));
        }
        let parts = self.windows.as_ref().map_or(1, Windows::parts);
        let is_whole = |item: usize| {
            let all = if item < pages { item..item + 1 } else { item..item + parts };
            all.into_iter().all(|item| is_here(&self.name(item)))
        };
        wanted.retain(|item| !is_whole(*item));
        wanted
    }

    /// The page at which computing would begin with L1 alone, as it was when the request arrived.
    pub(super) fn alone(&self, page_tokens: usize) -> usize {
        let reach = |windows: &Windows| {
            windows.shape.reach(windows.in_l1.len(), page_tokens, |page| windows.in_l1[page]).start
        };
        self.windows.as_ref().map_or(self.in_l1, reach)
    }

    /// The items that an end takes from the offload tiers, if the first `in_l1` pages are in L1.
    fn items(&self, in_l1: usize, end: &End) -> Vec<usize> {
        let (pages, parts) = (self.names.len(), self.windows.as_ref().map_or(0, Windows::parts));
        let windows = end.windows.start * parts..end.windows.end * parts;
        (in_l1..end.reach.end).chain(windows.map(|place| pages + place)).collect()
    }
}

impl Hierarchy {
    /// The deepest end, which leaves least to be computed, and the reach with L1 alone.
    fn deepest(&self, fetch: &Fetch, in_l1: &[bool], has: impl Fn(usize) -> bool) -> (End, Reach) {
        let end = |reach: Reach, windows| End { reach, windows, skipped: 0, trial: false };
        let Some(windows) = &fetch.windows else { return (end(Reach::default(), 0..0), Reach::default()) };
        let (shape, page, pages) = (windows.shape, self.page_tokens, fetch.names.len());
        let is_in_l1 = |page: usize| in_l1.get(page) == Some(&true);
        let offloaded = |page: usize| {
            let first = pages + page * windows.parts();
            (first..first + windows.parts()).all(&has)
        };
        let alone = shape.reach(in_l1.len(), page, is_in_l1);
        let full =
            (in_l1.len()..pages).take_while(|page| has(*page)).last().map_or(in_l1.len(), |last| last + 1);
        // The front parts of a window come from L1, the others from the offload tiers. A window that is recomputed takes
        // no parts.
        let divided = |reach: Reach| {
            let seen =
                if reach.start < reach.end { reach.end..reach.end } else { shape.seen_at(reach.end, page) };
            let first = seen.clone().find(|page| !is_in_l1(*page)).unwrap_or(seen.end);
            end(reach, first..seen.end)
        };
        let either = divided(shape.reach(full, page, |page| is_in_l1(page) || offloaded(page)));
        if either.reach.start > alone.start && either.windows.clone().all(offloaded) {
            return (either, alone);
        }
        let only = shape.reach(full, page, offloaded);
        let found = if only.start > alone.start { divided(only) } else { end(alone, alone.end..alone.end) };
        (found, alone)
    }

    /// Reads the items of the deepest end from storage, if that pays. All tiers have answered.
    pub(super) fn read_windows(&mut self, now: Time, room: Room) {
        let Some((end, alone)) = self.aim(room) else { return };
        let fetch = &self.fetches[&room];
        let items = fetch.items(fetch.in_l1, &end);
        let far: Vec<usize> =
            items.iter().copied().filter(|item| self.host.find(&fetch.name(*item)).is_none()).collect();
        let gained = alone.start..end.reach.start;
        if gained.is_empty() || gained.len() < self.config.fewest_pages as usize || far.is_empty() {
            return;
        }
        if !self.reading_pays(room, &far, items.len(), gained.clone()) && !self.read_trial.is_due(now) {
            self.stats.skipped_by_cost += far.len() as u64;
            return;
        }
        self.fetch_items(room, items);
        self.wait_for_reads(now, room, gained);
    }

    /// The deepest end with the items that are known to be there, as far as there are slots for them, and the reach with L1
    /// alone.
    fn aim(&self, room: Room) -> Option<(End, Reach)> {
        let fetch = self.fetches.get(&room)?;
        let windows = fetch.windows.as_ref()?;
        let is_here = |item: usize| self.host.find(&fetch.name(item)).is_some();
        let has =
            |item: usize| !windows.gone.contains(&item) && (fetch.stored(item).is_some() || is_here(item));
        let (end, alone) = self.deepest(fetch, &windows.in_l1, has);
        let slots = self.free_for_reads() + fetch.items.len();
        let wanted = fetch.items(fetch.in_l1, &end).len();
        if wanted <= slots {
            return Some((end, alone));
        }
        let pages = fetch.in_l1 + slots.saturating_sub(end.windows.len() * windows.parts());
        let few = self
            .deepest(fetch, &windows.in_l1, |item| (item < pages || item >= fetch.names.len()) && has(item));
        (fetch.items(fetch.in_l1, &few.0).len() <= slots).then_some(few)
    }

    /// Changes the end after an item could not be had: reads the items of the next end, and gives up those that it
    /// does not need.
    pub(super) fn aim_again(&mut self, room: Room, gone: usize) {
        if let Some(windows) = self.fetches.get_mut(&room).and_then(|fetch| fetch.windows.as_mut()) {
            windows.gone.insert(gone);
        }
        let aim = self.aim(room).filter(|(end, alone)| end.reach.start > alone.start);
        let Some(fetch) = self.fetches.get(&room) else { return };
        let wanted = aim.map(|(end, _)| fetch.items(fetch.in_l1, &end)).unwrap_or_default();
        let kept: BTreeSet<usize> = wanted.iter().copied().collect();
        let unwanted: Vec<usize> = fetch.items.keys().copied().filter(|item| !kept.contains(item)).collect();
        for item in unwanted {
            self.drop_item(room, item);
        }
        self.fetch_items(room, wanted);
    }

    /// Where a request would continue if it were admitted now. `in_l1` says for each of its pages in L1 whether the window
    /// parts are there, too. Changes nothing. In the same tick [`restore_end`](Self::restore_end) finds the same items.
    pub(crate) fn end_for(&self, now: Time, room: Room, in_l1: &[bool]) -> Option<End> {
        let fetch = self.fetches.get(&room).filter(|fetch| fetch.windows.is_some())?;
        let has = |item: usize| matches!(self.host.find(&fetch.name(item)), Some(FoundSlot::Ready(_)));
        let (end, alone) = self.deepest(fetch, in_l1, has);
        let items = fetch.items(in_l1.len(), &end).len();
        let gained = alone.start..end.reach.start;
        if gained.is_empty() {
            return Some(end);
        }
        let slow = self.load_seconds(items) > self.seconds_without(fetch, gained);
        let trial = slow && self.load_trial.would_be_due(now);
        Some(match slow && !trial {
            true => End { reach: alone, windows: alone.end..alone.end, skipped: items, trial: false },
            false => End { trial, ..end },
        })
    }

    /// Restores for an admitted request, whose first `in_l1` pages are in L1, the other pages and the window parts of `end`
    /// into these pages of the pool, in order. Returns whether there is anything to wait for.
    pub(crate) fn restore_end(
        &mut self,
        now: Time,
        room: Room,
        in_l1: usize,
        end: &End,
        pages: &[PageId],
    ) -> bool {
        self.passes(room);
        self.stats.skipped_by_cost += end.skipped as u64;
        if end.trial || end.skipped > 0 {
            self.load_trial.is_due(now);
        }
        let Some(fetch) = self.fetches.get(&room) else { return false };
        let items = fetch.items(in_l1, end);
        if !self.restore_items(room, &items) {
            return false;
        }
        self.restore_into(room, pages);
        true
    }
}
