//! From pages to writes: which bytes go where, in the fewest runs.
//!
//! A [`KvSlice`] is the part of the cache that one pool holds: some of the model's heads and layers, in some order. A
//! [`Lane`] says which heads go from one slice into another. For a list of pages [`copy_lane`] makes a [`PagesCopy`] of it,
//! which knows its size without being expanded, and expands to runs. A staging buffer is a slice too ([`KvSlice::dense`]),
//! so one function plans gathering, scattering and direct transfers. [`choose`] decides between a direct and a staged
//! transfer, and a [`Cut`] says what each piece of a staged lane holds.

mod choice;
mod copy;
mod cut;
mod lane;

use std::ops::Range;

pub use choice::{KNEE, LEAST_RUNS, Path, StagingMode, StagingPolicy, choose};
pub use copy::{Dimension, LONGEST_RUN, PageBlock, PagesCopy, PlanSize, Run};
pub use cut::{Cut, StagedPiece};
pub use lane::{KvSlice, Lane, PlanError, copy_lane, piece_bytes, plan_lane};

use crate::ids::PageId;
use crate::layout::KvLayout;

/// Our own name for one submission to a transfer backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u64);

/// Plans the copy of `source_pages` into `target_pages`, pair by pair, with all layers.
///
/// # Errors
/// As [`plan_layers`].
pub fn plan(
    source: &KvLayout,
    target: &KvLayout,
    source_pages: &[PageId],
    target_pages: &[PageId],
) -> Result<Vec<Run>, PlanError> {
    plan_layers(source, target, source_pages, target_pages, 0..source.shape.layers)
}

/// Plans the copy of some layers of `source_pages` into `target_pages`, pair by pair, between pools of the same heads and
/// layers.
///
/// Bytes that are contiguous on both sides become one run. In the default layout all layers of a page are one run,
/// and so are neighbouring pages. Some layers of a page are one run per head. In a layer-first layout a layer of
/// neighbouring pages is one run for K and one for V.
///
/// # Errors
/// When the pools' pages differ in shape, the lists in length, or a page or layer lies outside its pool.
pub fn plan_layers(
    source: &KvLayout,
    target: &KvLayout,
    source_pages: &[PageId],
    target_pages: &[PageId],
    layers: Range<usize>,
) -> Result<Vec<Run>, PlanError> {
    let (from, to) = (source.shape, target.shape);
    if (from.heads, from.layers) != (to.heads, to.layers) {
        return Err(PlanError::shape(source, target));
    }
    let lane =
        Lane { source: KvSlice::pool(*source, 0), target: KvSlice::pool(*target, 0), heads: 0..from.heads };
    plan_lane(&lane, source_pages, target_pages, layers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Dtype, KvOrder, KvShape};

    fn layout(order: KvOrder, pages: usize) -> KvLayout {
        let shape = KvShape {
            pages,
            heads: 2,
            layers: 3,
            page_tokens: 4,
            head_dim: 2,
            value_dim: 2,
            dtype: Dtype::F32,
        };
        KvLayout::new(shape, order)
    }

    #[test]
    fn neighbouring_pages_of_the_default_layout_are_one_piece() {
        let pool = layout(KvOrder::PageHeadLayerKvTokenDim, 8);
        let page = pool.shape.page_bytes();
        let pages: Vec<PageId> = (2..5).map(PageId).collect();
        let to: Vec<PageId> = (4..7).map(PageId).collect();
        assert_eq!(
            plan(&pool, &pool, &pages, &to).unwrap(),
            vec![Run { source: 2 * page, target: 4 * page, length: 3 * page }]
        );
        let scattered = [PageId(4), PageId(6), PageId(5)];
        assert_eq!(plan(&pool, &pool, &pages, &scattered).unwrap().len(), 3);
    }

    #[test]
    fn each_layout_needs_the_fewest_pieces_for_some_layers_of_neighbouring_and_scattered_pages() {
        let neighbours: Vec<PageId> = (2..5).map(PageId).collect();
        let scattered = [PageId(7), PageId(1), PageId(4)];
        // 2 heads, 3 layers: the order, the runs of all layers (neighbours, scattered), and the runs of two layers
        // (the same).
        for (order, whole, some) in [
            (KvOrder::PageHeadLayerKvTokenDim, (1, 3), (3 * 2, 3 * 2)),
            (KvOrder::PageLayerHeadKvTokenDim, (1, 3), (3, 3)),
            (KvOrder::LayerKvPageTokenHeadDim, (2 * 3, 3 * 2 * 3), (2 * 2, 3 * 2 * 2)),
        ] {
            let pool = layout(order, 8);
            let count = |to: &[PageId], layers| {
                let runs = plan_layers(&pool, &pool, &neighbours, to, layers).unwrap();
                let bytes: usize = runs.iter().map(|run| run.length).sum();
                (runs.len(), bytes)
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
            let runs = plan_layers(&source, &target, &sent, &expected, layers.clone()).unwrap();
            for run in &runs {
                copied[run.target..run.target + run.length]
                    .copy_from_slice(&bytes[run.source..run.source + run.length]);
            }
            let moved: usize = runs.iter().map(|run| run.length).sum();
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
        let shape = KvShape {
            pages: 4,
            heads: 64,
            layers: 64,
            page_tokens: 128,
            head_dim: 128,
            value_dim: 128,
            dtype: Dtype::F32,
        };
        let pool = KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim);
        let pages: Vec<PageId> = (0..4).map(PageId).collect();
        let runs = plan(&pool, &pool, &pages, &pages).unwrap();
        assert!(runs.iter().all(|run| run.length <= LONGEST_RUN));
        let mut end = 0;
        for run in &runs {
            assert_eq!((run.source, run.target), (end, end));
            end += run.length;
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
        assert_eq!(
            plan_layers(&pool, &pool, &[], &[], 1..4),
            Err(PlanError::Layers { wanted: 1..4, held: 0..3 })
        );
    }
}
