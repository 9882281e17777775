//! Which worker holds which prefix.

mod holders;

use super::event::{KvEvent, SnapshotPart};
use super::key::{BlockKey, KeyMap};
use holders::Holders;

/// A worker's place in the index.
///
/// Given out by [`PrefixIndex::add_worker`], free again after [`PrefixIndex::remove_worker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerSlot(pub u16);

/// The result of applying an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// The event is in the index.
    Yes,
    /// The event was in the index already, so nothing changed.
    Repeat,
    /// Events before it are missing, so nothing changed. The router must ask the worker for the events after
    /// [`PrefixIndex::resume`].
    Gap,
    /// The worker claims more blocks than its pool can hold. All its blocks were forgotten, because some of them must
    /// be wrong.
    TooMany,
    /// No worker is at this slot.
    Unknown,
}

/// How far a worker was followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Up to an event: the next event has this number.
    At { next: u64 },
    /// A snapshot is on its way: its number, and the part that comes next.
    Taking { number: u64, part: u32 },
}

#[derive(Clone, Copy, Debug)]
struct Source {
    standing: Standing,
    blocks: u64,
    /// Blocks at most: the pages of the worker's pool.
    limit: u64,
}

/// Prefixes of all workers.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    holders: KeyMap<Holders>,
    workers: Vec<Option<Source>>,
}

impl PrefixIndex {
    /// Takes a worker in, with an empty cache. Its first event has number 1. `limit` are the pages of its pool: more
    /// blocks are not accepted.
    pub fn add_worker(&mut self, limit: u64) -> WorkerSlot {
        let fresh = Some(Source { standing: Standing::At { next: 1 }, blocks: 0, limit });
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

    /// Blocks that any worker holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.holders.len()
    }

    /// Whether no worker holds anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.holders.is_empty()
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

    fn source(&mut self, slot: WorkerSlot) -> Option<&mut Source> {
        self.workers.get_mut(usize::from(slot.0))?.as_mut()
    }

    /// The number of the event after which the router must follow a worker. 0 means from the first event on. Forgets a
    /// snapshot that is not complete. `None` when no worker is at the slot.
    pub fn resume(&mut self, slot: WorkerSlot) -> Option<u64> {
        match self.source(slot)?.standing {
            Standing::At { next } => Some(next - 1),
            Standing::Taking { .. } => {
                self.forget(slot);
                Some(0)
            }
        }
    }

    /// Forgets all that is known of a worker, as if it had just been added.
    pub fn forget(&mut self, slot: WorkerSlot) {
        self.clear(slot);
        if let Some(source) = self.source(slot) {
            source.standing = Standing::At { next: 1 };
        }
    }

    /// Applies event `number` of a worker.
    pub fn apply(&mut self, slot: WorkerSlot, number: u64, event: &KvEvent) -> Applied {
        let Some(source) = self.source(slot) else { return Applied::Unknown };
        match source.standing {
            Standing::At { next } if number < next => return Applied::Repeat,
            Standing::At { next } if number > next => return Applied::Gap,
            Standing::At { .. } => source.standing = Standing::At { next: number.saturating_add(1) },
            // The event is contained in the snapshot, or the worker will send it again after the snapshot.
            Standing::Taking { .. } => return Applied::Repeat,
        }
        match event {
            KvEvent::Stored(keys) => return self.store(slot, keys),
            KvEvent::Removed(keys) => self.remove(slot, keys),
            KvEvent::Cleared => self.clear(slot),
        }
        Applied::Yes
    }

    /// Takes a part of a snapshot. The first part replaces everything that was known of the worker. Events count again after
    /// the last part.
    pub fn take(&mut self, slot: WorkerSlot, part: &SnapshotPart) -> Applied {
        let Some(source) = self.source(slot) else { return Applied::Unknown };
        match source.standing {
            // Later events are known already.
            Standing::At { next } if part.number < next => return Applied::Repeat,
            Standing::At { .. } if part.part > 0 => return Applied::Gap,
            Standing::Taking { number, part: next } if (part.number, part.part) < (number, next) => {
                return Applied::Repeat;
            }
            Standing::Taking { number, part: next }
                if (part.number, part.part) != (number, next) && part.part > 0 =>
            {
                return Applied::Gap;
            }
            Standing::At { .. } | Standing::Taking { .. } => {}
        }
        if part.part == 0 {
            self.clear(slot);
        }
        let stored = self.store(slot, &part.keys);
        if stored == Applied::Yes
            && let Some(source) = self.source(slot)
        {
            source.standing = match part.last {
                true => Standing::At { next: part.number.saturating_add(1) },
                false => Standing::Taking { number: part.number, part: part.part.saturating_add(1) },
            };
        }
        stored
    }

    fn store(&mut self, slot: WorkerSlot, keys: &[BlockKey]) -> Applied {
        let Some(Some(source)) = self.workers.get_mut(usize::from(slot.0)) else { return Applied::Unknown };
        for key in keys {
            source.blocks += u64::from(self.holders.entry(*key).or_default().insert(slot));
        }
        if source.blocks > source.limit {
            self.forget(slot);
            return Applied::TooMany;
        }
        Applied::Yes
    }

    fn remove(&mut self, slot: WorkerSlot, keys: &[BlockKey]) {
        let Some(Some(source)) = self.workers.get_mut(usize::from(slot.0)) else { return };
        for key in keys {
            let Some(holders) = self.holders.get_mut(key) else { continue };
            source.blocks -= u64::from(holders.contains(slot));
            holders.remove(slot);
            if holders.is_empty() {
                self.holders.remove(key);
            }
        }
    }

    /// How many blocks of a prompt each worker holds from the prompt's beginning on, by slot. `0` for slots not in use.
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

    fn part(number: u64, part: u32, last: bool, range: std::ops::Range<u64>) -> SnapshotPart {
        SnapshotPart { number, part, last, keys: keys(range) }
    }

    #[test]
    fn a_match_ends_at_the_first_block_that_is_missing() {
        let mut index = PrefixIndex::default();
        let (a, b) = (index.add_worker(10), index.add_worker(10));
        assert_eq!(index.apply(a, 1, &KvEvent::Stored(keys(0..4))), Applied::Yes);
        assert_eq!(index.apply(b, 1, &KvEvent::Stored(keys(0..8))), Applied::Yes);
        assert_eq!(index.apply(b, 2, &KvEvent::Removed(keys(2..3))), Applied::Yes);
        assert_eq!(index.matches(&keys(0..6)), [4, 2]);
        assert_eq!((index.blocks(a), index.blocks(b)), (4, 7));
        assert_eq!(index.matches(&keys(1..3)), [2, 1], "keys name whole prefixes, so this prompt is another");
    }

    #[test]
    fn events_count_once_and_what_is_missing_is_asked_for() {
        let mut index = PrefixIndex::default();
        let a = index.add_worker(10);
        let event = KvEvent::Stored(keys(0..2));
        assert_eq!(index.apply(a, 2, &event), Applied::Gap);
        assert_eq!(
            index.apply(a, 2, &KvEvent::Cleared),
            Applied::Gap,
            "something before it may not be cleared"
        );
        assert_eq!(index.apply(a, 1, &event), Applied::Yes);
        assert_eq!(index.apply(a, 1, &event), Applied::Repeat);
        assert_eq!((index.blocks(a), index.resume(a)), (2, Some(1)));
        assert_eq!(index.apply(a, 2, &KvEvent::Cleared), Applied::Yes);
        assert_eq!(index.matches(&keys(0..2)), [0]);
    }

    #[test]
    fn a_snapshot_counts_from_its_first_part_and_events_from_its_last() {
        let mut index = PrefixIndex::default();
        let a = index.add_worker(10);
        assert_eq!(index.apply(a, 1, &KvEvent::Stored(keys(0..5))), Applied::Yes);
        assert_eq!(index.take(a, &part(9, 1, true, 6..7)), Applied::Gap, "not from its middle");
        assert_eq!(index.take(a, &part(9, 0, false, 0..2)), Applied::Yes);
        assert_eq!(index.matches(&keys(0..5)), [2], "what was known is void");
        assert_eq!(index.apply(a, 2, &KvEvent::Stored(keys(2..3))), Applied::Repeat, "it is in the snapshot");
        assert_eq!(index.take(a, &part(9, 2, true, 2..3)), Applied::Gap);
        assert_eq!(index.take(a, &part(9, 1, true, 2..3)), Applied::Yes);
        assert_eq!(index.take(a, &part(9, 0, false, 0..2)), Applied::Repeat);
        assert_eq!((index.matches(&keys(0..5)), index.resume(a)), (vec![3], Some(9)));
        assert_eq!(index.take(a, &part(12, 0, false, 0..1)), Applied::Yes);
        assert_eq!(index.resume(a), Some(0), "half a snapshot is none");
        assert_eq!((index.blocks(a), index.len()), (0, 0));
    }

    #[test]
    fn a_worker_that_claims_more_than_its_pool_is_not_accepted() {
        let mut index = PrefixIndex::default();
        let (a, b) = (index.add_worker(3), index.add_worker(3));
        assert_eq!(index.apply(b, 1, &KvEvent::Stored(keys(0..3))), Applied::Yes);
        assert_eq!(index.apply(a, 1, &KvEvent::Stored(keys(0..3))), Applied::Yes);
        assert_eq!(index.apply(a, 2, &KvEvent::Stored(keys(3..4))), Applied::TooMany);
        assert_eq!((index.matches(&keys(0..4)), index.resume(a)), (vec![0, 3], Some(0)));
    }

    #[test]
    fn a_worker_that_leaves_takes_its_blocks_with_it_and_frees_its_slot() {
        let mut index = PrefixIndex::default();
        let slots: Vec<WorkerSlot> = (0..130).map(|_| index.add_worker(3)).collect();
        for slot in &slots {
            assert_eq!(index.apply(*slot, 1, &KvEvent::Stored(keys(0..3))), Applied::Yes);
        }
        assert!(index.matches(&keys(0..3)).iter().all(|blocks| *blocks == 3));
        index.remove_worker(slots[100]);
        assert_eq!(index.matches(&keys(0..3))[100], 0);
        assert_eq!(index.apply(slots[100], 2, &KvEvent::Cleared), Applied::Unknown);
        assert_eq!(index.add_worker(3), slots[100]);
        assert_eq!(index.matches(&keys(0..3))[100], 0);
        for slot in slots {
            index.remove_worker(slot);
        }
        assert!(index.is_empty(), "blocks without holders are forgotten");
    }
}
