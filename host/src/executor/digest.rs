//! Digests of KV pages.
//!
//! The digest of a layer of a page is XXH3-64 over its rows in the order head, K/V, token, whatever the pool's layout, so
//! that two pools can be compared. A page's digest is XXH3-64 over those of its layers, little-endian, in order, and
//! that of several pages over theirs; so a page can be digested as its layers become final.

use host_core::PageId;
use xxhash_rust::xxh3::Xxh3;

use super::KvMemory;

/// Digest of the first `tokens` tokens of a page.
#[must_use]
pub fn page(kv: &KvMemory, page: PageId, tokens: usize) -> u64 {
    let mut hash = Xxh3::new();
    for index in 0..kv.layout().shape.layers {
        hash.update(&layer(kv, page, index, tokens).to_le_bytes());
    }
    hash.digest()
}

/// Digest of the first `tokens` tokens of one layer of a page.
#[must_use]
pub fn layer(kv: &KvMemory, page: PageId, layer: usize, tokens: usize) -> u64 {
    let shape = kv.layout().shape;
    let mut hash = Xxh3::new();
    for head in 0..shape.heads {
        match kv.read_head(page, head, layer).filter(|_| tokens >= shape.page_tokens) {
            Some(block) => hash.update(block),
            None => {
                for (side, token) in
                    (0..2).flat_map(|side| (0..tokens.min(shape.page_tokens)).map(move |token| (side, token)))
                {
                    hash.update(kv.read_row(page, head, layer, side, token));
                }
            }
        }
    }
    hash.digest()
}

/// Digest over digests.
#[must_use]
pub fn all(pages: &[u64]) -> u64 {
    let mut hash = Xxh3::new();
    for page in pages {
        hash.update(&page.to_le_bytes());
    }
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_core::layout::{Dtype, KvLayout, KvOrder, KvShape};

    #[test]
    fn a_digest_does_not_depend_on_the_layout() {
        let shape = KvShape {
            pages: 2,
            heads: 2,
            layers: 3,
            page_tokens: 4,
            head_dim: 8,
            value_dim: 8,
            dtype: Dtype::F32,
        };
        let digests = KvOrder::ALL.map(|order| {
            let mut kv = KvMemory::new(KvLayout::new(shape, order)).unwrap();
            for row in 0..2 * 3 * 2 * 4 {
                let (head, layer, side, token) = (row / 24, row / 8 % 3, row / 4 % 2, row % 4);
                kv.write_row(PageId(1), head, layer, side, token).fill(row as u8);
            }
            [page(&kv, PageId(1), 4), page(&kv, PageId(1), 3), page(&kv, PageId(0), 4)]
        });
        assert_eq!(digests[0], digests[1]);
        assert_eq!(digests[0], digests[2]);
        assert_ne!(digests[0][0], digests[0][1]);
        assert_ne!(digests[0][0], digests[0][2]);
    }
}
