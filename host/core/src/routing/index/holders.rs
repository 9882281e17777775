//! Which workers hold a block.

use super::WorkerSlot;

/// Slots of one word of a block's holders.
const WORD: usize = 64;

/// The slots that hold a block. There are mostly few workers, so one word holds the first 64 slots, and further words exist
/// only for higher slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Holders {
    first: u64,
    rest: Box<[u64]>,
}

impl Holders {
    fn word(&mut self, slot: WorkerSlot) -> &mut u64 {
        match usize::from(slot.0) / WORD {
            0 => &mut self.first,
            word => {
                if self.rest.len() < word {
                    let mut longer = std::mem::take(&mut self.rest).into_vec();
                    longer.resize(word, 0);
                    self.rest = longer.into_boxed_slice();
                }
                &mut self.rest[word - 1]
            }
        }
    }

    /// Adds a slot. Returns whether it was not there before.
    pub(super) fn insert(&mut self, slot: WorkerSlot) -> bool {
        let bit = 1 << (usize::from(slot.0) % WORD);
        let word = self.word(slot);
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh
    }

    pub(super) fn remove(&mut self, slot: WorkerSlot) {
        let bit = 1 << (usize::from(slot.0) % WORD);
        *self.word(slot) &= !bit;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first == 0 && self.rest.iter().all(|word| *word == 0)
    }

    pub(super) fn contains(&self, slot: WorkerSlot) -> bool {
        let bit = 1 << (usize::from(slot.0) % WORD);
        match usize::from(slot.0) / WORD {
            0 => self.first & bit != 0,
            word => self.rest.get(word - 1).is_some_and(|word| word & bit != 0),
        }
    }
}
