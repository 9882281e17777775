//! From pages to writes: which bytes go where, in the fewest pieces.

use std::ops::Range;

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
    /// The layers are not layers of the model.
    #[error("layers {0} to {1} of a model of {2}")]
    Layers(usize, usize, usize),
}

/// Plans the copy of `source_pages` into `target_pages`, pair by pair, with all layers.
///
/// # Errors
/// As [`plan_layers`].
pub fn plan(
    source: &KvLayout,
    target: &KvLayout,
    source_pages: &[PageId],
    target_pages: &[PageId],
) -> Result<Vec<Piece>, PlanError> {
    plan_layers(source, target, source_pages, target_pages, 0..source.shape.layers)
}

/// Plans the copy of some layers of `source_pages` into `target_pages`, pair by pair.
///
/// What is contiguous on both sides becomes one piece: in the default layout all layers of a page are one run, and so are
/// neighbouring pages; some of its layers are one run a head. In a layer-first layout a layer of neighbouring pages is
/// one run for K and one for V.
///
/// # Errors
/// When the pools' pages differ in shape, the lists in length, or a page or layer lies outside its pool.
pub fn plan_layers(
    source: &KvLayout,
    target: &KvLayout,
    source_pages: &[PageId],
    target_pages: &[PageId],
    layers: Range<usize>,
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
    if layers.start > layers.end || layers.end > source.shape.layers {
        return Err(PlanError::Layers(layers.start, layers.end, source.shape.layers));
    }
    for (pages, layout) in [(source_pages, source), (target_pages, target)] {
        if let Some(page) = pages.iter().find(|page| page.0 as usize >= layout.shape.pages) {
            return Err(PlanError::Outside(page.0, layout.shape.pages));
        }
    }
    let mut pieces = Vec::new();
    let pairs: Vec<(u32, u32)> =
        source_pages.iter().map(|page| page.0).zip(target_pages.iter().map(|page| page.0)).collect();
    let neighbours = |a: &(u32, u32), b: &(u32, u32)| a.0 + 1 == b.0 && a.1 + 1 == b.1;
    for run in pairs.chunk_by(neighbours) {
        let (run_bytes, nest) = fold(source, target, run.len(), layers.len());
        let (from, to) = (run[0].0 as usize, run[0].1 as usize);
        let first = Piece {
            source: from * source.page + layers.start * source.layer,
            target: to * target.page + layers.start * target.layer,
            length: run_bytes,
        };
        visit(&nest, first, &mut pieces);
    }
    Ok(pieces)
}

/// Bytes of the pieces in which `layers` layers of a page, K and V, travel between two pools of this layout.
#[must_use]
pub fn piece_bytes(layout: &KvLayout, layers: usize) -> usize {
    fold(layout, layout, 1, layers).0
}

/// One dimension of an array that lies in two pools: its extent, and the bytes from one element to the next in each.
#[derive(Clone, Copy)]
struct Dimension {
    extent: usize,
    source: usize,
    target: usize,
}

/// Bytes that are contiguous on both sides, and the dimensions that are left around them, outermost first.
fn fold(source: &KvLayout, target: &KvLayout, pages: usize, layers: usize) -> (usize, Vec<Dimension>) {
    let shape = source.shape;
    let of = |extent, source, target| Dimension { extent, source, target };
    let mut dimensions = vec![
        of(pages, source.page, target.page),
        of(shape.heads, source.head, target.head),
        of(layers, source.layer, target.layer),
        of(2, source.kv, target.kv),
        of(shape.page_tokens, source.token, target.token),
    ];
    if layers == 0 {
        return (0, dimensions);
    }
    dimensions.retain(|dimension| dimension.extent > 1);
    dimensions.sort_by_key(|dimension| std::cmp::Reverse(dimension.source));
    let mut run = shape.head_dim * shape.dtype.bytes();
    while let Some(inner) = dimensions.pop_if(|inner| inner.source == run && inner.target == run) {
        run *= inner.extent;
    }
    (run, dimensions)
}

/// Appends one piece (more where it is too long for one) for each element of the nest, in the source's memory order.
fn visit(nest: &[Dimension], at: Piece, pieces: &mut Vec<Piece>) {
    match nest {
        [] => {
            let mut done = 0;
            while done < at.length {
                let length = (at.length - done).min(LONGEST_PIECE);
                pieces.push(Piece { source: at.source + done, target: at.target + done, length });
                done += length;
            }
        }
        [outer, inner @ ..] => {
            for index in 0..outer.extent {
                let (source, target) = (at.source + index * outer.source, at.target + index * outer.target);
                visit(inner, Piece { source, target, ..at }, pieces);
            }
        }
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
    fn each_layout_needs_the_fewest_pieces_for_some_layers_of_neighbouring_and_scattered_pages() {
        let neighbours: Vec<PageId> = (2..5).map(PageId).collect();
        let scattered = [PageId(7), PageId(1), PageId(4)];
        // 2 heads, 3 layers. (order, pieces of all layers: neighbours, scattered; of two layers: the same)
        for (order, whole, some) in [
            (KvOrder::PageHeadLayerKvTokenDim, (1, 3), (3 * 2, 3 * 2)),
            (KvOrder::PageLayerHeadKvTokenDim, (1, 3), (3, 3)),
            (KvOrder::LayerKvPageTokenHeadDim, (2 * 3, 3 * 2 * 3), (2 * 2, 3 * 2 * 2)),
        ] {
            let pool = layout(order, 8);
            let count = |to: &[PageId], layers| {
                let pieces = plan_layers(&pool, &pool, &neighbours, to, layers).unwrap();
                let bytes: usize = pieces.iter().map(|piece| piece.length).sum();
                (pieces.len(), bytes)
            };
            let page = pool.shape.page_bytes();
            assert_eq!(count(&neighbours, 0..3), (whole.0, 3 * page), "{order}");
            assert_eq!(count(&scattered, 0..3), (whole.1, 3 * page), "{order}");
            assert_eq!(count(&neighbours, 1..3), (some.0, 2 * page), "{order}");
            assert_eq!(count(&scattered, 1..3), (some.1, 2 * page), "{order}");
            assert_eq!(count(&neighbours, 2..2), (0, 0), "{order}");
        }
    }

    #[test]
    fn every_pair_of_layouts_moves_every_row_of_every_layer_range_to_its_place_and_no_other() {
        let ranges = [0..3, 0..1, 1..2, 2..3, 0..2, 1..3];
        for ((from, to), layers) in KvOrder::ALL
            .iter()
            .flat_map(|a| KvOrder::ALL.iter().map(move |b| (*a, *b)))
            .flat_map(|orders| ranges.iter().map(move |range| (orders, range.clone())))
        {
            let (source, target) = (layout(from, 5), layout(to, 6));
            let row = 2 * 4;
            let bytes: Vec<u8> = (0..source.bytes()).map(|i| (i / row) as u8).collect();
            let mut copied = vec![0xff; target.bytes()];
            let pairs = [(0, 3), (1, 4), (4, 0)];
            let sent: Vec<PageId> = pairs.iter().map(|pair| PageId(pair.0)).collect();
            let expected: Vec<PageId> = pairs.iter().map(|pair| PageId(pair.1)).collect();
            let pieces = plan_layers(&source, &target, &sent, &expected, layers.clone()).unwrap();
            for piece in &pieces {
                copied[piece.target..piece.target + piece.length]
                    .copy_from_slice(&bytes[piece.source..piece.source + piece.length]);
            }
            let moved: usize = pieces.iter().map(|piece| piece.length).sum();
            assert_eq!(moved, 3 * source.shape.page_bytes() / 3 * layers.len());
            for (a, b) in pairs {
                for (head, layer, kv, token) in
                    (0..2 * 3 * 2 * 4).map(|i| (i / 24, i / 8 % 3, i / 4 % 2, i % 4))
                {
                    let at = source.row(a as usize, head, layer, kv, token);
                    let now = target.row(b as usize, head, layer, kv, token);
                    let wanted = if layers.contains(&layer) { &bytes[at..at + row] } else { &[0xff; 8] };
                    assert_eq!(wanted, &copied[now..now + row], "{from} to {to}, layers {layers:?}");
                }
            }
        }
    }

    #[test]
    fn a_run_too_long_for_one_piece_is_several() {
        let shape =
            KvShape { pages: 4, heads: 64, layers: 64, page_tokens: 128, head_dim: 128, dtype: Dtype::F32 };
        let pool = KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim);
        let pages: Vec<PageId> = (0..4).map(PageId).collect();
        let pieces = plan(&pool, &pool, &pages, &pages).unwrap();
        assert!(pieces.iter().all(|piece| piece.length <= LONGEST_PIECE));
        let mut end = 0;
        for piece in &pieces {
            assert_eq!((piece.source, piece.target), (end, end));
            end += piece.length;
        }
        assert_eq!(end, pool.bytes());
    }

    #[test]
    fn pools_of_another_shape_are_refused_with_both_shapes() {
        let pool = layout(KvOrder::PageHeadLayerKvTokenDim, 8);
        let mut other = pool;
        other.shape.page_tokens = 8;
        let message = plan(&pool, &other, &[], &[]).unwrap_err().to_string();
        assert!(message.contains("4 tokens") && message.contains("8 tokens"), "{message}");
        assert_eq!(plan(&pool, &pool, &[PageId(8)], &[PageId(0)]), Err(PlanError::Outside(8, 8)));
        assert_eq!(plan_layers(&pool, &pool, &[], &[], 1..4), Err(PlanError::Layers(1, 4, 3)));
    }
}
