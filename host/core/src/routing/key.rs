//! Names of blocks.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

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

/// A map from keys.
pub(super) type KeyMap<V> = HashMap<BlockKey, V, BuildHasherDefault<KeyHasher>>;
