//! Which worker holds which prefix.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Names a block of tokens together with everything before it, so that equal keys mean equal prefixes: the first 8
/// bytes of the page hash chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub u64);

/// A worker's place in the index. Given out by [`PrefixIndex::add_worker`], free again after
/// [`PrefixIndex::remove_worker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerSlot(pub u16);

/// What a worker says of its cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// These blocks are in the cache now; each follows the one before.
    Stored(Vec<BlockKey>),
    /// These are no longer.
    Removed(Vec<BlockKey>),
    /// Nothing is.
    Cleared,
}

/// What became of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// It is in the index.
    Yes,
    /// It was there already; nothing changed.
    Repeat,
    /// Events are missing: nothing changed. The worker is to replay from this number, or to clear and store anew.
    Gap {
        /// The next number that the index wants.
        expected: u64,
    },
    /// Nobody is at this slot.
    Unknown,
}

/// Keys are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

pub(super) type KeyMap<V> = HashMap<BlockKey, V, BuildHasherDefault<KeyHasher>>;

/// Slots of one word of a block's holders.
const WORD: usize = 64;

/// The slots that hold a block; nearly always few, so one word for the first 64 workers and more only beyond.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Holders {
    first: u64,
    rest: Vec<u64>,
}

impl Holders {
    fn word(&mut self, slot: WorkerSlot) -> &mut u64 {
        match usize::from(slot.0) / WORD {
            0 => &mut self.first,
            word => {
                if self.rest.len() < word {
                    self.rest.resize(word, 0);
                }
                &mut self.rest[word - 1]
            }
        }
    }

    fn insert(&mut self, slot: WorkerSlot) -> bool {
        let bit = 1 << (usize::from(slot.0) % WORD);
        let word = self.word(slot);
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh
    }

    fn remove(&mut self, slot: WorkerSlot) {
        let bit = 1 << (usize::from(slot.0) % WORD);
        *self.word(slot) &= !bit;
    }

    fn is_empty(&self) -> bool {
        self.first == 0 && self.rest.iter().all(|word| *word == 0)
    }

    fn contains(&self, slot: WorkerSlot) -> bool {
        let bit = 1 << (usize::from(slot.0) % WORD);
        match usize::from(slot.0) / WORD {
            0 => self.first & bit != 0,
            word => self.rest.get(word - 1).is_some_and(|word| word & bit != 0),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Source {
    /// Number of the next event.
    next: u64,
    blocks: u64,
}

/// Prefixes of all workers.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    holders: KeyMap<Holders>,
    workers: Vec<Option<Source>>,
}

impl PrefixIndex {
    /// Takes a worker in, with an empty cache; its first event has number 1.
    pub fn add_worker(&mut self) -> WorkerSlot {
        let fresh = Some(Source { next: 1, blocks: 0 });
        let free = self.workers.iter().position(Option::is_none);
        let slot = free.unwrap_or(self.workers.len());
        match free {
            Some(slot) => self.workers[slot] = fresh,
            None => self.workers.push(fresh),
        }
        WorkerSlot(u16::try_from(slot).unwrap_or(u16::MAX))
    }

    /// Forgets a worker and all it holds.
    pub fn remove_worker(&mut self, slot: WorkerSlot) {
        self.clear(slot);
        if let Some(worker) = self.workers.get_mut(usize::from(slot.0)) {
            *worker = None;
        }
    }

    /// Slots in use.
    pub fn workers(&self) -> impl Iterator<Item = WorkerSlot> + '_ {
        let used = self.workers.iter().enumerate().filter(|(_, worker)| worker.is_some());
        used.map(|(slot, _)| WorkerSlot(u16::try_from(slot).unwrap_or(u16::MAX)))
    }

    /// Blocks that a worker holds.
    #[must_use]
    pub fn blocks(&self, slot: WorkerSlot) -> u64 {
        self.workers.get(usize::from(slot.0)).copied().flatten().map_or(0, |worker| worker.blocks)
    }

    fn clear(&mut self, slot: WorkerSlot) {
        self.holders.retain(|_, holders| {
            holders.remove(slot);
            !holders.is_empty()
        });
        if let Some(Some(worker)) = self.workers.get_mut(usize::from(slot.0)) {
            worker.blocks = 0;
        }
    }

    /// Applies event `number` of a worker. A worker that cannot replay what is missing says `Cleared` under any higher
    /// number and stores anew.
    pub fn apply(&mut self, slot: WorkerSlot, number: u64, event: &KvEvent) -> Applied {
        let Some(Some(worker)) = self.workers.get_mut(usize::from(slot.0)) else { return Applied::Unknown };
        if number < worker.next {
            return Applied::Repeat;
        }
        if number > worker.next && *event != KvEvent::Cleared {
            return Applied::Gap { expected: worker.next };
        }
        worker.next = number + 1;
        match event {
            KvEvent::Stored(keys) => {
                for key in keys {
                    worker.blocks += u64::from(self.holders.entry(*key).or_default().insert(slot));
                }
            }
            KvEvent::Removed(keys) => {
                for key in keys {
                    let Some(holders) = self.holders.get_mut(key) else { continue };
                    worker.blocks -= u64::from(holders.contains(slot));
                    holders.remove(slot);
                    if holders.is_empty() {
                        self.holders.remove(key);
                    }
                }
            }
            KvEvent::Cleared => self.clear(slot),
        }
        Applied::Yes
    }

    /// How many blocks of a prompt each worker holds from its beginning on, by slot; `0` for slots not in use.
    #[must_use]
    pub fn matches(&self, prompt: &[BlockKey]) -> Vec<u32> {
        let mut matched = vec![0; self.workers.len()];
        let mut running: Vec<usize> =
            (0..self.workers.len()).filter(|slot| self.workers[*slot].is_some()).collect();
        for key in prompt {
            let Some(holders) = self.holders.get(key) else { break };
            running.retain(|slot| holders.contains(WorkerSlot(u16::try_from(*slot).unwrap_or(u16::MAX))));
            if running.is_empty() {
                break;
            }
            for slot in &running {
                matched[*slot] += 1;
            }
        }
        matched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(range: std::ops::Range<u64>) -> Vec<BlockKey> {
        range.map(|key| BlockKey(key.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
    }

    #[test]
    fn a_match_ends_at_the_first_block_that_is_missing() {
        let mut index = PrefixIndex::default();
        let (a, b) = (index.add_worker(), index.add_worker());
        assert_eq!(index.apply(a, 1, &KvEvent::Stored(keys(0..4))), Applied::Yes);
        assert_eq!(index.apply(b, 1, &KvEvent::Stored(keys(0..8))), Applied::Yes);
        assert_eq!(index.apply(b, 2, &KvEvent::Removed(keys(2..3))), Applied::Yes);
        assert_eq!(index.matches(&keys(0..6)), [4, 2]);
        assert_eq!((index.blocks(a), index.blocks(b)), (4, 7));
        assert_eq!(index.matches(&keys(1..3)), [2, 1], "keys name whole prefixes, so this prompt is another");
    }

    #[test]
    fn events_count_once_and_gaps_are_asked_for() {
        let mut index = PrefixIndex::default();
        let a = index.add_worker();
        let event = KvEvent::Stored(keys(0..2));
        assert_eq!(index.apply(a, 2, &event), Applied::Gap { expected: 1 });
        assert_eq!(index.apply(a, 1, &event), Applied::Yes);
        assert_eq!(index.apply(a, 1, &event), Applied::Repeat);
        assert_eq!(index.blocks(a), 2);
        // What cannot be replayed is cleared and stored anew.
        assert_eq!(index.apply(a, 9, &KvEvent::Cleared), Applied::Yes);
        assert_eq!(index.matches(&keys(0..2)), [0]);
        assert_eq!(index.apply(a, 10, &event), Applied::Yes);
        assert_eq!(index.matches(&keys(0..2)), [2]);
    }

    #[test]
    fn a_worker_that_leaves_takes_its_blocks_with_it_and_frees_its_slot() {
        let mut index = PrefixIndex::default();
        let slots: Vec<WorkerSlot> = (0..130).map(|_| index.add_worker()).collect();
        for slot in &slots {
            assert_eq!(index.apply(*slot, 1, &KvEvent::Stored(keys(0..3))), Applied::Yes);
        }
        assert!(index.matches(&keys(0..3)).iter().all(|blocks| *blocks == 3));
        index.remove_worker(slots[100]);
        assert_eq!(index.matches(&keys(0..3))[100], 0);
        assert_eq!(index.apply(slots[100], 2, &KvEvent::Cleared), Applied::Unknown);
        assert_eq!(index.add_worker(), slots[100]);
        assert_eq!(index.matches(&keys(0..3))[100], 0);
        for slot in slots {
            index.remove_worker(slot);
        }
        assert!(index.holders.is_empty(), "blocks without holders are forgotten");
    }
}
