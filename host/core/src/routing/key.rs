//! Names of blocks.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use crate::radix::PageHash;

/// Names a block of tokens together with everything before it, so that equal keys mean equal prefixes: the first 8
/// bytes of the page hash chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub u64);

impl BlockKey {
    /// The key of the page with this name.
    #[must_use]
    pub fn of(name: &PageHash) -> Self {
        let [a, b, c, d, e, f, g, h, ..] = name.0;
        Self(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
    }

    /// The keys of a prompt's whole pages, in order, in a namespace whose hash chain starts at `seed`.
    #[must_use]
    pub fn chain(seed: &PageHash, tokens: &[u32], page_tokens: usize) -> Vec<Self> {
        let mut name = *seed;
        let pages = tokens.chunks_exact(page_tokens.max(1));
        pages
            .map(|page| {
                name = name.next(page);
                Self::of(&name)
            })
            .collect()
    }
}

/// Mixes keys, which are hashes already, with two random numbers of this process. Workers choose the keys that they report,
/// and could choose many that collide under a known hash. The mix is one multiplication, because routes are chosen under a
/// lock. The standard library's hash takes three and a half times as long for a prompt (`benches/router_choice.rs`).
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyState {
    mask: u64,
    factor: u64,
}

impl Default for KeyState {
    fn default() -> Self {
        let random = RandomState::new();
        Self { mask: random.hash_one(0), factor: random.hash_one(1) | 1 }
    }
}

impl BuildHasher for KeyState {
    type Hasher = KeyHasher;

    fn build_hasher(&self) -> KeyHasher {
        KeyHasher { state: *self, hash: 0 }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct KeyHasher {
    state: KeyState,
    hash: u64,
}

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.hash
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.hash ^ u64::from(*byte)));
    }
    fn write_u64(&mut self, key: u64) {
        let product = u128::from(key ^ self.state.mask) * u128::from(self.state.factor);
        // Each half fits into 64 bits.
        self.hash = (product >> 64) as u64 ^ (product as u64);
    }
}

/// A map from keys.
pub(super) type KeyMap<V> = HashMap<BlockKey, V, KeyState>;

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> impl Iterator<Item = BlockKey> {
        (0..4096).map(|key| BlockKey(key << 48))
    }

    #[test]
    fn keys_that_agree_in_their_lowest_bits_are_spread_under_most_numbers() {
        // One state in 25 spreads these keys over fewer than 1000 of 4096 places, the median over 3000: so the test checks
        // the mean.
        let mut number = 1_u64;
        let mut next = || {
            number = number.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            number ^ (number >> 32)
        };
        let states = (0..64).map(|_| KeyState { mask: next(), factor: next() | 1 });
        let places = states.map(|state| {
            let mut places: Vec<u64> = keys().map(|key| state.hash_one(key) % 4096).collect();
            places.sort_unstable();
            places.dedup();
            places.len()
        });
        let mean = places.sum::<usize>() / 64;
        // Random keys would take 2589 places.
        assert!(mean > 2000, "{mean}");
    }

    #[test]
    fn no_two_maps_hash_alike() {
        let (one, other) = (KeyState::default(), KeyState::default());
        assert!(keys().filter(|key| one.hash_one(key) == other.hash_one(key)).count() < 4);
    }
}
