//! The pages that one request gets from the offload tiers, from its arrival until they are in the pool.
//!
//! ```text
//!  begin ─► Asking ─(answers)─► Reading ─(slots filled)─► Idle ─restore─► Restoring ─► done, or failed
//!              └── nothing to ask ─────────────────────────┘
//! ```
//!
//! In the queue a request's pages are read into host memory. The request holds pins on slots and nothing of the pool. It waits
//! for the reads as long as doing without would take ([`cost_model`](super::cost_model)), counted from its arrival. Pages that
//! come later are still used if something else kept the request in the queue. When the request is admitted,
//! [`restore`](Hierarchy::restore) says how many pages behind those in L1 will be restored. This is the promise. Every promised
//! page has a pinned slot by then, filled or being filled. A restore has failed when one of these pages cannot be had in time
//! and no copy into the request's pages is under way.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use super::window_items::Windows;
use super::{FoundSlot, Hierarchy, HostSlot, PrefetchPolicy, TierTag};
use crate::ids::{PageId, Room, Time};
use crate::radix::PageHash;
use crate::window::WindowShape;

/// Requests wait at least so long. In a shorter time threads and timers decide which event is first, not storage.
pub(super) const SHORTEST_WAIT: Duration = Duration::from_millis(10);

/// How far the fetch of a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Asking,
    Reading,
    Idle,
    Restoring,
}

/// State of one page of the pool that is restored. `Filling` and `Ready` hold a pin on their slot. In `Loading` the
/// batch holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FetchState {
    Filling(HostSlot),
    Ready(HostSlot),
    Loading(TierTag),
    Loaded,
    /// The page cannot be had.
    Gone,
}

/// The pages that a waiting request wants from the offload tiers.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// Its place among all requests, in order of arrival.
    pub place: u64,
    /// Names of the prompt's pages that may come from a cache.
    pub names: Vec<PageHash>,
    /// How many of these pages are in L1.
    pub in_l1: usize,
    /// Whether another worker sends the other pages.
    pub is_sent: bool,
    /// For a request that is computed here, with a model that has sliding layers: which of the pages in L1 have their
    /// window parts there.
    pub windows: Option<(WindowShape, Vec<bool>)>,
}

/// The fetch of one request.
#[derive(Debug)]
pub(super) struct Fetch {
    /// See [`Wanted`].
    pub place: u64,
    /// Whether the request waits for nothing but storage, as far as is known.
    pub in_line: bool,
    /// Names of the prompt's pages that may come from a cache.
    pub names: Vec<PageHash>,
    /// For each page the first tier that has it, as far as tiers were asked.
    stored: Vec<Option<usize>>,
    /// Window parts of these pages, if the request needs them too.
    pub windows: Option<Windows>,
    /// Tiers that have not answered.
    pub unanswered: BTreeSet<usize>,
    pub phase: Phase,
    begun: Time,
    until: Option<Time>,
    /// `patient` says whether the request still waits for storage, and `prolonged` whether its wait was prolonged once,
    /// because others are computed before it.
    patient: bool,
    prolonged: bool,
    /// Whether another worker sends the pages that are not restored. Otherwise they are computed here.
    pub is_sent: bool,
    /// Pages that were in L1 when the request arrived.
    pub in_l1: usize,
    /// The items that are fetched: pages of the prompt by their places, and behind all of them the pages of [window
    /// parts](super::windows).
    pub items: BTreeMap<usize, FetchState>,
    /// While restoring: the page of the pool into which each item goes.
    pub table: BTreeMap<usize, PageId>,
}

impl Fetch {
    pub(super) fn name(&self, item: usize) -> PageHash {
        let windows = self.windows.as_ref().zip(item.checked_sub(self.names.len()));
        windows.map_or_else(|| self.names[item], |(windows, place)| windows.name(&self.names, place))
    }

    /// The first tier that has an item, as far as tiers were asked.
    pub(super) fn stored(&self, item: usize) -> Option<usize> {
        let windows = self.windows.as_ref().zip(item.checked_sub(self.names.len()));
        windows.map_or_else(|| self.stored[item], |(windows, place)| windows.tier(place))
    }

    /// Takes note that a tier has an item.
    pub(super) fn found(&mut self, item: usize, tier: usize) {
        let stored = match (&mut self.windows, item.checked_sub(self.names.len())) {
            (Some(windows), Some(place)) => windows.stored(place),
            _ => self.stored.get_mut(item),
        };
        if let Some(stored) = stored {
            *stored = Some(stored.map_or(tier, |other| other.min(tier)));
        }
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = HostSlot> {
        self.items.values().filter_map(|item| match item {
            FetchState::Filling(slot) | FetchState::Ready(slot) => Some(*slot),
            _ => None,
        })
    }

    /// Pages of a restore that are not loaded.
    pub(super) fn unloaded(&self) -> usize {
        let items = self.items.values().filter(|item| **item != FetchState::Loaded);
        if self.phase == Phase::Restoring { items.count() } else { 0 }
    }

    /// Pages that the worker must at least compute for the request, as far as is known: all from the first one that is
    /// neither in L1 nor fetched.
    pub(super) fn uncached(&self) -> &[PageHash] {
        if self.is_sent || self.phase == Phase::Asking {
            return &[];
        }
        let held = self.items.range(self.in_l1..).map(|(page, _)| *page);
        let run = held.zip(self.in_l1..self.names.len()).take_while(|(page, place)| page == place);
        &self.names[self.in_l1 + run.count()..]
    }

    pub(super) fn fills(&self) -> bool {
        self.items.values().any(|item| matches!(item, FetchState::Filling(_)))
    }
}

impl Hierarchy {
    /// Begins the fetch of a request, which is to continue behind as many of these pages as can be had.
    pub(crate) fn begin(&mut self, now: Time, room: Room, wanted: Wanted) {
        let Wanted { place, names, in_l1, is_sent, windows } = wanted;
        let fetch = Fetch {
            place,
            in_line: true,
            stored: vec![None; names.len()],
            windows: windows.map(|(shape, in_l1)| Windows::new(shape, in_l1, &names)),
            names,
            unanswered: BTreeSet::new(),
            phase: Phase::Idle,
            begun: now,
            until: None,
            patient: true,
            prolonged: false,
            is_sent,
            in_l1,
            items: BTreeMap::new(),
            table: BTreeMap::new(),
        };
        let unknown = fetch.unknown(self.page_tokens, |name| self.host.find(name).is_some());
        // Window parts save no computing by themselves. Only the pages before them do.
        let gained = match fetch.windows {
            Some(_) => fetch.names.len() - fetch.alone(self.page_tokens),
            None => unknown.len(),
        };
        let all = fetch.alone(self.page_tokens)..fetch.names.len();
        let before = self.fetches.insert(room, fetch);
        assert!(before.is_none(), "{room:?} arrived twice");
        self.hold(room);
        if unknown.is_empty() || gained < self.config.fewest_pages as usize {
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
        let wait = self.longest_wait(room, all);
        self.set_deadline(room, Some(now.after(wait)));
    }

    /// Pins the pages that the request finds in host memory, front first. When prompts come back in turns, just these pages
    /// are the least recently used ones. Without a pin they would be evicted for reads of other requests while this one
    /// waits.
    fn hold(&mut self, room: Room) {
        let Some(fetch) = self.fetches.get(&room) else { return };
        let ready = |page: usize| match self.host.find(&fetch.names[page]) {
            Some(FoundSlot::Ready(slot)) => Some((page, slot)),
            _ => None,
        };
        let here: Vec<(usize, HostSlot)> = (fetch.in_l1..fetch.names.len()).filter_map(ready).collect();
        for (page, slot) in here {
            if self.free_for_reads() == 0 {
                return;
            }
            self.add_item(room, page, FetchState::Ready(slot));
        }
    }

    /// Whether a request in the queue must still wait for storage.
    pub(crate) fn waits(&self, room: Room) -> bool {
        let Some(fetch) = self.fetches.get(&room).filter(|fetch| fetch.patient) else { return false };
        match (fetch.phase, self.config.prefetch) {
            (_, PrefetchPolicy::BestEffort) | (Phase::Idle | Phase::Restoring, _) => false,
            (Phase::Asking, _) => true,
            // Where another worker sends pages, it does so while this worker reads, so the request does not wait.
            (Phase::Reading, _) => !fetch.is_sent && fetch.fills(),
        }
    }

    pub(super) fn after_answer(&mut self, now: Time, room: Room) {
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        if fetch.phase != Phase::Asking || !fetch.unanswered.is_empty() {
            return;
        }
        fetch.phase = Phase::Idle;
        let (in_l1, windows) = (fetch.in_l1, fetch.windows.is_some());
        self.set_deadline(room, None);
        if windows {
            return self.read_windows(now, room);
        }
        let found = |page: &usize| {
            let fetch = &self.fetches[&room];
            fetch.stored(*page).is_some() || self.host.find(&fetch.names[*page]).is_some()
        };
        let end =
            (in_l1..self.fetches[&room].names.len()).take_while(found).last().map_or(in_l1, |last| last + 1);
        self.shorten(room, end);
        let far: Vec<usize> =
            (in_l1..end).filter(|page| self.host.find(&self.fetches[&room].names[*page]).is_none()).collect();
        if far.is_empty() || far.len() < self.config.fewest_pages as usize {
            return;
        }
        if !self.reading_pays(room, &far, end - in_l1, in_l1..end) && !self.read_trial.is_due(now) {
            self.stats.skipped_by_cost += far.len() as u64;
            return;
        }
        self.fetch_items(room, in_l1..end);
        self.wait_for_reads(now, room, in_l1..end);
    }

    /// Makes a request wait for its reads, which bring it these additional pages.
    pub(super) fn wait_for_reads(&mut self, now: Time, room: Room, pages: Range<usize>) {
        let Some(begun) = self.fetches.get(&room).map(|fetch| fetch.begun) else { return };
        let until = begun.after(self.longest_wait(room, pages)).max(now.after(SHORTEST_WAIT));
        if let Some(fetch) = self.fetches.get_mut(&room).filter(|fetch| fetch.fills()) {
            fetch.phase = Phase::Reading;
            let until = Some(until).filter(|_| fetch.patient);
            self.set_deadline(room, until);
        }
    }

    /// Slots that reads may still take. An eighth of host memory is left for saves, even when reads hang that were given up.
    pub(super) fn free_for_reads(&self) -> usize {
        let most = self.host.total() - self.host.total() / 8;
        most.saturating_sub(self.host.pinned() + self.host.counts().abandoned)
    }

    /// Pins the items that are in host memory, and queues reads for the others, as far as there are slots.
    pub(super) fn fetch_items(&mut self, room: Room, items: impl IntoIterator<Item = usize>) {
        for page in items {
            let Some(fetch) = self.fetches.get(&room) else { return };
            if fetch.items.contains_key(&page) {
                continue;
            }
            let (name, tier) = (fetch.name(page), fetch.stored(page));
            let item = match self.host.find(&name) {
                Some(FoundSlot::Ready(slot)) => FetchState::Ready(slot),
                Some(FoundSlot::Filling(slot)) => FetchState::Filling(slot),
                None => {
                    let Some(tier) = tier.filter(|_| self.free_for_reads() > 0) else { return };
                    let Some(slot) = self.host.begin(name) else { return };
                    self.tiers[tier].to_read.push_back((name, slot));
                    FetchState::Filling(slot)
                }
            };
            self.add_item(room, page, item);
        }
    }

    pub(super) fn add_item(&mut self, room: Room, page: usize, item: FetchState) {
        let (FetchState::Filling(slot) | FetchState::Ready(slot)) = item else { return };
        self.host.pin(slot);
        if matches!(item, FetchState::Filling(_)) {
            self.waiters.entry(slot).or_default().push((room, page));
        }
        if let Some(fetch) = self.fetches.get_mut(&room) {
            fetch.items.insert(page, item);
        }
    }

    pub(super) fn drop_item(&mut self, room: Room, page: usize) {
        let item = self.fetches.get_mut(&room).and_then(|fetch| fetch.items.remove(&page));
        self.release_item(item);
    }

    fn release_item(&mut self, item: Option<FetchState>) {
        if let Some(FetchState::Filling(slot) | FetchState::Ready(slot)) = item {
            self.host.unpin(slot);
        }
    }

    /// Takes note that a slot for which a request waits is ready (`good`), or will not be.
    pub(super) fn filled(&mut self, room: Room, page: usize, slot: HostSlot, good: bool) {
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        let Some(item) = fetch.items.get_mut(&page).filter(|item| **item == FetchState::Filling(slot)) else {
            return;
        };
        *item = if good { FetchState::Ready(slot) } else { FetchState::Gone };
        let (restores, windows) = (fetch.phase == Phase::Restoring, fetch.windows.is_some());
        if !good {
            self.host.unpin(slot);
        }
        match (restores, good) {
            (true, true) => self.loadable.push_back(room),
            (true, false) => self.stop_waiting(room),
            (false, false) if windows => self.aim_again(room, page),
            // Pages behind one that cannot be had are of no use.
            (false, false) => self.shorten(room, page),
            (false, true) => {}
        }
    }

    fn shorten(&mut self, room: Room, end: usize) {
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        let behind: Vec<usize> = fetch.items.range(end..).map(|(page, _)| *page).collect();
        for page in behind {
            self.drop_item(room, page);
        }
    }

    /// Ends the wait of a restore: items that are not filled by now count as gone.
    fn stop_waiting(&mut self, room: Room) {
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        let mut slots = Vec::new();
        for item in fetch.items.values_mut() {
            if let FetchState::Filling(slot) = *item {
                slots.push(slot);
                *item = FetchState::Gone;
            }
        }
        slots.into_iter().for_each(|slot| self.host.unpin(slot));
        self.set_deadline(room, None);
        self.changed.insert(room);
    }

    /// Ends the fetch of a request. Returns the loads into its pages that are under way.
    pub(crate) fn forget(&mut self, room: Room) -> BTreeSet<TierTag> {
        self.set_deadline(room, None);
        let Some(fetch) = self.fetches.remove(&room) else { return BTreeSet::new() };
        self.unloaded -= fetch.unloaded();
        let mut loads = BTreeSet::new();
        // The front of a prefix is evicted last.
        for item in fetch.items.into_values().rev() {
            if let FetchState::Loading(tag) = item {
                loads.insert(tag);
            }
            self.release_item(Some(item));
        }
        loads
    }

    pub(super) fn set_deadline(&mut self, room: Room, until: Option<Time>) {
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        if let Some(before) = std::mem::replace(&mut fetch.until, until) {
            self.deadlines.remove(&(before, room));
        }
        self.deadlines.extend(until.map(|until| (until, room)));
    }

    /// Ends the wait of requests that have waited long enough: they do without the missing pages. A request that would
    /// only wait until others are computed waits for storage meanwhile, once.
    pub(super) fn expire_fetches(&mut self, now: Time) {
        while let Some((_, room)) = self.deadlines.first().copied().filter(|(until, _)| *until <= now) {
            self.set_deadline(room, None);
            let Some(fetch) = self.fetches.get(&room) else { continue };
            if fetch.phase == Phase::Restoring {
                self.stop_waiting(room);
                continue;
            }
            let ahead =
                if fetch.is_sent || fetch.prolonged { Duration::ZERO } else { self.time_ahead(fetch) };
            let Some(fetch) = self.fetches.get_mut(&room) else { continue };
            (fetch.patient, fetch.prolonged) = (!ahead.is_zero(), true);
            let until = Some(now.after(ahead)).filter(|_| fetch.patient);
            self.set_deadline(room, until);
        }
    }
}
