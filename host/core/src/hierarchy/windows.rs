//! Window parts in the offload tiers, for workers that compute models of which some layers slide ([`crate::window`]).
//!
//! Such a worker goes on where it has all pages before and the window that is seen there, or where it recomputes that
//! window ([`WindowShape::reach`]). What was saved of a sequence is all of its pages, and window parts at a few places
//! only. So a fetch looks for the place that leaves least to be computed, an *end*: window parts may come from L1 up to
//! the first that is not there, and from the offload tiers from then on. Only what belongs to that end is read. When a
//! piece of it cannot be had, the next end is looked for with what is left, and in the last resort the one that L1 has
//! alone.
//!
//! The pieces of a fetch are numbered: page by page, then part by part the pages of all window parts, in order. Storage is asked
//! for the first page of a part only, which is written with the others.

use std::collections::BTreeSet;
use std::ops::Range;

use super::fetch::Fetch;
use super::window_pieces::Windows;
use super::{Found, Hierarchy};
use crate::ids::{PageId, Room, Time};
use crate::radix::PageHash;
use crate::window::Reach;

/// Where a request is to go on, and what of it is restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    /// Pages before its end that are not in L1 are restored.
    pub reach: Reach,
    /// Token pages in front of it whose window parts are restored. Those before them that are seen have theirs in L1.
    pub windows: Range<usize>,
    /// Pages that are there and left alone, because computing them is quicker.
    pub skipped: usize,
    /// Whether it is tried although computing is quicker by all that is known.
    trial: bool,
}

impl Fetch {
    /// What storage is asked for: pages that are neither in L1 nor in host memory, and what could be part of a window behind
    /// the one that L1 has.
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
        let is_whole = |piece: usize| {
            let all = if piece < pages { piece..piece + 1 } else { piece..piece + parts };
            all.into_iter().all(|piece| is_here(&self.name(piece)))
        };
        wanted.retain(|piece| !is_whole(*piece));
        wanted
    }

    /// The page at which computing begins with what L1 had alone when the request arrived.
    pub(super) fn alone(&self, page_tokens: usize) -> usize {
        let reach = |windows: &Windows| {
            windows.shape.reach(windows.in_l1.len(), page_tokens, |page| windows.in_l1[page]).start
        };
        self.windows.as_ref().map_or(self.in_l1, reach)
    }

    /// The pieces that an end takes from the offload tiers, `in_l1` pages being in L1.
    fn pieces(&self, in_l1: usize, end: &End) -> Vec<usize> {
        let (pages, parts) = (self.names.len(), self.windows.as_ref().map_or(0, Windows::parts));
        let windows = end.windows.start * parts..end.windows.end * parts;
        (in_l1..end.reach.end).chain(windows.map(|place| pages + place)).collect()
    }
}

impl Hierarchy {
    /// The end from which least is to be computed, and what that is where L1 is alone.
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
        // Parts in front come from L1, those behind from the offload tiers. Of a window that is recomputed none are taken.
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

    /// All tiers have answered: reads what the deepest end that there is takes from storage, if that pays.
    pub(super) fn read_windows(&mut self, now: Time, room: Room) {
        let Some((end, alone)) = self.aim(room) else { return };
        let fetch = &self.fetches[&room];
        let pieces = fetch.pieces(fetch.in_l1, &end);
        let far: Vec<usize> =
            pieces.iter().copied().filter(|piece| self.host.find(&fetch.name(*piece)).is_none()).collect();
        let gained = alone.start..end.reach.start;
        if gained.is_empty() || gained.len() < self.config.fewest_pages as usize || far.is_empty() {
            return;
        }
        if !self.reading_pays(room, &far, pieces.len(), gained.clone()) && !self.read_trial.is_due(now) {
            self.stats.skipped_by_cost += far.len() as u64;
            return;
        }
        self.fetch_pieces(room, pieces);
        self.wait_for_reads(now, room, gained);
    }

    /// The deepest end with what is there by all that is known, as far as there are slots for it, and the one that L1 has alone.
    fn aim(&self, room: Room) -> Option<(End, Reach)> {
        let fetch = self.fetches.get(&room)?;
        let windows = fetch.windows.as_ref()?;
        let is_here = |piece: usize| self.host.find(&fetch.name(piece)).is_some();
        let has = |piece: usize| {
            !windows.gone.contains(&piece) && (fetch.stored(piece).is_some() || is_here(piece))
        };
        let (end, alone) = self.deepest(fetch, &windows.in_l1, has);
        let slots = self.free_for_reads() + fetch.pieces.len();
        let wanted = fetch.pieces(fetch.in_l1, &end).len();
        if wanted <= slots {
            return Some((end, alone));
        }
        let pages = fetch.in_l1 + slots.saturating_sub(end.windows.len() * windows.parts());
        let few = self.deepest(fetch, &windows.in_l1, |piece| {
            (piece < pages || piece >= fetch.names.len()) && has(piece)
        });
        (fetch.pieces(fetch.in_l1, &few.0).len() <= slots).then_some(few)
    }

    /// A piece of what is being read cannot be had: reads what the next end takes, and gives up what it does not.
    pub(super) fn aim_again(&mut self, room: Room, gone: usize) {
        if let Some(windows) = self.fetches.get_mut(&room).and_then(|fetch| fetch.windows.as_mut()) {
            windows.gone.insert(gone);
        }
        let aim = self.aim(room).filter(|(end, alone)| end.reach.start > alone.start);
        let Some(fetch) = self.fetches.get(&room) else { return };
        let wanted = aim.map(|(end, _)| fetch.pieces(fetch.in_l1, &end)).unwrap_or_default();
        let kept: BTreeSet<usize> = wanted.iter().copied().collect();
        let unwanted: Vec<usize> =
            fetch.pieces.keys().copied().filter(|piece| !kept.contains(piece)).collect();
        for piece in unwanted {
            self.drop_piece(room, piece);
        }
        self.fetch_pieces(room, wanted);
    }

    /// Where a request would go on that was admitted now, of whose pages L1 has some, some with their window parts. Nothing
    /// changes by it, and in the same tick [`restore_end`](Self::restore_end) finds all that it found.
    pub(crate) fn end_for(&self, now: Time, room: Room, in_l1: &[bool]) -> Option<End> {
        let fetch = self.fetches.get(&room).filter(|fetch| fetch.windows.is_some())?;
        let has = |piece: usize| matches!(self.host.find(&fetch.name(piece)), Some(Found::Ready(_)));
        let (end, alone) = self.deepest(fetch, in_l1, has);
        let pieces = fetch.pieces(in_l1.len(), &end).len();
        let gained = alone.start..end.reach.start;
        if gained.is_empty() {
            return Some(end);
        }
        let slow = self.load_seconds(pieces) > self.seconds_without(fetch, gained);
        let trial = slow && self.load_trial.would_be_due(now);
        Some(match slow && !trial {
            true => End { reach: alone, windows: alone.end..alone.end, skipped: pieces, trial: false },
            false => End { trial, ..end },
        })
    }

    /// A request is admitted that goes on at this end, its first `in_l1` pages being in L1: restores the others and the window
    /// parts into these pages of the pool, in order. Returns whether there is anything to wait for.
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
        let pieces = fetch.pieces(in_l1, end);
        if !self.restore_pieces(room, &pieces) {
            return false;
        }
        self.restore_into(room, pages);
        true
    }
}
