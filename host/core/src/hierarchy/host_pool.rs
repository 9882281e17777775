//! L2: pages in host memory, by name.
//!
//! A *slot* is a place for one page. Like a page of the pool, it exists on every rank and holds there the rank's heads.
//! A page is found by its name alone (32 bytes of SHA-256 over everything that leads to it), so the contents of L2 are
//! independent of those of the radix tree. A page may be in L1, in L2 or in both, and any page of a prefix may be in L2
//! without the ones before it.
//!
//! ```text
//! free ─begin─► filling ─ended(true)─► ready ─(least recently used, for another)─► filling
//!                  │ └────ended(false)──────────► free, or spoilt until the last pin goes
//!                  └─give_up─► abandoned ─ended─► free
//! ```
//!
//! A *filling* slot is being written. When no request waits for the write any more, the slot is *abandoned*: it is no
//! longer found, and becomes free only when the writer says that it is done. No timer frees it. A *pin* keeps a ready
//! slot from being used for another page, and a spoilt one from being free.

use std::collections::BTreeMap;

use crate::radix::PageHash;

/// A place for one page in host memory, counted from 0 on every rank alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostSlot(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Filling,
    Ready,
    /// Its content is not valid, and a request still has a pin on it.
    Spoilt,
    Abandoned,
}

const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Entry {
    state: State,
    name: Option<PageHash>,
    pins: u32,
    previous: u32,
    next: u32,
}

/// Numbers of slots by their states. They add up to all slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostCounts {
    /// Hold nothing.
    pub free: usize,
    /// Are being written.
    pub filling: usize,
    /// Hold a page that can be found.
    pub ready: usize,
    /// Hold no valid page, and have pins of requests that waited for one.
    pub spoilt: usize,
    /// May still be written, although no request waits any more.
    pub abandoned: usize,
}

/// A page of the host memory, found by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundSlot {
    /// The slot holds the page.
    Ready(HostSlot),
    /// The page is being written to the slot.
    Filling(HostSlot),
}

/// All slots of the host memory.
#[derive(Debug)]
pub struct HostPool {
    slots: Vec<Entry>,
    by_name: BTreeMap<PageHash, HostSlot>,
    free: Vec<HostSlot>,
    /// Least and most recently used of the ready slots without a pin.
    oldest: u32,
    newest: u32,
    counts: HostCounts,
    pinned: usize,
    evicted: u64,
}

impl HostPool {
    /// A pool of free slots.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        let empty = Entry { state: State::Free, name: None, pins: 0, previous: NONE, next: NONE };
        Self {
            slots: vec![empty; slots as usize],
            by_name: BTreeMap::new(),
            free: (0..slots).rev().map(HostSlot).collect(),
            oldest: NONE,
            newest: NONE,
            counts: HostCounts { free: slots as usize, ..HostCounts::default() },
            pinned: 0,
            evicted: 0,
        }
    }

    /// Numbers of slots by their states.
    #[must_use]
    pub fn counts(&self) -> HostCounts {
        self.counts
    }

    /// Slots with a pin.
    #[must_use]
    pub fn pinned(&self) -> usize {
        self.pinned
    }

    /// Pages that were evicted for others since start.
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Slots in all.
    #[must_use]
    pub fn total(&self) -> usize {
        self.slots.len()
    }

    /// Where a page is, or will be.
    #[must_use]
    pub fn find(&self, name: &PageHash) -> Option<FoundSlot> {
        let slot = *self.by_name.get(name)?;
        match self.slots[slot.0 as usize].state {
            State::Ready => Some(FoundSlot::Ready(slot)),
            _ => Some(FoundSlot::Filling(slot)),
        }
    }

    /// Whether a request waits for the page that is, or will be, written to a slot.
    #[must_use]
    pub fn is_wanted(&self, slot: HostSlot) -> bool {
        let entry = &self.slots[slot.0 as usize];
        entry.state == State::Filling && entry.pins > 0
    }

    /// The page that a slot holds or will hold, or `None` when it is not found there.
    #[must_use]
    pub fn name(&self, slot: HostSlot) -> Option<PageHash> {
        self.slots[slot.0 as usize].name
    }

    /// Takes a slot for a page that is not here: a free one, or the least recently used without a pin. `None` when
    /// there is neither. The caller has the slot written, and calls [`ended`](Self::ended) once no write is left.
    ///
    /// # Panics
    /// When the page is here already.
    pub fn begin(&mut self, name: PageHash) -> Option<HostSlot> {
        assert!(!self.by_name.contains_key(&name), "{name:?} is in host memory already");
        if self.free.is_empty() {
            let oldest = Some(HostSlot(self.oldest)).filter(|slot| slot.0 != NONE)?;
            self.forget_page(oldest);
            self.evicted += 1;
        }
        let slot = self.free.pop()?;
        self.relocate(slot, State::Free, State::Filling);
        self.slots[slot.0 as usize].name = Some(name);
        self.by_name.insert(name, slot);
        Some(slot)
    }

    /// Ends the filling of a slot: no write to it is left. `good` says that the slot holds its page. Returns whether
    /// the page is here now.
    pub fn ended(&mut self, slot: HostSlot, good: bool) -> bool {
        match self.slots[slot.0 as usize].state {
            State::Abandoned => {
                self.relocate(slot, State::Abandoned, State::Spoilt);
                self.free_if_spoilt(slot);
                false
            }
            State::Filling if good => {
                self.relocate(slot, State::Filling, State::Ready);
                if self.slots[slot.0 as usize].pins == 0 {
                    self.push(slot);
                }
                true
            }
            State::Filling => {
                self.forget_name(slot);
                self.relocate(slot, State::Filling, State::Spoilt);
                self.free_if_spoilt(slot);
                false
            }
            other => unreachable!("{slot:?} is {other:?} and was written"),
        }
    }

    /// Abandons a filling slot, because no request waits for its page any more. It becomes free once the writer is
    /// done.
    pub fn give_up(&mut self, slot: HostSlot) {
        if self.slots[slot.0 as usize].state == State::Filling {
            self.forget_name(slot);
            self.relocate(slot, State::Filling, State::Abandoned);
        }
    }

    /// Keeps a slot from being used for another page.
    pub fn pin(&mut self, slot: HostSlot) {
        let entry = &mut self.slots[slot.0 as usize];
        assert!(entry.state != State::Free, "{slot:?} is free and was pinned");
        entry.pins += 1;
        if entry.pins == 1 {
            self.pinned += 1;
            if entry.state == State::Ready {
                self.unlink(slot);
            }
        }
    }

    /// Takes one pin back. A ready slot that loses its last pin becomes the most recently used.
    pub fn unpin(&mut self, slot: HostSlot) {
        let entry = &mut self.slots[slot.0 as usize];
        assert!(entry.pins > 0, "{slot:?} has no pin");
        entry.pins -= 1;
        if entry.pins > 0 {
            return;
        }
        self.pinned -= 1;
        match entry.state {
            // The pool was cleared while this slot was in use.
            State::Ready if entry.name.is_none() => {
                self.relocate(slot, State::Ready, State::Spoilt);
                self.free_if_spoilt(slot);
            }
            State::Ready => self.push(slot),
            State::Spoilt => self.free_if_spoilt(slot),
            _ => {}
        }
    }

    /// Forgets every page. Pages that are pinned or being written stay for their users, and are not found any more.
    ///
    /// Returns the slots that are being written. The caller must tell the requests that wait for them.
    pub fn clear(&mut self) -> Vec<HostSlot> {
        while self.oldest != NONE {
            self.forget_page(HostSlot(self.oldest));
        }
        let (filling, used): (Vec<HostSlot>, Vec<HostSlot>) =
            self.by_name.values().partition(|slot| self.slots[slot.0 as usize].state == State::Filling);
        filling.iter().for_each(|slot| self.give_up(*slot));
        used.into_iter().for_each(|slot| self.forget_name(slot));
        filling
    }

    fn forget_name(&mut self, slot: HostSlot) {
        if let Some(name) = self.slots[slot.0 as usize].name.take() {
            self.by_name.remove(&name);
        }
    }

    /// Frees a ready slot without a pin.
    fn forget_page(&mut self, slot: HostSlot) {
        self.unlink(slot);
        self.forget_name(slot);
        self.relocate(slot, State::Ready, State::Free);
        self.free.push(slot);
    }

    fn free_if_spoilt(&mut self, slot: HostSlot) {
        if self.slots[slot.0 as usize].pins == 0 {
            self.relocate(slot, State::Spoilt, State::Free);
            self.free.push(slot);
        }
    }

    fn relocate(&mut self, slot: HostSlot, from: State, to: State) {
        let entry = &mut self.slots[slot.0 as usize];
        assert_eq!(entry.state, from, "{slot:?} is somewhere else than its owner says");
        entry.state = to;
        *self.counts.of(from) -= 1;
        *self.counts.of(to) += 1;
    }

    fn push(&mut self, slot: HostSlot) {
        let newest = std::mem::replace(&mut self.newest, slot.0);
        let entry = &mut self.slots[slot.0 as usize];
        (entry.previous, entry.next) = (newest, NONE);
        match newest {
            NONE => self.oldest = slot.0,
            newest => self.slots[newest as usize].next = slot.0,
        }
    }

    fn unlink(&mut self, slot: HostSlot) {
        let (previous, next) = {
            let entry = &self.slots[slot.0 as usize];
            (entry.previous, entry.next)
        };
        match previous {
            NONE => self.oldest = next,
            previous => self.slots[previous as usize].next = next,
        }
        match next {
            NONE => self.newest = previous,
            next => self.slots[next as usize].previous = previous,
        }
    }

    /// Recounts everything, for tests.
    ///
    /// # Panics
    /// When a running count is wrong.
    pub fn audit(&self) {
        let mut counts = HostCounts::default();
        self.slots.iter().for_each(|entry| *counts.of(entry.state) += 1);
        assert_eq!(counts, self.counts, "slots counted one by one");
        let sum = counts.free + counts.filling + counts.ready + counts.spoilt + counts.abandoned;
        assert_eq!(sum, self.slots.len(), "every slot is somewhere");
        assert_eq!(self.free.len(), counts.free, "the free list and its count differ");
        let pinned = self.slots.iter().filter(|entry| entry.pins > 0).count();
        assert_eq!(pinned, self.pinned, "slots with a pin");
        for (name, slot) in &self.by_name {
            let entry = &self.slots[slot.0 as usize];
            assert_eq!(entry.name, Some(*name), "{slot:?} holds another page than its name says");
            assert!(matches!(entry.state, State::Filling | State::Ready), "{slot:?} is {:?}", entry.state);
        }
        let named = self.slots.iter().filter(|entry| entry.name.is_some()).count();
        assert_eq!(named, self.by_name.len(), "a page that is not found");
        let next = |slot: &u32| Some(self.slots[*slot as usize].next).filter(|next| *next != NONE);
        let order = std::iter::successors(Some(self.oldest).filter(|oldest| *oldest != NONE), next);
        let unpinned = order.inspect(|slot| {
            let entry = &self.slots[*slot as usize];
            assert!(entry.state == State::Ready && entry.pins == 0, "{slot} could be evicted: {entry:?}");
        });
        let ready = self.slots.iter().filter(|entry| entry.state == State::Ready && entry.pins == 0).count();
        assert_eq!(unpinned.count(), ready, "slots that can be evicted are in the order of eviction");
    }
}

impl HostCounts {
    fn of(&mut self, state: State) -> &mut usize {
        match state {
            State::Free => &mut self.free,
            State::Filling => &mut self.filling,
            State::Ready => &mut self.ready,
            State::Spoilt => &mut self.spoilt,
            State::Abandoned => &mut self.abandoned,
        }
    }
}
