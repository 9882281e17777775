//! Checks that a copy stays in its memories and writes every byte at most once. The check uses only extents and strides.

use super::{CopyError, Memory, PageBlock, PagesCopy, Side};

/// Page numbers on one side, from the lowest to the highest.
#[derive(Clone, Copy)]
struct Span {
    first: u32,
    last: u32,
}

impl Span {
    /// The span of a list that is not empty.
    fn of(pages: &[[u32; 2]], side: Side) -> Self {
        let mut span = Span { first: u32::MAX, last: 0 };
        for pair in pages {
            let page = pair[side as usize];
            span = Span { first: span.first.min(page), last: span.last.max(page) };
        }
        span
    }

    fn with(self, other: Span) -> Self {
        Span { first: self.first.min(other.first), last: self.last.max(other.last) }
    }
}

/// Byte ranges `[start, start + run)` repeated along dimensions (stride, extent), widest stride first.
struct Nest {
    start: u128,
    run: u128,
    dims: Vec<(u128, u128)>,
}

impl Nest {
    fn of(block: &PageBlock, side: Side, pages: Span) -> Self {
        let (start, page) = match side {
            Side::Source => (block.source, block.source_page),
            Side::Target => (block.target, block.target_page),
        };
        let count = u128::from(pages.last - pages.first) + 1;
        let mut dims = vec![(page as u128, count)];
        dims.extend(block.dims.iter().map(|dimension| match side {
            Side::Source => (dimension.source as u128, dimension.extent as u128),
            Side::Target => (dimension.target as u128, dimension.extent as u128),
        }));
        dims.retain(|&(_, extent)| extent > 1);
        dims.sort_unstable_by_key(|&(stride, _)| std::cmp::Reverse(stride));
        let start = start as u128 + u128::from(pages.first) * page as u128;
        Nest { start, run: block.run as u128, dims }
    }

    /// Bytes from the first to the last byte that the dimensions from number `outer` on span.
    fn reach(&self, outer: usize) -> u128 {
        self.dims[outer..].iter().fold(self.run, |reach, &(stride, extent)| {
            reach.saturating_add(stride.saturating_mul(extent - 1))
        })
    }

    fn end(&self) -> u128 {
        self.start.saturating_add(self.reach(0))
    }

    /// Whether pieces of `inner` bytes, repeated along the `outer` widest dimensions, stay apart: each stride is at least as
    /// long as everything further inside.
    fn nests(&self, outer: usize, inner: u128) -> bool {
        let mut reach = inner;
        self.dims[..outer].iter().rev().all(|&(stride, extent)| {
            let apart = stride >= reach;
            reach = reach.saturating_add(stride.saturating_mul(extent - 1));
            apart
        })
    }

    /// Whether two nests have no byte in common, as far as nesting shows it: inside some of the outer dimensions that both
    /// have, their ranges lie side by side.
    fn apart(&self, other: &Nest) -> bool {
        let common = self.dims.iter().zip(&other.dims).take_while(|(a, b)| a == b).count();
        (0..=common).any(|outer| {
            let (a, b) = (self.start + self.reach(outer), other.start + other.reach(outer));
            let side_by_side = a <= other.start || b <= self.start;
            side_by_side && self.nests(outer, a.max(b) - self.start.min(other.start))
        })
    }
}

/// Checks everything that [`super::CopyPages::copy_memory`] promises to refuse.
pub(super) fn check(copy: &PagesCopy<'_>, source: Memory, target: Memory) -> Result<(), CopyError> {
    let empty = |block: &PageBlock| block.run == 0 || block.dims.iter().any(|dim| dim.extent == 0);
    let blocks: Vec<(usize, &PageBlock)> =
        copy.blocks.iter().enumerate().filter(|(_, block)| !empty(block)).collect();
    if blocks.is_empty() || copy.pages.is_empty() {
        return Ok(());
    }
    let (sources, targets) = (Span::of(copy.pages, Side::Source), Span::of(copy.pages, Side::Target));
    let touched_source = bounds(&blocks, Side::Source, sources, source)?;
    let touched_target = bounds(&blocks, Side::Target, targets, target)?;
    let order = target_pages(copy.pages)?;
    let shared = touched_source.0 < touched_target.1 && touched_target.0 < touched_source.1;
    if shared && !disjoint_pages(&blocks, copy.pages, &order, source, target) {
        return Err(CopyError::SharedBytes);
    }
    // In one pool a target row must not meet a source row either, so the nesting has to hold for the pages of both.
    let pages = if shared { sources.with(targets) } else { targets };
    let nests: Vec<(usize, Nest)> =
        blocks.iter().map(|&(index, block)| (index, Nest::of(block, Side::Target, pages))).collect();
    for (position, (index, nest)) in nests.iter().enumerate() {
        if !nest.nests(nest.dims.len(), nest.run) {
            return Err(CopyError::RowsOverlap(*index));
        }
        if let Some((other, _)) = nests[..position].iter().find(|(_, other)| !nest.apart(other)) {
            return Err(CopyError::BlocksOverlap(*other, *index));
        }
    }
    Ok(())
}

/// Addresses of the first touched byte and of the end of the last one. Fails when a block leaves its memory.
fn bounds(
    blocks: &[(usize, &PageBlock)],
    side: Side,
    pages: Span,
    memory: Memory,
) -> Result<(u128, u128), CopyError> {
    let (mut first, mut last) = (u128::MAX, 0);
    for &(block, description) in blocks {
        let nest = Nest::of(description, side, pages);
        if nest.end() > memory.length as u128 {
            return Err(CopyError::OutOfBounds { side, block, needed: nest.end(), length: memory.length });
        }
        (first, last) = (first.min(nest.start), last.max(nest.end()));
    }
    let base = memory.address() as u128;
    Ok((base + first, base + last))
}

/// The target pages in ascending order. Fails when a page occurs twice.
fn target_pages(pages: &[[u32; 2]]) -> Result<Vec<u32>, CopyError> {
    let mut targets: Vec<u32> = pages.iter().map(|pair| pair[Side::Target as usize]).collect();
    targets.sort_unstable();
    match targets.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(CopyError::RepeatedTarget(pair[0])),
        None => Ok(targets),
    }
}

/// Whether source and target are the same pool in the same layout, and no page is both source and target.
fn disjoint_pages(
    blocks: &[(usize, &PageBlock)],
    pages: &[[u32; 2]],
    targets: &[u32],
    source: Memory,
    target: Memory,
) -> bool {
    let same = |(_, block): &(usize, &PageBlock)| {
        source.address() as u128 + block.source as u128 == target.address() as u128 + block.target as u128
            && block.source_page == block.target_page
            && block.dims.iter().all(|dim| dim.extent == 1 || dim.source == dim.target)
    };
    blocks.iter().all(same) && pages.iter().all(|[page, _]| targets.binary_search(page).is_err())
}
