//! Folds a checked copy into the fewest runs: dimensions that are contiguous on both sides become part of the run.

use super::{CopyError, Dimension, Memory, PageBlock, PagesCopy, check};

/// A block whose rows are as long as they can be.
#[derive(Debug)]
pub(crate) struct Strip {
    /// Bytes of one row of one page, not 0.
    pub run: usize,
    /// Offset of page 0 in the source.
    pub source: usize,
    /// Offset of page 0 in the target.
    pub target: usize,
    /// Bytes from one page to the next in the source.
    pub source_page: usize,
    /// Bytes from one page to the next in the target.
    pub target_page: usize,
    /// The dimensions that remain around the row, all with extents above 1: up to three of the block, and one for K and V. The
    /// widest stride in the target comes first, so that the target is written from front to back.
    pub dims: Vec<Dimension>,
    /// Whether the rows of neighbouring pages are neighbours on both sides, so that pages can be part of the run too.
    pub pages_join: bool,
}

impl Strip {
    /// Rows of one page.
    pub fn rows(&self) -> usize {
        self.dims.iter().map(|dimension| dimension.extent).product()
    }

    /// Bytes of one page.
    pub fn page_bytes(&self) -> usize {
        self.run * self.rows()
    }
}

/// Checks a copy and folds it. Empty when there is nothing to copy.
///
/// # Errors
/// As [`super::CopyPages::copy_memory`], except for errors of a device.
pub(crate) fn plan(copy: &PagesCopy<'_>, source: Memory, target: Memory) -> Result<Vec<Strip>, CopyError> {
    check::check(copy, source, target)?;
    if copy.pages.is_empty() {
        return Ok(Vec::new());
    }
    let blocks = copy.blocks.iter().filter(|block| block.run > 0);
    let mut strips: Vec<Strip> =
        blocks.filter(|block| block.dims.iter().all(|dim| dim.extent > 0)).map(strip).collect();
    if let [a, b] = &strips[..]
        && let Some(both) = both(a, b)
    {
        strips = vec![both];
    }
    strips.iter_mut().for_each(fold);
    Ok(strips)
}

fn strip(block: &PageBlock) -> Strip {
    let &PageBlock { run, source, target, source_page, target_page, dims } = block;
    let dims = dims.into_iter().filter(|dimension| dimension.extent > 1).collect();
    Strip { run, source, target, source_page, target_page, dims, pages_join: false }
}

/// Joins two blocks that differ only in where they start on each side. The result has one dimension more.
fn both(a: &Strip, b: &Strip) -> Option<Strip> {
    let alike = |a: &Strip, b: &Strip| {
        (a.run, a.source_page, a.target_page, &a.dims) == (b.run, b.source_page, b.target_page, &b.dims)
    };
    let (a, b) = if a.source <= b.source { (a, b) } else { (b, a) };
    let between = Dimension {
        extent: 2,
        source: b.source.checked_sub(a.source)?,
        target: b.target.checked_sub(a.target)?,
    };
    alike(a, b).then(|| Strip { dims: a.dims.iter().copied().chain([between]).collect(), ..*a })
}

fn fold(strip: &mut Strip) {
    let Strip { run, dims, .. } = strip;
    while let Some(inner) = dims.iter().position(|dim| dim.source == *run && dim.target == *run) {
        *run *= dims.swap_remove(inner).extent;
    }
    // Two dimensions become one if the outer one continues the inner one. This saves divisions and makes inner loops longer.
    while let Some((outer, inner)) = continued(dims) {
        dims[inner].extent *= dims[outer].extent;
        dims.swap_remove(outer);
    }
    dims.sort_unstable_by_key(|dim| std::cmp::Reverse(dim.target));
    strip.pages_join = strip.source_page == strip.run && strip.target_page == strip.run;
}

fn continued(dims: &[Dimension]) -> Option<(usize, usize)> {
    let pairs = (0..dims.len()).flat_map(|outer| (0..dims.len()).map(move |inner| (outer, inner)));
    pairs.filter(|(outer, inner)| outer != inner).find(|&(outer, inner)| {
        let (outer, inner) = (dims[outer], dims[inner]);
        inner.source.checked_mul(inner.extent) == Some(outer.source)
            && inner.target.checked_mul(inner.extent) == Some(outer.target)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folded(blocks: &[PageBlock]) -> Vec<Strip> {
        let (source, target) = (Memory::device(1 << 40, 1 << 30), Memory::device(1 << 41, 1 << 30));
        plan(&PagesCopy { pages: &[[0, 0]], blocks }, source, target).unwrap()
    }

    const HEADS: usize = 2;
    const LAYERS: usize = 3;
    const TOKENS: usize = 4;
    const ROW: usize = 8;

    fn dim(extent: usize, source: usize, target: usize) -> Dimension {
        Dimension { extent, source, target }
    }

    /// K and V of page-head-layer-kv-token-dim on both sides.
    fn dense() -> [PageBlock; 2] {
        let kv = TOKENS * ROW;
        let (layer, head) = (2 * kv, 2 * kv * LAYERS);
        [0, kv].map(|start| PageBlock {
            run: ROW,
            source: start,
            target: start,
            source_page: head * HEADS,
            target_page: head * HEADS,
            dims: [dim(HEADS, head, head), dim(LAYERS, layer, layer), dim(TOKENS, ROW, ROW)],
        })
    }

    #[test]
    fn a_page_that_is_contiguous_on_both_sides_is_one_run_and_so_are_neighbouring_pages() {
        let strips = folded(&dense());
        assert_eq!(strips.len(), 1);
        assert_eq!((strips[0].run, strips[0].dims.len()), (HEADS * LAYERS * 2 * TOKENS * ROW, 0));
        assert!(strips[0].pages_join);
        let backwards: Vec<PageBlock> = dense().into_iter().rev().collect();
        assert_eq!(folded(&backwards)[0].run, strips[0].run);
    }

    #[test]
    fn k_and_v_that_change_places_stay_two_strips() {
        let [mut k, mut v] = dense();
        (k.target, v.target) = (v.target, k.target);
        let strips = folded(&[k, v]);
        assert_eq!(strips.len(), 2);
        assert!(strips.iter().all(|strip| strip.run == TOKENS * ROW && !strip.pages_join));
    }

    #[test]
    fn rows_of_heads_beside_each_other_fold_where_the_target_has_them_so_too() {
        // Token-major on both sides, all heads: tokens and heads are one run of the page.
        let token = HEADS * ROW;
        let page = token * TOKENS;
        let block = PageBlock {
            run: ROW,
            source: 0,
            target: 0,
            source_page: page,
            target_page: page,
            dims: [dim(HEADS, ROW, ROW), dim(LAYERS, 100 * page, 100 * page), dim(TOKENS, token, token)],
        };
        let strips = folded(&[block]);
        assert_eq!((strips[0].run, &strips[0].dims[..]), (page, &[dim(LAYERS, 100 * page, 100 * page)][..]));
        assert!(strips[0].pages_join);
        // The same heads out of a pool with more heads: one run per token, and tokens stay a dimension.
        let wide = |wide: usize| PageBlock {
            dims: [block.dims[0], Dimension::NONE, dim(TOKENS, wide, token)],
            ..block
        };
        assert_eq!((folded(&[wide(10 * ROW)])[0].run, folded(&[wide(10 * ROW)])[0].rows()), (token, TOKENS));
    }

    #[test]
    fn dimensions_that_continue_each_other_become_one() {
        let block = PageBlock {
            run: 4,
            source: 0,
            target: 0,
            source_page: 1 << 20,
            target_page: 1 << 20,
            dims: [dim(5, 16 * 7, 8 * 7), dim(7, 16, 8), dim(3, 1 << 12, 1 << 10)],
        };
        assert_eq!(folded(&[block])[0].dims, [dim(3, 1 << 12, 1 << 10), dim(35, 16, 8)]);
    }
}
