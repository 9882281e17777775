//! Digests of KV pages.
//!
//! A page's digest is XXH3-64 over its rows in the order head, layer, K/V, token, whatever the pool's layout, so that
//! two pools can be compared. The digest of several pages is XXH3-64 over their digests, little-endian, in order.

use host_core::PageId;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::KvMemory;

/// Digest of the first `tokens` tokens of a page.
#[must_use]
pub fn page(kv: &KvMemory, page: PageId, tokens: usize) -> u64 {
    let layout = kv.layout();
    let shape = layout.shape;
    let dense = layout.page == shape.page_bytes();
    if dense
        && tokens == shape.page_tokens
        && layout.order == host_core::layout::KvOrder::PageHeadLayerKvTokenDim
    {
        return xxh3_64(kv.read_page(page));
    }
    let mut hash = Xxh3::new();
    for head in 0..shape.heads {
        for layer in 0..shape.layers {
            for side in 0..2 {
                for token in 0..tokens.min(shape.page_tokens) {
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
        let shape = KvShape { pages: 2, heads: 2, layers: 3, page_tokens: 4, head_dim: 8, dtype: Dtype::F32 };
        let orders = [KvOrder::PageHeadLayerKvTokenDim, KvOrder::LayerKvPageTokenHeadDim];
        let digests = orders.map(|order| {
            let mut kv = KvMemory::new(KvLayout::new(shape, order)).unwrap();
            for row in 0..2 * 3 * 2 * 4 {
                let (head, layer, side, token) = (row / 24, row / 8 % 3, row / 4 % 2, row % 4);
                kv.write_row(PageId(1), head, layer, side, token).fill(row as u8);
            }
            [page(&kv, PageId(1), 4), page(&kv, PageId(1), 3), page(&kv, PageId(0), 4)]
        });
        assert_eq!(digests[0], digests[1]);
        assert_ne!(digests[0][0], digests[0][1]);
        assert_ne!(digests[0][0], digests[0][2]);
    }
}
