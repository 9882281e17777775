//! The name of a page outside of its worker.
//!
//! Inside the worker, tokens are compared with tokens. Outside (storage tiers, events) a page is named by a hash of
//! everything up to its end, h_i = SHA-256(h_{i-1} ‖ tokens as u32 LE), seeded by a digest of everything that makes KV
//! differ.

use sha2::{Digest, Sha256};

/// Names a page and everything before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash(pub [u8; 32]);

impl std::fmt::Debug for PageHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl PageHash {
    /// The page after `self` with these tokens.
    #[must_use]
    pub fn next(&self, tokens: &[u32]) -> PageHash {
        let mut hasher = Sha256::new();
        hasher.update(self.0);
        for token in tokens {
            hasher.update(token.to_le_bytes());
        }
        PageHash(hasher.finalize().into())
    }

    /// The name of one page of this page's window part ([`crate::window`]): SHA-256 over a label, this name and the number as
    /// u32 LE. No page and no namespace has the same name, because the data of their hashes never has this length.
    #[must_use]
    pub fn window_part(&self, part: u32) -> PageHash {
        let mut hasher = Sha256::new();
        hasher.update(b"host/window-part\0");
        hasher.update(self.0);
        hasher.update(part.to_le_bytes());
        PageHash(hasher.finalize().into())
    }
}
