//! What one request gets from below the pool, from its arrival until its pages are there.
//!
//! ```text
//!  begin ─► Asking ─(answers)─► Reading ─(slots filled)─► Idle ─restore─► Restoring ─► done, or failed
//!              └── nothing to ask ─────────────────────────┘
//! ```
//!
//! In the queue a request's pages are read into host memory; it holds pins on slots and nothing of the pool. It waits for
//! that as long as doing without would take ([`worth`](super::worth)), counted from its arrival; what comes later is still
//! used if something else kept the request in the queue. When it is admitted, [`restore`](Hierarchy::restore) says how many pages behind those in L1 will come from below: that is
//! the promise. Every page of it has a pinned slot by then, filled or being filled. A restore has failed when one of them
//! cannot be had in time and no copy into its pages is under way.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::worth::SHORTEST_WAIT;
use super::{Found, Hierarchy, HostSlot, PrefetchPolicy, TierTag};
use crate::ids::{PageId, Room, Time};
use crate::radix::PageHash;

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Asking,
    Reading,
    Idle,
    Restoring,
}

/// One page that comes from below. All but the last two hold a pin on their slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Filling(HostSlot),
    Ready(HostSlot),
    Loading(TierTag),
    Loaded,
    /// Cannot be had.
    Gone,
}

/// One request.
#[derive(Debug)]
pub(super) struct Fetch {
    /// Of the pages of the prompt that may come from a cache.
    pub names: Vec<PageHash>,
    /// The first tier that has each, as far as was asked.
    pub stored: Vec<Option<usize>>,
    /// Tiers that have not said what they have.
    pub unanswered: BTreeSet<usize>,
    phase: Phase,
    begun: Time,
    until: Option<Time>,
    /// Whether the queue still waits for it, and whether it does so because others are computed.
    patient: bool,
    prolonged: bool,
    /// Pages that were in L1 when it arrived.
    near: usize,
    pub pieces: BTreeMap<usize, Piece>,
    /// While restoring: the request's pages, from the first of `pieces` on.
    pub table: Vec<PageId>,
}

/// How a restore is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Pending,
    /// All pages are in the pool.
    Done,
    /// These pages of the prompt have to come from elsewhere. Nothing of it is under way.
    Failed(Range<usize>),
}

impl Fetch {
    pub(super) fn slots(&self) -> impl Iterator<Item = HostSlot> {
        self.pieces.values().filter_map(|piece| match piece {
            Piece::Filling(slot) | Piece::Ready(slot) => Some(*slot),
            _ => None,
        })
    }

    fn fills(&self) -> bool {
        self.pieces.values().any(|piece| matches!(piece, Piece::Filling(_)))
    }
}

impl Hierarchy {
    /// A request has arrived whose prompt has these pages, the first `near` of which are in L1.
    pub(crate) fn begin(&mut self, now: Time, room: Room, names: Vec<PageHash>, near: usize) {
        let unknown: Vec<usize> =
            (near..names.len()).filter(|page| self.host.find(&names[*page]).is_none()).collect();
        let fetch = Fetch {
            stored: vec![None; names.len()],
            names,
            unanswered: BTreeSet::new(),
            phase: Phase::Idle,
            begun: now,
            until: None,
            patient: true,
            prolonged: false,
            near,
            pieces: BTreeMap::new(),
            table: Vec::new(),
        };
        let before = self.fetches.insert(room, fetch);
        assert!(before.is_none(), "{room:?} arrived twice");
        if unknown.is_empty() || unknown.len() < self.config.fewest_pages as usize {
            return;
        }
        let able: Vec<usize> = (0..self.tiers.len()).filter(|tier| !self.rests(now, *tier)).collect();
        for tier in &able {
            self.tiers[*tier].questions.extend(unknown.iter().map(|page| (room, *page)));
        }
        if able.is_empty() {
            return;
        }
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        fetch.unanswered.extend(able);
        fetch.phase = Phase::Asking;
        let all = near..fetch.names.len();
        let wait = self.longest_wait(room, all);
        self.set_deadline(room, Some(now.after(wait)));
    }

    /// Whether a request that waits is to wait for storage.
    pub(crate) fn waits(&self, room: Room) -> bool {
        let Some(fetch) = self.fetches.get(&room).filter(|fetch| fetch.patient) else { return false };
        match (fetch.phase, self.config.prefetch) {
            (_, PrefetchPolicy::BestEffort) | (Phase::Idle | Phase::Restoring, _) => false,
            (Phase::Asking, _) => true,
            // What is sent meanwhile does not wait for what is read.
            (Phase::Reading, _) => !self.is_sent && fetch.fills(),
        }
    }

    pub(super) fn after_answer(&mut self, now: Time, room: Room) {
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        if fetch.phase != Phase::Asking || !fetch.unanswered.is_empty() {
            return;
        }
        fetch.phase = Phase::Idle;
        let (near, begun) = (fetch.near, fetch.begun);
        self.set_deadline(room, None);
        let found = |page: &usize| {
            let fetch = &self.fetches[&room];
            fetch.stored[*page].is_some() || self.host.find(&fetch.names[*page]).is_some()
        };
        let end =
            (near..self.fetches[&room].names.len()).take_while(found).last().map_or(near, |last| last + 1);
        let far: Vec<usize> =
            (near..end).filter(|page| self.host.find(&self.fetches[&room].names[*page]).is_none()).collect();
        if far.is_empty() || far.len() < self.config.fewest_pages as usize {
            return;
        }
        if !self.worth_reading(room, &far, near..end) && !self.read_trial.is_due(now) {
            self.stats.skipped_by_cost += far.len() as u64;
            return;
        }
        self.fetch_pages(room, near..end);
        let until = begun.after(self.longest_wait(room, near..end)).max(now.after(SHORTEST_WAIT));
        if let Some(fetch) = self.fetches.get_mut(&room).filter(|fetch| fetch.fills()) {
            fetch.phase = Phase::Reading;
            let until = Some(until).filter(|_| fetch.patient);
            self.set_deadline(room, until);
        }
    }

    /// Pins what is in host memory and has the rest read, as far as there are slots. An eighth of host memory stays for
    /// pages on their way down, also when reads hang that were given up.
    fn fetch_pages(&mut self, room: Room, pages: Range<usize>) {
        let most = self.host.total() - self.host.total() / 8;
        for page in pages {
            let Some(fetch) = self.fetches.get(&room) else { return };
            let (name, tier) = (fetch.names[page], fetch.stored[page]);
            let piece = match self.host.find(&name) {
                Some(Found::Ready(slot)) => Piece::Ready(slot),
                Some(Found::Filling(slot)) => Piece::Filling(slot),
                None => {
                    let Some(tier) =
                        tier.filter(|_| self.host.pinned() + self.host.counts().abandoned < most)
                    else {
                        return;
                    };
                    let Some(slot) = self.host.begin(name) else { return };
                    self.tiers[tier].to_read.push_back((name, slot));
                    Piece::Filling(slot)
                }
            };
            self.add_piece(room, page, piece);
        }
    }

    fn add_piece(&mut self, room: Room, page: usize, piece: Piece) {
        let (Piece::Filling(slot) | Piece::Ready(slot)) = piece else { return };
        self.host.pin(slot);
        if matches!(piece, Piece::Filling(_)) {
            self.waiters.entry(slot).or_default().push((room, page));
        }
        if let Some(fetch) = self.fetches.get_mut(&room) {
            fetch.pieces.insert(page, piece);
        }
    }

    fn drop_piece(&mut self, room: Room, page: usize) {
        let piece = self.fetches.get_mut(&room).and_then(|fetch| fetch.pieces.remove(&page));
        self.release_piece(piece);
    }

    fn release_piece(&mut self, piece: Option<Piece>) {
        if let Some(Piece::Filling(slot) | Piece::Ready(slot)) = piece {
            self.host.unpin(slot);
        }
    }

    /// A slot that a request waits for is ready, or will not be.
    pub(super) fn filled(&mut self, room: Room, page: usize, slot: HostSlot, good: bool) {
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        let Some(piece) = fetch.pieces.get_mut(&page).filter(|piece| **piece == Piece::Filling(slot)) else {
            return;
        };
        *piece = if good { Piece::Ready(slot) } else { Piece::Gone };
        let restores = fetch.phase == Phase::Restoring;
        if !good {
            self.host.unpin(slot);
        }
        match (restores, good) {
            (true, true) => self.loadable.push_back(room),
            (true, false) => self.stop_waiting(room),
            // What is behind a page that cannot be had is of no use.
            (false, false) => self.shorten(room, page),
            (false, true) => {}
        }
    }

    fn shorten(&mut self, room: Room, end: usize) {
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        let behind: Vec<usize> = fetch.pieces.range(end..).map(|(page, _)| *page).collect();
        for page in behind {
            self.drop_piece(room, page);
        }
    }

    /// What has not been filled by now counts as gone.
    fn stop_waiting(&mut self, room: Room) {
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        let mut slots = Vec::new();
        for piece in fetch.pieces.values_mut() {
            if let Piece::Filling(slot) = *piece {
                slots.push(slot);
                *piece = Piece::Gone;
            }
        }
        slots.into_iter().for_each(|slot| self.host.unpin(slot));
        self.set_deadline(room, None);
        self.changed.insert(room);
    }

    /// A request is admitted, with its first `near` pages from L1: how many of the next ones will come from below.
    /// [`restore_into`](Self::restore_into) is to follow unless that is none.
    pub(crate) fn restore(&mut self, now: Time, room: Room, near: usize) -> usize {
        let Some(fetch) = self.fetches.get(&room) else { return 0 };
        let in_flight = self.is_sent && self.config.prefetch != PrefetchPolicy::BestEffort;
        let mut end = near;
        while end < fetch.names.len() {
            match self.host.find(&fetch.names[end]) {
                Some(Found::Ready(_)) => {}
                Some(Found::Filling(_)) if in_flight => {}
                _ => break,
            }
            end += 1;
        }
        let slow = end > near && self.load_seconds(end - near) > self.seconds_without(fetch, near..end);
        if slow && !self.load_trial.is_due(now) {
            self.stats.skipped_by_cost += (end - near) as u64;
            end = near;
        }
        let outside: Vec<usize> =
            fetch.pieces.keys().copied().filter(|page| !(near..end).contains(page)).collect();
        let inside: Vec<usize> = (near..end).filter(|page| !fetch.pieces.contains_key(page)).collect();
        let from_storage = (near..end).filter(|page| fetch.stored[*page].is_some()).count();
        for page in outside {
            self.drop_piece(room, page);
        }
        for page in inside {
            let piece = match self.host.find(&self.fetches[&room].names[page]) {
                Some(Found::Ready(slot)) => Piece::Ready(slot),
                Some(Found::Filling(slot)) => Piece::Filling(slot),
                None => unreachable!("page {page} of {room:?} was there before"),
            };
            self.add_piece(room, page, piece);
        }
        if end == near {
            self.forget(room);
            return 0;
        }
        self.stats.promised_storage += from_storage as u64;
        self.stats.promised_host += (end - near - from_storage) as u64;
        let wait = self.longest_wait(room, near..end);
        if let Some(fetch) = self.fetches.get_mut(&room) {
            fetch.phase = Phase::Restoring;
            let until = fetch.fills().then(|| now.after(wait));
            self.set_deadline(room, until);
        }
        end - near
    }

    /// The pages of the pool into which a restore goes.
    pub(crate) fn restore_into(&mut self, room: Room, pages: &[PageId]) {
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        assert!(
            pages.len() == fetch.pieces.len(),
            "{} pages for a restore of {}",
            pages.len(),
            fetch.pieces.len()
        );
        fetch.table = pages.to_vec();
        self.loadable.push_back(room);
    }

    /// How a restore is doing; `None` for a request without one.
    pub(crate) fn progress(&self, room: Room) -> Option<Progress> {
        let fetch = self.fetches.get(&room).filter(|fetch| fetch.phase == Phase::Restoring)?;
        let under_way =
            |piece: &Piece| matches!(piece, Piece::Filling(_) | Piece::Ready(_) | Piece::Loading(_));
        if fetch.pieces.values().any(under_way) {
            return Some(Progress::Pending);
        }
        let mut missing =
            fetch.pieces.iter().filter(|(_, piece)| **piece != Piece::Loaded).map(|(page, _)| *page);
        Some(match missing.next() {
            None => Progress::Done,
            Some(first) => Progress::Failed(first..missing.next_back().unwrap_or(first) + 1),
        })
    }

    /// The request needs nothing from here any more. Returns loads into its pages that are under way.
    pub(crate) fn forget(&mut self, room: Room) -> BTreeSet<TierTag> {
        self.set_deadline(room, None);
        let Some(fetch) = self.fetches.remove(&room) else { return BTreeSet::new() };
        let mut loads = BTreeSet::new();
        // The front of a prefix is evicted last.
        for piece in fetch.pieces.into_values().rev() {
            if let Piece::Loading(tag) = piece {
                loads.insert(tag);
            }
            self.release_piece(Some(piece));
        }
        loads
    }

    fn set_deadline(&mut self, room: Room, until: Option<Time>) {
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        if let Some(before) = std::mem::replace(&mut fetch.until, until) {
            self.deadlines.remove(&(before, room));
        }
        self.deadlines.extend(until.map(|until| (until, room)));
    }

    /// Requests that have waited long enough do without what is not there. One that would only wait for others to be
    /// computed goes on waiting for storage meanwhile, once.
    pub(super) fn expire_fetches(&mut self, now: Time) {
        while let Some((_, room)) = self.deadlines.first().copied().filter(|(until, _)| *until <= now) {
            self.set_deadline(room, None);
            let ahead = self.backlog_time();
            let Some(fetch) = self.fetches.get_mut(&room) else { continue };
            match fetch.phase {
                Phase::Restoring => self.stop_waiting(room),
                _ if fetch.prolonged || ahead.is_zero() => fetch.patient = false,
                _ => {
                    fetch.prolonged = true;
                    self.set_deadline(room, Some(now.after(ahead)));
                }
            }
        }
    }
}
