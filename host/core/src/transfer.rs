//! From pages to writes: which bytes go where, in the fewest pieces.

use crate::ids::PageId;
use crate::layout::KvLayout;

/// Our own name for one submission to a transfer backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u64);

/// One contiguous copy between two pools, in bytes from their starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the sender's pool.
    pub source: usize,
    /// Offset in the receiver's pool.
    pub target: usize,
    /// Bytes.
    pub length: usize,
}

/// Longest piece: a write's length is 32 bits wide.
pub const LONGEST_PIECE: usize = 1 << 30;

/// Why two pools cannot exchange pages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The pools differ in more than order and page count.
    #[error(
        "pages of {source_shape} do not fit pages of {target_shape}: start both workers with the same model and page size"
    )]
    Shape {
        /// The sender's page.
        source_shape: String,
        /// The receiver's page.
        target_shape: String,
    },
    /// The lists name different numbers of pages.
    #[error("{sent} pages sent for {expected} expected")]
    Count {
        /// Pages of the sender.
        sent: usize,
        /// Pages of the receiver.
        expected: usize,
    },
    /// A page lies outside its pool.
    #[error("page {0} lies outside a pool of {1} pages")]
    Outside(u32, usize),
}

/// Plans the copy of `source_pages` into `target_pages`, pair by pair.
///
/// Runs that are contiguous on both sides become one piece. In the default layout a page is one run, so neighbouring
/// pages merge; where the two orders differ, a piece is the longest run that is contiguous in both.
///
/// # Errors
/// When the pools' pages differ in shape, the lists in length, or a page lies outside its pool.
pub fn plan(
    source: &KvLayout,
    target: &KvLayout,
    source_pages: &[PageId],
    target_pages: &[PageId],
) -> Result<Vec<Piece>, PlanError> {
    let page_of = |layout: &KvLayout| {
        let shape = layout.shape;
        (shape.heads, shape.layers, shape.page_tokens, shape.head_dim, shape.dtype)
    };
    if page_of(source) != page_of(target) {
        let describe = |layout: &KvLayout| {
            let (heads, layers, tokens, dim, dtype) = page_of(layout);
            format!("{heads} heads x {layers} layers x {tokens} tokens x {dim} {dtype}")
        };
        return Err(PlanError::Shape { source_shape: describe(source), target_shape: describe(target) });
    }
    if source_pages.len() != target_pages.len() {
        return Err(PlanError::Count { sent: source_pages.len(), expected: target_pages.len() });
    }
    let mut pieces = Vec::new();
    for (from, to) in source_pages.iter().zip(target_pages) {
        for (page, layout) in [(from, source), (to, target)] {
            if page.0 as usize >= layout.shape.pages {
                return Err(PlanError::Outside(page.0, layout.shape.pages));
            }
        }
        for_each_row_run(source, target, |source_offset, target_offset, length| {
            let piece = Piece {
                source: from.0 as usize * source.page + source_offset,
                target: to.0 as usize * target.page + target_offset,
                length,
            };
            match pieces.last_mut() {
                Some(last) if adjoins(last, &piece) => last.length += piece.length,
                _ => pieces.push(piece),
            }
        });
    }
    Ok(pieces)
}

fn adjoins(last: &Piece, next: &Piece) -> bool {
    last.source + last.length == next.source
        && last.target + last.length == next.target
        && last.length + next.length <= LONGEST_PIECE
}

/// Visits one page's rows, as (offset in source page, offset in target page, bytes), in the source's memory order;
/// a page that is one run on both sides is visited once.
fn for_each_row_run(source: &KvLayout, target: &KvLayout, mut visit: impl FnMut(usize, usize, usize)) {
    let shape = source.shape;
    if source.page == shape.page_bytes() && source.order == target.order {
        return visit(0, 0, shape.page_bytes());
    }
    let row = shape.head_dim * shape.dtype.bytes();
    let mut rows = Vec::with_capacity(shape.page_bytes() / row);
    for head in 0..shape.heads {
        for layer in 0..shape.layers {
            for kv in 0..2 {
                for token in 0..shape.page_tokens {
                    rows.push((source.row(0, head, layer, kv, token), target.row(0, head, layer, kv, token)));
                }
            }
        }
    }
    rows.sort_unstable();
    for (from, to) in rows {
        visit(from, to, row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Dtype, KvOrder, KvShape};

    fn layout(order: KvOrder, pages: usize) -> KvLayout {
        let shape = KvShape { pages, heads: 2, layers: 3, page_tokens: 4, head_dim: 2, dtype: Dtype::F32 };
        KvLayout::new(shape, order)
    }

    #[test]
    fn neighbouring_pages_of_the_default_layout_are_one_piece() {
        let pool = layout(KvOrder::PageHeadLayerKvTokenDim, 8);
        let pages: Vec<PageId> = (2..5).map(PageId).collect();
        let to: Vec<PageId> = (4..7).map(PageId).collect();
        assert_eq!(
            plan(&pool, &pool, &pages, &to).unwrap(),
            vec![Piece { source: 2 * pool.page, target: 4 * pool.page, length: 3 * pool.page }]
        );
        let scattered = [PageId(4), PageId(6), PageId(5)];
        assert_eq!(plan(&pool, &pool, &pages, &scattered).unwrap().len(), 3);
    }

    #[test]
    fn a_layer_first_pool_needs_two_pieces_a_layer() {
        let pool = layout(KvOrder::LayerKvPageTokenHeadDim, 8);
        assert_eq!(plan(&pool, &pool, &[PageId(1)], &[PageId(2)]).unwrap().len(), 2 * 3);
    }

    #[test]
    fn every_pair_of_layouts_moves_every_row_to_its_place() {
        let orders = [KvOrder::PageHeadLayerKvTokenDim, KvOrder::LayerKvPageTokenHeadDim];
        for (from, to) in orders.iter().flat_map(|a| orders.iter().map(move |b| (*a, *b))) {
            let (source, target) = (layout(from, 5), layout(to, 6));
            let row = 2 * 4;
            let bytes: Vec<u8> = (0..source.bytes()).map(|i| (i / row) as u8).collect();
            let mut copied = vec![0xff; target.bytes()];
            let pairs = [(0, 3), (1, 4), (4, 0)];
            let sent: Vec<PageId> = pairs.iter().map(|pair| PageId(pair.0)).collect();
            let expected: Vec<PageId> = pairs.iter().map(|pair| PageId(pair.1)).collect();
            for piece in plan(&source, &target, &sent, &expected).unwrap() {
                copied[piece.target..piece.target + piece.length]
                    .copy_from_slice(&bytes[piece.source..piece.source + piece.length]);
            }
            for (a, b) in pairs {
                for (head, layer, kv, token) in
                    (0..2 * 3 * 2 * 4).map(|i| (i / 24, i / 8 % 3, i / 4 % 2, i % 4))
                {
                    let at = source.row(a as usize, head, layer, kv, token);
                    let now = target.row(b as usize, head, layer, kv, token);
                    assert_eq!(bytes[at..at + row], copied[now..now + row], "{from} to {to}");
                }
            }
        }
    }

    #[test]
    fn pools_of_another_shape_are_refused_with_both_shapes() {
        let pool = layout(KvOrder::PageHeadLayerKvTokenDim, 8);
        let mut other = pool;
        other.shape.page_tokens = 8;
        let message = plan(&pool, &other, &[], &[]).unwrap_err().to_string();
        assert!(message.contains("4 tokens") && message.contains("8 tokens"), "{message}");
        assert_eq!(plan(&pool, &pool, &[PageId(8)], &[PageId(0)]), Err(PlanError::Outside(8, 8)));
    }
}
