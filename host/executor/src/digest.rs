//! Digests of KV. A digest is a sum of terms, one per head of a layer of a page. So the digests of ranks, layers and parts of a
//! transfer can be added in any order, for any division of the work.
//!
//! A block is one head of one layer of one page. Its digest is XXH3-64 over its rows in the order K/V, token, independent of the
//! pool's layout. [`term`] mixes it with its place. The digest of several blocks is the wrapping sum of their terms. The digest
//! of no blocks is 0. Heads are counted over the whole model, so that equal KV has equal digests for any number of ranks that
//! share it.
//!
//! [`parts`] digests pages of any pool. The other functions are for pools in host memory, where an executor may read single rows.

use std::ops::Range;

use host_core::PageId;
use host_kernels::xxh3::xxh3;

use super::KvMemory;
use super::memory::PageCopyError;

mod device;

/// The place of a block in the digested KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPlace {
    /// The page: its index in the sequence or the transfer, not its id.
    pub page: usize,
    /// The layer.
    pub layer: usize,
    /// The KV head, counted over the whole model.
    pub head: usize,
}

/// Part of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagePart {
    /// The page.
    pub page: PageId,
    /// The page's index in the sequence or the transfer, as in [`BlockPlace::page`].
    pub index: usize,
    /// Which layers.
    pub layers: Range<usize>,
    /// Which KV heads of the model. The pool must hold them ([`KvMemory::heads`]).
    pub heads: Range<usize>,
    /// Number of tokens, from the page's first. A number above the page's tokens means all of them.
    pub tokens: usize,
}

/// The term that a block adds to a digest.
///
/// The same block at two places has unrelated terms, so that a digest shows blocks that were swapped.
#[must_use]
pub fn term(place: BlockPlace, block: u64) -> u64 {
    let mut bytes = [0; 32];
    for (part, value) in bytes.as_chunks_mut::<8>().0.iter_mut().zip([
        place.page as u64,
        place.layer as u64,
        place.head as u64,
        block,
    ]) {
        *part = value.to_le_bytes();
    }
    xxh3(&bytes, 0)
}

/// Digest of the first `tokens` tokens of one block. The pool must hold `head`.
///
/// # Panics
/// When the pool has no such block.
#[must_use]
pub fn block(kv: &KvMemory, page: PageId, head: usize, layer: usize, tokens: usize) -> u64 {
    rows(kv, page, head, layer, 0..tokens.min(kv.layout().shape.page_tokens))
}

/// Digest of the rows of some tokens of one block, in the order K/V, token.
///
/// # Panics
/// When the pool has no such rows.
#[must_use]
pub fn rows(kv: &KvMemory, page: PageId, head: usize, layer: usize, tokens: Range<usize>) -> u64 {
    let page_tokens = kv.layout().shape.page_tokens;
    let held = kv.heads();
    assert!(held.contains(&head), "head {head} of a pool with the heads {held:?}");
    let row = head - held.start;
    if let Some(bytes) = kv.read_head(page, row, layer).filter(|_| tokens == (0..page_tokens)) {
        return xxh3(bytes, 0);
    }
    // Rows that are copied into one buffer are digested twice as fast as single rows.
    let mut bytes = Vec::with_capacity(kv.layout().shape.block_bytes());
    for side in 0..2 {
        for token in tokens.clone() {
            bytes.extend_from_slice(kv.read_row(page, row, layer, side, token));
        }
    }
    xxh3(&bytes, 0)
}

/// Digests of parts of pages, in order, of a pool in any memory.
///
/// # Errors
/// When a device fails.
///
/// # Panics
/// When a pool in host memory does not hold all of a part.
pub fn parts(kv: &KvMemory, parts: &[PagePart]) -> Result<Vec<u64>, PageCopyError> {
    match kv.device_pool() {
        Some(pool) => device::parts(kv, pool, parts),
        None => Ok(parts.iter().map(|of| part(kv, of)).collect()),
    }
}

/// Digest of part of a page of a pool in host memory.
///
/// # Panics
/// When the pool does not hold all of the part.
#[must_use]
pub fn part(kv: &KvMemory, part: &PagePart) -> u64 {
    let PagePart { page, index, layers, heads, tokens } = part;
    let blocks = layers.clone().flat_map(|layer| heads.clone().map(move |head| (layer, head)));
    sum(blocks.map(|(layer, head)| {
        term(BlockPlace { page: *index, layer, head }, block(kv, *page, head, layer, *tokens))
    }))
}

/// Digest of the blocks of several digests together. No block may be in two of them.
#[must_use]
pub fn sum(digests: impl IntoIterator<Item = u64>) -> u64 {
    digests.into_iter().fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_core::layout::{Dtype, KvLayout, KvOrder, KvShape};

    const SHAPE: KvShape = KvShape {
        pages: 2,
        heads: 4,
        layers: 3,
        page_tokens: 4,
        head_dim: 8,
        value_dim: 8,
        dtype: Dtype::F32,
    };

    /// A pool that holds these heads of a model. Its content depends on the place of a row alone.
    fn pool(order: KvOrder, heads: Range<usize>) -> KvMemory {
        let layout = KvLayout::new(KvShape { heads: heads.len(), ..SHAPE }, order);
        let mut kv = KvMemory::for_heads(layout, heads.start).unwrap();
        for (row, head) in heads.enumerate() {
            for place in 0..2 * 3 * 2 * 4 {
                let (page, layer, side, token) = (place / 24, place / 8 % 3, place / 4 % 2, place % 4);
                kv.write_row(PageId(page), row, layer as usize, side as usize, token as usize)
                    .fill((place as usize * 4 + head) as u8);
            }
        }
        kv
    }

    fn whole(kv: &KvMemory, page: u32, index: usize, tokens: usize) -> u64 {
        part(kv, &PagePart { page: PageId(page), index, layers: 0..3, heads: kv.heads(), tokens })
    }

    #[test]
    fn a_digest_depends_neither_on_the_layout_nor_on_the_ranks_that_hold_the_heads() {
        let one = pool(KvOrder::PageHeadLayerKvTokenDim, 0..4);
        for tokens in [4, 3, 9] {
            let expected = whole(&one, 1, 7, tokens);
            for order in KvOrder::ALL {
                for cuts in [vec![0, 4], vec![0, 1, 4], vec![0, 1, 2, 3, 4]] {
                    let ranks = cuts.windows(2).map(|cut| whole(&pool(order, cut[0]..cut[1]), 1, 7, tokens));
                    assert_eq!(sum(ranks), expected, "{order} {cuts:?} {tokens}");
                }
            }
        }
        assert_ne!(whole(&one, 1, 7, 3), whole(&one, 1, 7, 4));
        assert_ne!(whole(&one, 0, 7, 4), whole(&one, 1, 7, 4));
        assert_eq!(whole(&one, 1, 7, 9), whole(&one, 1, 7, 4));
    }

    #[test]
    fn blocks_that_changed_places_show() {
        let place = BlockPlace { page: 1, layer: 2, head: 3 };
        let others = [
            BlockPlace { page: 2, ..place },
            BlockPlace { layer: 1, ..place },
            BlockPlace { head: 0, ..place },
            BlockPlace { page: 2, layer: 1, ..place },
        ];
        for other in others {
            assert_ne!(term(place, 5), term(other, 5));
            assert_ne!(sum([term(place, 5), term(other, 6)]), sum([term(place, 6), term(other, 5)]));
        }
        assert_ne!(term(place, 5), term(place, 6));
        assert_ne!(term(BlockPlace { page: 0, layer: 0, head: 0 }, 0), 0, "an empty block counts");
    }

    #[test]
    #[should_panic(expected = "head 1 of a pool with the heads 2..4")]
    fn a_head_that_the_pool_does_not_hold_is_refused() {
        let kv = pool(KvOrder::PageHeadLayerKvTokenDim, 2..4);
        let _digest = block(&kv, PageId(0), 1, 0, 4);
    }
}
