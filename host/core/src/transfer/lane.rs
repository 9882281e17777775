//! Which heads of which layers go from one slice of the cache into another.

use std::ops::Range;

use super::copy::{Dimension, PageBlock, PagesCopy, Run, blocks};
use crate::ids::PageId;
use crate::layout::{KvLayout, KvOrder, KvShape, Strides};

/// The part of the cache that one pool, or one staging buffer, holds: a range of the model's heads and of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSlice {
    /// Where its elements lie.
    pub layout: KvLayout,
    /// Its first head, counted over the whole model.
    pub first_head: usize,
    /// Its first layer, counted over the whole model.
    pub first_layer: usize,
}

impl KvSlice {
    /// The pool of a rank: all layers, and the heads from `first_head` on.
    #[must_use]
    pub const fn pool(layout: KvLayout, first_head: usize) -> Self {
        Self { layout, first_head, first_layer: 0 }
    }

    /// A buffer that holds nothing but these heads and layers of `pages` pages of pools like `shape`, in the order
    /// page-head-layer-kv-token-dim. Its pages are numbered from 0.
    #[must_use]
    pub fn dense(shape: KvShape, pages: usize, heads: Range<usize>, layers: Range<usize>) -> Self {
        let shape = KvShape { pages, heads: heads.len(), layers: layers.len(), ..shape };
        Self {
            layout: KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim),
            first_head: heads.start,
            first_layer: layers.start,
        }
    }

    /// The heads that it holds, counted over the whole model.
    #[must_use]
    pub const fn heads(&self) -> Range<usize> {
        self.first_head..self.first_head + self.layout.shape.heads
    }

    /// The layers that it holds, counted over the whole model.
    #[must_use]
    pub const fn layers(&self) -> Range<usize> {
        self.first_layer..self.first_layer + self.layout.shape.layers
    }
}

/// Heads that go from one slice into another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// The slice from which the heads are read.
    pub source: KvSlice,
    /// The slice into which the heads are written.
    pub target: KvSlice,
    /// The heads, counted over the whole model. Both slices hold them.
    pub heads: Range<usize>,
}

/// Why two pools cannot exchange pages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A head of a page has different shapes or types in the two pools.
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
    /// A pool lacks some of the layers.
    #[error("layers {} to {} of a pool of layers {} to {}", .wanted.start, .wanted.end, .held.start, .held.end)]
    Layers {
        /// The layers to copy.
        wanted: Range<usize>,
        /// The layers of the pool that lacks some.
        held: Range<usize>,
    },
    /// A pool lacks some of the heads.
    #[error("heads {} to {} of a pool of heads {} to {}", .wanted.start, .wanted.end, .held.start, .held.end)]
    Heads {
        /// The heads to copy.
        wanted: Range<usize>,
        /// The heads of the pool that lacks some.
        held: Range<usize>,
    },
}

impl PlanError {
    pub(super) fn shape(source: &KvLayout, target: &KvLayout) -> Self {
        let describe = |layout: &KvLayout| {
            let KvShape { heads, layers, page_tokens, head_dim, value_dim, dtype, .. } = layout.shape;
            let dim =
                if head_dim == value_dim { head_dim.to_string() } else { format!("{head_dim}/{value_dim}") };
            format!("{heads} heads x {layers} layers x {page_tokens} tokens x {dim} {dtype}")
        };
        Self::Shape { source_shape: describe(source), target_shape: describe(target) }
    }
}

/// Plans the copy of a lane's heads, in some layers (counted over the whole model) of `source_pages`, into `target_pages`,
/// pair by pair. No target page may be named twice.
///
/// # Errors
/// When a head of a page is not the same in both slices, the lists differ in length, or a slice lacks one of the heads,
/// layers or pages.
pub fn copy_lane(
    lane: &Lane,
    source_pages: &[PageId],
    target_pages: &[PageId],
    layers: Range<usize>,
) -> Result<PagesCopy, PlanError> {
    let block_of = |slice: &KvSlice| {
        let shape = slice.layout.shape;
        (shape.page_tokens, shape.head_dim, shape.value_dim, shape.dtype)
    };
    if block_of(&lane.source) != block_of(&lane.target) {
        return Err(PlanError::shape(&lane.source.layout, &lane.target.layout));
    }
    if source_pages.len() != target_pages.len() {
        return Err(PlanError::Count { sent: source_pages.len(), expected: target_pages.len() });
    }
    for (slice, pages) in [(&lane.source, source_pages), (&lane.target, target_pages)] {
        if !within(&layers, &slice.layers()) {
            return Err(PlanError::Layers { wanted: layers, held: slice.layers() });
        }
        if !within(&lane.heads, &slice.heads()) {
            return Err(PlanError::Heads { wanted: lane.heads.clone(), held: slice.heads() });
        }
        let held = slice.layout.shape.pages;
        if let Some(page) = pages.iter().find(|page| page.0 as usize >= held) {
            return Err(PlanError::Outside(page.0, held));
        }
    }
    let pages = source_pages.iter().zip(target_pages).map(|(source, target)| [source.0, target.0]).collect();
    // A run is as long as the longer page only if it is the whole page on both sides.
    let page = [&lane.source, &lane.target].map(|slice| slice.layout.shape.page_bytes());
    Ok(PagesCopy::new(pages, lane.sides(layers), page[0].max(page[1])))
}

/// Like [`copy_lane`], expanded to runs.
///
/// # Errors
/// As [`copy_lane`].
pub fn plan_lane(
    lane: &Lane,
    source_pages: &[PageId],
    target_pages: &[PageId],
    layers: Range<usize>,
) -> Result<Vec<Run>, PlanError> {
    Ok(copy_lane(lane, source_pages, target_pages, layers)?.runs())
}

fn within(inner: &Range<usize>, outer: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.start <= inner.end && inner.end <= outer.end
}

/// Bytes of the smallest runs in which `layers` layers of a page travel between two pools of this layout.
#[must_use]
pub fn piece_bytes(layout: &KvLayout, layers: usize) -> usize {
    let slice = KvSlice::pool(*layout, 0);
    let lane = Lane { source: slice, target: slice, heads: slice.heads() };
    blocks(lane.sides(0..layers)).iter().map(|block| block.run).min().unwrap_or(0)
}

impl Lane {
    /// The blocks for the K rows and the V rows of each page, if there is anything to copy.
    fn sides(&self, layers: Range<usize>) -> Vec<PageBlock> {
        let of = |extent, source, target| Dimension { extent, source, target };
        let start = |slice: &KvSlice, side: &Strides| {
            side.start
                + (self.heads.start - slice.first_head) * side.head
                + (layers.start - slice.first_layer) * side.layer
        };
        let page = |slice: &KvSlice, side: &Strides| match slice.layout.shape.pages {
            // A single page has no next page. With a stride of 0, K and V with different page strides can be one block.
            1 => 0,
            _ => side.page,
        };
        let block = |kv: usize| {
            let (source, target) = (&self.source.layout.sides[kv], &self.target.layout.sides[kv]);
            PageBlock {
                run: source.row,
                source: start(&self.source, source),
                target: start(&self.target, target),
                source_page: page(&self.source, source),
                target_page: page(&self.target, target),
                dims: [
                    of(self.heads.len(), source.head, target.head),
                    of(layers.len(), source.layer, target.layer),
                    of(self.source.layout.shape.page_tokens, source.token, target.token),
                ],
            }
        };
        let some = !layers.is_empty() && !self.heads.is_empty();
        [0, 1].map(block).into_iter().filter(|block| some && block.run > 0).collect()
    }
}
