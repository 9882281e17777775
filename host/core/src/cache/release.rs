//! The way out of the cache: pages of requests that are preempted or have ended.

use super::quarantine::{Entry, Touches};
use super::{Cache, Holding};
use crate::hierarchy::TierTag;
use crate::ids::{Instance, Room};
use crate::transfer::Tag;

/// What else an ended request leaves behind until nothing touches its pages.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    pub aux: Option<u32>,
    /// Whether our transfer threads were told of the room and have to forget it.
    pub opened: bool,
    /// Peer and message id of aborts to answer then, with their attempt.
    pub answer: Vec<(Instance, u64, u32)>,
}

/// An ended request whose pages nothing touches any more.
#[derive(Debug)]
pub(crate) struct Cleared {
    pub room: Room,
    pub leftovers: Leftovers,
}

impl Cache {
    /// Takes all pages of a preempted request, which nothing touches. What was computed is cached, as far as
    /// [`keep_preempted`](Self::keep_preempted) gave it to the tree.
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

    /// Takes all pages of an ended request. They are free at once if nothing touches them; else they go into quarantine, and
    /// [`Cleared`] comes from the event that ends the last touch.
    pub(crate) fn release(
        &mut self,
        room: Room,
        kv: Holding,
        touches: Touches,
        leftovers: Leftovers,
    ) -> Option<Cleared> {
        let Some(mut pages) = kv.held else { return Some(Cleared { room, leftovers }) };
        if let Some(spare) = kv.spare {
            pages.append(spare);
        }
        pages.append(kv.window.own);
        if touches.is_empty() {
            self.pool.release(pages);
            self.unlock(kv.lock);
            return Some(Cleared { room, leftovers });
        }
        let pages = self.pool.quarantine(pages);
        self.quarantine.insert(room, Entry { pages, lock: kv.lock, touches, leftovers });
        None
    }

    /// Whether an ended request's pages are in quarantine.
    pub(crate) fn is_quarantined(&self, room: Room) -> bool {
        self.quarantine.contains(room)
    }

    /// What an ended request in quarantine leaves behind.
    pub(crate) fn leftovers(&mut self, room: Room) -> Option<&mut Leftovers> {
        self.quarantine.get_mut(room).map(|entry| &mut entry.leftovers)
    }

    /// A peer writes nothing more here: into one room, or into any.
    pub(crate) fn writer_gone(&mut self, peer: Instance, room: Option<Room>) -> Vec<Cleared> {
        self.clear(|other, touches| {
            if room.is_none_or(|room| room == other) {
                touches.writer = touches.writer.filter(|writer| *writer != peer);
            }
        })
    }

    /// A write of ours has settled, so it reads no page any more.
    pub(crate) fn write_settled(&mut self, tag: Tag) -> Vec<Cleared> {
        self.clear(|_, touches| {
            touches.tags.remove(&tag);
        })
    }

    /// The batch has ended.
    pub(crate) fn batch_ended(&mut self) -> Vec<Cleared> {
        self.clear(|_, touches| touches.batch = false)
    }

    /// A room's pages have been verified.
    pub(crate) fn verification_ended(&mut self, room: Room) -> Vec<Cleared> {
        self.clear(|other, touches| touches.verification &= other != room)
    }

    /// Our transfer threads copy nothing into a room's pages any more.
    pub(crate) fn receiver_closed(&mut self, room: Room) -> Vec<Cleared> {
        self.clear(|other, touches| touches.receiver &= other != room)
    }

    /// A copy from host memory has ended.
    pub(super) fn load_ended(&mut self, load: TierTag) -> Vec<Cleared> {
        self.clear(|_, touches| {
            touches.loads.remove(&load);
        })
    }

    fn clear(&mut self, change: impl FnMut(Room, &mut Touches)) -> Vec<Cleared> {
        let cleared = self.quarantine.update(&mut self.pool, change);
        let unlocked = cleared.into_iter().map(|(room, entry)| {
            self.unlock(entry.lock);
            Cleared { room, leftovers: entry.leftovers }
        });
        unlocked.collect()
    }
}
