//! Pages of ended rooms that something may still touch.
//!
//! An entry names everything that may touch them: a peer that was told where to write, own transfers still reading the
//! pages, the batch being computed, own threads that copy staged data. The entry is cleared when the last touch has
//! ended, by acknowledgement or by fence. No timer clears it.

use std::collections::{BTreeMap, BTreeSet};

use crate::hierarchy::TierTag;
use crate::ids::{Instance, Room};
use crate::pool::{PagePool, QuarantinedPages, Settled};
use crate::radix::PrefixLock;
use crate::transfer::Tag;

/// Everything that may still touch a room's pages.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Touches {
    /// A peer that may write them.
    pub writer: Option<Instance>,
    /// Our own transfers that read them.
    pub tags: BTreeSet<Tag>,
    /// The batch that is being computed uses them.
    pub batch: bool,
    /// A check that reads them is under way.
    pub verification: bool,
    /// Copies from host memory that write them.
    pub loads: BTreeSet<TierTag>,
    /// Our own transfer threads may copy staged data into them.
    pub receiver: bool,
}

impl Touches {
    pub(crate) fn is_empty(&self) -> bool {
        self.writer.is_none()
            && self.tags.is_empty()
            && !self.batch
            && !self.verification
            && !self.receiver
            && self.loads.is_empty()
    }
}

/// One ended room.
#[derive(Debug)]
pub(super) struct Entry {
    pub pages: QuarantinedPages,
    /// Keeps the cached pages that the room used.
    pub lock: Option<PrefixLock>,
    pub touches: Touches,
}

/// Frees pages that were evicted while they were copied, once nothing reads them any more.
pub(super) fn copied(pool: &mut PagePool, pages: QuarantinedPages) {
    pool.clear(pages, &Settled(()));
}

/// All entries.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    entries: BTreeMap<Room, Entry>,
}

impl Quarantine {
    pub(crate) fn insert(&mut self, room: Room, entry: Entry) {
        assert!(!entry.touches.is_empty(), "nothing keeps {room:?} in quarantine");
        let earlier = self.entries.insert(room, entry);
        assert!(earlier.is_none(), "{room:?} ended twice");
    }

    pub(crate) fn contains(&self, room: Room) -> bool {
        self.entries.contains_key(&room)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Pages of all entries.
    pub(crate) fn pages(&self) -> usize {
        self.entries.values().map(|entry| entry.pages.len()).sum()
    }

    /// Number of own writes that may still read the pages of a room.
    pub(crate) fn writes(&self, room: Room) -> usize {
        self.entries.get(&room).map_or(0, |entry| entry.touches.tags.len())
    }

    /// The first own write that may still read the pages of a room.
    pub(crate) fn first_write(&self, room: Room) -> Option<Tag> {
        self.entries.get(&room)?.touches.tags.first().copied()
    }

    /// The room whose pages an own write may still read.
    pub(crate) fn room_of_write(&self, tag: Tag) -> Option<Room> {
        self.entries.iter().find(|(_, entry)| entry.touches.tags.contains(&tag)).map(|(room, _)| *room)
    }

    /// Entries that keep cached pages.
    pub(crate) fn locks(&self) -> usize {
        self.entries.values().filter(|entry| entry.lock.is_some()).count()
    }

    /// Applies `change` to every entry and frees pages that nothing can touch any more. Returns the rooms, each with the
    /// lock that kept the cached pages that it used.
    pub(crate) fn update(
        &mut self,
        pool: &mut PagePool,
        mut change: impl FnMut(Room, &mut Touches),
    ) -> Vec<(Room, Option<PrefixLock>)> {
        let mut cleared = Vec::new();
        for (room, entry) in &mut self.entries {
            change(*room, &mut entry.touches);
        }
        for (room, entry) in self.entries.extract_if(.., |_, entry| entry.touches.is_empty()) {
            let Entry { pages, lock, .. } = entry;
            pool.clear(pages, &Settled(()));
            cleared.push((room, lock));
        }
        cleared
    }
}
