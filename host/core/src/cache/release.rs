//! Taking pages back from requests that are preempted or have ended.

use super::quarantine::{Entry, Touches};
use super::{Cache, Holding};
use crate::hierarchy::TierTag;
use crate::ids::{Instance, Room};
use crate::transfer::Tag;

impl Cache {
    /// Takes all pages of a preempted request. Nothing touches them any more. Computed pages stay cached as far as
    /// [`keep_preempted`](Self::keep_preempted) gave them to the tree.
    pub(crate) fn give_back(&mut self, kv: &mut Holding) {
        let Holding { names, held, spare, window, lock, .. } = std::mem::take(kv);
        kv.names = names;
        self.pool.release(window.own);
        for pages in held.into_iter().chain(spare) {
            self.pool.release(pages);
        }
        self.unlock(lock);
    }

    /// Stops the restore of a request that has ended. Returns the copies into its pages that are under way.
    pub(crate) fn forget(&mut self, room: Room) -> std::collections::BTreeSet<TierTag> {
        self.tiers.as_mut().map(|tiers| tiers.forget(room)).unwrap_or_default()
    }

    /// Takes all pages of an ended request. Returns true if nothing touches them: they are free. Else they go into quarantine,
    /// and the event that ends the last touch returns the room.
    #[must_use]
    pub(crate) fn release(&mut self, room: Room, kv: Holding, touches: Touches) -> bool {
        let Some(mut pages) = kv.held else { return true };
        if let Some(spare) = kv.spare {
            pages.append(spare);
        }
        pages.append(kv.window.own);
        if touches.is_empty() {
            self.pool.release(pages);
            self.unlock(kv.lock);
            return true;
        }
        let pages = self.pool.quarantine(pages);
        self.quarantine.insert(room, Entry { pages, lock: kv.lock, touches });
        false
    }

    /// Whether an ended request's pages are in quarantine.
    pub(crate) fn is_quarantined(&self, room: Room) -> bool {
        self.quarantine.contains(room)
    }

    /// Number of own writes that may still read the pages of an ended request.
    pub(crate) fn unsettled(&self, room: Room) -> usize {
        self.quarantine.writes(room)
    }

    /// The first own write that may still read the pages of an ended request.
    pub(crate) fn first_unsettled(&self, room: Room) -> Option<Tag> {
        self.quarantine.first_write(room)
    }

    /// The ended request whose pages an own write may still read.
    pub(crate) fn room_of_write(&self, tag: Tag) -> Option<Room> {
        self.quarantine.room_of_write(tag)
    }

    /// A peer writes no more into one room, or into any (`None`). Like all events below, this returns the rooms whose
    /// pages nothing touches any more. These pages are free.
    pub(crate) fn writer_gone(&mut self, peer: Instance, room: Option<Room>) -> Vec<Room> {
        self.clear(|other, touches| {
            if room.is_none_or(|room| room == other) {
                touches.writer = touches.writer.filter(|writer| *writer != peer);
            }
        })
    }

    /// A write of ours has settled, so it reads no page any more.
    pub(crate) fn write_settled(&mut self, tag: Tag) -> Vec<Room> {
        self.clear(|_, touches| {
            touches.tags.remove(&tag);
        })
    }

    /// The batch has ended.
    pub(crate) fn batch_ended(&mut self) -> Vec<Room> {
        self.clear(|_, touches| touches.batch = false)
    }

    /// A room's pages have been verified.
    pub(crate) fn verification_ended(&mut self, room: Room) -> Vec<Room> {
        self.clear(|other, touches| touches.verification &= other != room)
    }

    /// Our transfer threads copy nothing into a room's pages any more.
    pub(crate) fn receiver_closed(&mut self, room: Room) -> Vec<Room> {
        self.clear(|other, touches| touches.receiver &= other != room)
    }

    /// A copy from host memory has ended.
    pub(super) fn load_ended(&mut self, load: TierTag) -> Vec<Room> {
        self.clear(|_, touches| {
            touches.loads.remove(&load);
        })
    }

    fn clear(&mut self, change: impl FnMut(Room, &mut Touches)) -> Vec<Room> {
        let cleared = self.quarantine.update(&mut self.pool, change);
        let unlocked = cleared.into_iter().map(|(room, lock)| {
            self.unlock(lock);
            room
        });
        unlocked.collect()
    }
}
