//! The children of all nodes: one open-addressed hash table for the whole tree.
//!
//! A map per node would cost every node of a wide tree an allocation. Here a child costs 8 bytes over the load factor,
//! and a look-up touches one cache line before the node itself. The table knows hashes only. The caller compares tokens
//! to decide whether an entry is the wanted child, so a collision costs time and never gives a wrong answer.

use super::node::{NO_NODE, NodeIndex, Owner};

/// A 32-bit hash and the node it stands for.
#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: u32,
    node: NodeIndex,
}

const EMPTY: Entry = Entry { hash: 0, node: NO_NODE };

/// Finds a node by the hash of its parent and its first page. Probing is linear. Removal shifts back, so there are no
/// tombstones and an old table is as fast as a new one.
#[derive(Debug)]
pub(super) struct Children {
    entries: Vec<Entry>,
    len: usize,
    seed: u64,
}

impl Children {
    pub(super) fn new(seed: u64) -> Self {
        Self { entries: vec![EMPTY; 16], len: 0, seed }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Folded multiplication over pairs of 8 bytes, as in wyhash. Seeded, because clients choose the tokens.
    pub(super) fn hash(&self, parent: Owner, page: &[u32]) -> u32 {
        let mut state = self.seed ^ u64::from(parent.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let (quads, rest) = page.as_chunks::<4>();
        for quad in quads {
            let left = pair(quad[0], quad[1]) ^ state;
            let right = pair(quad[2], quad[3]) ^ 0xe703_7ed1_a0b4_28db;
            state = fold(left, right) ^ state.rotate_left(23);
        }
        for token in rest {
            state = fold(u64::from(*token) ^ state, 0x8ebc_6af0_9c88_c6e3);
        }
        let hash = fold(state ^ 0x5899_65cc_7537_4cc3, 0xa076_1d64_78bd_642f);
        (hash >> 32) as u32
    }

    /// The first entry with this hash that `is_it` accepts.
    pub(super) fn find(&self, hash: u32, mut is_it: impl FnMut(NodeIndex) -> bool) -> Option<NodeIndex> {
        let mask = self.entries.len() - 1;
        let mut slot = hash as usize & mask;
        loop {
            let entry = self.entries[slot];
            if entry.node == NO_NODE {
                return None;
            }
            if entry.hash == hash && is_it(entry.node) {
                return Some(entry.node);
            }
            slot = (slot + 1) & mask;
        }
    }

    pub(super) fn insert(&mut self, hash: u32, node: NodeIndex) {
        if (self.len + 1) * 4 > self.entries.len() * 3 {
            let doubled = vec![EMPTY; self.entries.len() * 2];
            for entry in std::mem::replace(&mut self.entries, doubled) {
                if entry.node != NO_NODE {
                    self.place(entry);
                }
            }
        }
        self.place(Entry { hash, node });
        self.len += 1;
    }

    /// Puts another node in the place of `old`.
    pub(super) fn replace(&mut self, hash: u32, old: NodeIndex, new: NodeIndex) {
        let slot = self.slot_of(hash, old);
        self.entries[slot].node = new;
    }

    pub(super) fn remove(&mut self, hash: u32, node: NodeIndex) {
        let mask = self.entries.len() - 1;
        let mut hole = self.slot_of(hash, node);
        let mut slot = hole;
        loop {
            slot = (slot + 1) & mask;
            let entry = self.entries[slot];
            if entry.node == NO_NODE {
                break;
            }
            // An entry may move back to the hole, unless the hole lies before the slot where the entry's search starts.
            let home = entry.hash as usize & mask;
            if slot.wrapping_sub(home) & mask >= slot.wrapping_sub(hole) & mask {
                self.entries[hole] = entry;
                hole = slot;
            }
        }
        self.entries[hole] = EMPTY;
        self.len -= 1;
    }

    fn place(&mut self, entry: Entry) {
        let mask = self.entries.len() - 1;
        let mut slot = entry.hash as usize & mask;
        while self.entries[slot].node != NO_NODE {
            slot = (slot + 1) & mask;
        }
        self.entries[slot] = entry;
    }

    fn slot_of(&self, hash: u32, node: NodeIndex) -> usize {
        let mask = self.entries.len() - 1;
        let mut slot = hash as usize & mask;
        while self.entries[slot].node != node {
            assert!(self.entries[slot].node != NO_NODE, "node {node} is not its parent's child");
            slot = (slot + 1) & mask;
        }
        slot
    }
}

fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    (product as u64) ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colliding_entries_survive_growth_and_removal_in_any_order() {
        let mut table = Children::new(7);
        // Few homes, so that runs of entries overlap and wrap around the end of the table.
        let hash_of = |node: u32| [3, 14, 15, 15, u32::MAX][node as usize % 5];
        for node in 0..200 {
            table.insert(hash_of(node), node);
        }
        for removed in (0..200).map(|step| step * 77 % 200) {
            table.remove(hash_of(removed), removed);
            assert_eq!(table.find(hash_of(removed), |node| node == removed), None);
        }
        assert_eq!(table.len(), 0);
        for node in 0..200 {
            table.insert(hash_of(node), node);
        }
        for node in (0..200).filter(|node| node % 3 == 0) {
            table.remove(hash_of(node), node);
        }
        for node in 0..200 {
            let found = table.find(hash_of(node), |other| other == node).is_some();
            assert_eq!(found, node % 3 != 0, "node {node}");
        }
    }

    #[test]
    fn parent_seed_and_every_token_change_the_hash() {
        let page: Vec<u32> = (0..19).collect();
        let table = Children::new(1);
        let hash = table.hash(Owner(5), &page);
        assert_ne!(hash, table.hash(Owner(6), &page));
        assert_ne!(hash, Children::new(2).hash(Owner(5), &page));
        for index in 0..page.len() {
            let mut other = page.clone();
            other[index] ^= 1;
            assert_ne!(hash, table.hash(Owner(5), &other), "token {index}");
        }
    }
}
