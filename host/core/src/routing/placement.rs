//! Work given out, and the choice of a worker.

use std::collections::BTreeMap;

use super::index::{BlockKey, KeyMap, PrefixIndex, WorkerSlot};
use crate::ids::Room;

/// How the choice weighs its two sides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Tokens of waiting work that one token computed again is worth. At 1 the choice is the worker that is expected to
    /// answer first; above, it keeps prefixes together at the price of some waiting, because computing again costs
    /// everybody who comes after.
    pub recompute: f64,
}

impl Default for Weights {
    /// Measured by the replay benchmark: reuse rises up to here and hardly beyond, waiting rises slowly.
    fn default() -> Self {
        Self { recompute: 2.0 }
    }
}

/// A request's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The worker.
    pub worker: WorkerSlot,
    /// Blocks of the prompt that it holds, or will hold when it comes to this request.
    pub blocks: u32,
}

#[derive(Debug)]
struct Given {
    worker: WorkerSlot,
    /// Tokens that it was expected to compute.
    tokens: u64,
    /// Blocks that the worker will hold when it has computed them.
    coming: Vec<BlockKey>,
}

/// The account of what was given to whom and has not ended.
#[derive(Debug, Default)]
pub struct Placement {
    weights: Weights,
    given: BTreeMap<Room, Given>,
    /// Tokens waiting per slot.
    waiting: Vec<u64>,
    /// Blocks that are being computed, per slot, with how many requests bring each.
    coming: Vec<KeyMap<u32>>,
}

impl Placement {
    /// Nothing given out.
    #[must_use]
    pub fn new(weights: Weights) -> Self {
        Self { weights, ..Self::default() }
    }

    /// Tokens that a worker still has to compute.
    #[must_use]
    pub fn waiting(&self, slot: WorkerSlot) -> u64 {
        self.waiting.get(usize::from(slot.0)).copied().unwrap_or(0)
    }

    /// Chooses among `candidates` for a prompt of `tokens` tokens, of which whole blocks of `block_tokens` have keys, and
    /// writes the work to the worker's account. `None` without candidates.
    ///
    /// Equal costs go to the worker with less cached, so that caches fill evenly, then to the lower slot.
    pub fn place(
        &mut self,
        room: Room,
        prompt: &[BlockKey],
        (tokens, block_tokens): (u64, u64),
        index: &PrefixIndex,
        candidates: &[WorkerSlot],
    ) -> Option<Placed> {
        let cached = index.matches(prompt);
        let cost = |slot: &WorkerSlot| {
            let have = cached.get(usize::from(slot.0)).copied().unwrap_or(0);
            let blocks = self.with_coming(*slot, prompt, have);
            let missing = tokens.saturating_sub(u64::from(blocks) * block_tokens);
            (self.waiting(*slot) as f64 + self.weights.recompute * missing as f64, blocks, missing)
        };
        let best = candidates.iter().map(|slot| (*slot, cost(slot))).min_by(|(one, a), (other, b)| {
            let fullness = || index.blocks(*one).cmp(&index.blocks(*other));
            a.0.total_cmp(&b.0).then_with(fullness).then_with(|| one.cmp(other))
        });
        let (worker, (_, blocks, missing)) = best?;
        self.end(room);
        let slot = usize::from(worker.0);
        if self.waiting.len() <= slot {
            self.waiting.resize(slot + 1, 0);
            self.coming.resize_with(slot + 1, KeyMap::default);
        }
        let coming = prompt.get(blocks as usize..).unwrap_or_default().to_vec();
        self.waiting[slot] += missing;
        for key in &coming {
            *self.coming[slot].entry(*key).or_default() += 1;
        }
        self.given.insert(room, Given { worker, tokens: missing, coming });
        Some(Placed { worker, blocks })
    }

    /// Blocks that a worker has, or will have from earlier requests by the time it comes to this one.
    fn with_coming(&self, slot: WorkerSlot, prompt: &[BlockKey], have: u32) -> u32 {
        let Some(coming) = self.coming.get(usize::from(slot.0)).filter(|coming| !coming.is_empty()) else {
            return have;
        };
        let more = prompt.iter().skip(have as usize).take_while(|key| coming.contains_key(*key)).count();
        have + u32::try_from(more).unwrap_or(u32::MAX)
    }

    /// The prompt was computed, or the request ended before; its work is off the account. Harmless when repeated.
    pub fn end(&mut self, room: Room) {
        let Some(given) = self.given.remove(&room) else { return };
        let slot = usize::from(given.worker.0);
        self.waiting[slot] -= given.tokens;
        for key in given.coming {
            if let Some(count) = self.coming[slot].get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    self.coming[slot].remove(&key);
                }
            }
        }
    }

    /// Requests on the account.
    #[must_use]
    pub fn given(&self) -> usize {
        self.given.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::KvEvent;

    fn keys(range: std::ops::Range<u64>) -> Vec<BlockKey> {
        range.map(BlockKey).collect()
    }

    fn two_workers() -> (PrefixIndex, Vec<WorkerSlot>) {
        let mut index = PrefixIndex::default();
        let slots = vec![index.add_worker(1000), index.add_worker(1000)];
        (index, slots)
    }

    #[test]
    fn a_cached_prefix_draws_and_waiting_work_repels() {
        let (mut index, slots) = two_workers();
        index.apply(slots[1], 1, &KvEvent::Stored(keys(0..10)));
        let mut placement = Placement::new(Weights { recompute: 1.0 });
        let placed = placement.place(Room(1), &keys(0..12), (1200, 100), &index, &slots).unwrap();
        assert_eq!(placed, Placed { worker: slots[1], blocks: 10 });
        assert_eq!(placement.waiting(slots[1]), 200);
        // Enough waiting work outweighs the cache.
        for room in 2..14 {
            placement.place(Room(room), &keys(100 * room..100 * room + 1), (100, 100), &index, &slots[1..]);
        }
        let other = placement.place(Room(20), &keys(0..12), (1200, 100), &index, &slots).unwrap();
        assert_eq!(other.worker, slots[0]);
    }

    #[test]
    fn requests_with_the_same_new_prefix_meet_on_one_worker() {
        let (index, slots) = two_workers();
        let mut placement = Placement::new(Weights::default());
        let first = placement.place(Room(1), &keys(0..10), (1000, 100), &index, &slots).unwrap();
        let second = placement.place(Room(2), &keys(0..10), (1000, 100), &index, &slots).unwrap();
        assert_eq!((first.blocks, second), (0, Placed { worker: first.worker, blocks: 10 }));
        // Somebody else goes elsewhere.
        let third = placement.place(Room(3), &keys(50..60), (1000, 100), &index, &slots).unwrap();
        assert_ne!(third.worker, first.worker);
    }

    #[test]
    fn an_ended_request_leaves_nothing_on_the_account() {
        let (index, slots) = two_workers();
        let mut placement = Placement::new(Weights::default());
        for room in 0..50 {
            placement.place(Room(room), &keys(0..room % 7), (room % 7 * 100 + 5, 100), &index, &slots);
        }
        for room in 0..50 {
            placement.end(Room(room));
            placement.end(Room(room));
        }
        assert_eq!(placement.given(), 0);
        assert!(slots.iter().all(|slot| placement.waiting(*slot) == 0));
        assert!(placement.coming.iter().all(KeyMap::is_empty));
    }

    #[test]
    fn without_workers_there_is_no_place() {
        let index = PrefixIndex::default();
        assert_eq!(Placement::default().place(Room(1), &keys(0..1), (100, 100), &index, &[]), None);
    }
}
