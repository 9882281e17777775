//! A copy of pages between two buffers, as extents and strides, and its expansion into contiguous runs.

/// One contiguous copy between two pools, in bytes from their starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Offset in the sender's pool.
    pub source: usize,
    /// Offset in the receiver's pool.
    pub target: usize,
    /// Bytes.
    pub length: usize,
}

/// Longest run: a write's length is 32 bits wide.
pub const LONGEST_RUN: usize = 1 << 30;

/// One dimension of an array that lies in two buffers: its extent, and the bytes from one element to the next in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dimension {
    /// Elements.
    pub extent: usize,
    /// Bytes from one element to the next where it is read.
    pub source: usize,
    /// Bytes from one element to the next where it is written.
    pub target: usize,
}

/// The copy for each pair of pages: for each index `[i, j, k]` within the extents of `dims`, `run` bytes from `source +
/// page[0] * source_page + i * dims[0].source + j * dims[1].source + k * dims[2].source`, and likewise to the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageBlock {
    /// Bytes that are contiguous on both sides.
    pub run: usize,
    /// Offset of the first run of page 0 where it is read.
    pub source: usize,
    /// Offset of the first run of page 0 where it is written.
    pub target: usize,
    /// Bytes from one page to the next where it is read.
    pub source_page: usize,
    /// Bytes from one page to the next where it is written.
    pub target_page: usize,
    /// The dimensions around a run within a page, in the source's memory order, outermost first. If fewer are needed,
    /// the outer ones have extent 1.
    pub dims: [Dimension; 3],
}

/// A copy of pages between two buffers, all numbers in bytes from the buffers' starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagesCopy {
    pages: Vec<[u32; 2]>,
    blocks: Vec<PageBlock>,
    whole_pages: bool,
}

/// How large a copy is, and in how many runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanSize {
    /// Runs.
    pub runs: usize,
    /// Bytes of all runs.
    pub bytes: usize,
    /// Whether pages are contiguous on both sides and copied whole, so that a buffer in between gains nothing.
    pub whole_pages: bool,
}

impl PagesCopy {
    /// `sides` holds the blocks of K and V of a page, if there is anything to copy.
    pub(super) fn new(mut pages: Vec<[u32; 2]>, sides: Vec<PageBlock>, whole_page: usize) -> Self {
        // Sorted, so that neighbouring pages become one run in whatever order the lists name them.
        pages.sort_unstable();
        let blocks = blocks(sides);
        let whole_pages = matches!(blocks[..], [block] if block.run == whole_page);
        Self { pages, blocks, whole_pages }
    }

    /// The pairs of pages, source and target, in the source's memory order.
    #[must_use]
    pub fn pages(&self) -> &[[u32; 2]] {
        &self.pages
    }

    /// The blocks that are copied of each page: one if K and V follow each other on both sides, one for each if they do
    /// not, and none if there is nothing to copy.
    #[must_use]
    pub fn blocks(&self) -> &[PageBlock] {
        &self.blocks
    }

    /// Counts runs and bytes without expanding the copy.
    #[must_use]
    pub fn size(&self) -> PlanSize {
        let mut size = PlanSize { whole_pages: self.whole_pages, ..PlanSize::default() };
        self.each_run(|_, nests| {
            for nest in nests {
                let runs: usize = nest.dims.iter().map(|dimension| dimension.extent).product();
                size.runs += runs * nest.run.div_ceil(LONGEST_RUN);
                size.bytes += runs * nest.run;
            }
        });
        size
    }

    /// The fewest runs: bytes that are contiguous on both sides are one run, over neighbouring pages too, up to
    /// [`LONGEST_RUN`].
    #[must_use]
    pub fn runs(&self) -> Vec<Run> {
        let mut runs = Vec::with_capacity(self.size().runs);
        self.each(|run| runs.push(run));
        runs
    }

    /// Calls `take` with each of the [`runs`](Self::runs), without a list of them.
    pub fn each(&self, mut take: impl FnMut(Run)) {
        self.each_run(|[from, to], nests| {
            for nest in nests {
                let source = nest.source + from as usize * nest.page.source;
                let target = nest.target + to as usize * nest.page.target;
                visit(&nest.dims, Run { source, target, length: nest.run }, &mut take);
            }
        });
    }

    /// Calls `take` with the first pair of each run of neighbouring pages and the nests to copy for that run.
    fn each_run(&self, mut take: impl FnMut([u32; 2], &[Nest])) {
        let follows = |a: &[u32; 2], b: &[u32; 2]| {
            a[0].checked_add(1) == Some(b[0]) && a[1].checked_add(1) == Some(b[1])
        };
        let mut folded = (0, Vec::new());
        for run in self.pages.chunk_by(follows) {
            if folded.0 != run.len() {
                let nests = self.blocks.iter().map(|block| Nest::of(block, run.len())).collect();
                folded = (run.len(), fold(nests));
            }
            take(run[0], &folded.1);
        }
    }
}

/// An array of runs: one run for each index within the extents of `dims`, which are outermost first.
#[derive(Clone)]
struct Nest {
    run: usize,
    source: usize,
    target: usize,
    /// From one page to the next. Its extent does not count.
    page: Dimension,
    dims: Vec<Dimension>,
}

impl Nest {
    /// A block of `pages` pages that follow each other on both sides.
    fn of(block: &PageBlock, pages: usize) -> Self {
        let page = Dimension { extent: pages, source: block.source_page, target: block.target_page };
        let dims = block.dims.into_iter().chain([page]).collect();
        Self { run: block.run, source: block.source, target: block.target, page, dims }
    }

    fn block(&self) -> PageBlock {
        let mut dims = [Dimension { extent: 1, source: 0, target: 0 }; 3];
        let unused = dims.len() - self.dims.len();
        dims[unused..].copy_from_slice(&self.dims);
        PageBlock {
            run: self.run,
            source: self.source,
            target: self.target,
            source_page: self.page.source,
            target_page: self.page.target,
            dims,
        }
    }

    /// Extends the run by all dimensions that follow it on both sides, and orders the others by the source's memory.
    fn fold(mut self) -> Self {
        self.dims.retain(|dimension| dimension.extent > 1);
        self.dims.sort_by_key(|dimension| std::cmp::Reverse(dimension.source));
        while let Some(inner) = self.dims.pop_if(|inner| inner.source == self.run && inner.target == self.run)
        {
            self.run *= inner.extent;
        }
        self
    }

    /// Both nests as one, if each run of `next` follows the same run of this nest.
    fn joined(&self, next: &Self) -> Option<Self> {
        let follows = next.source == self.source + self.run && next.target == self.target + self.run;
        (follows && self.page == next.page && self.dims == next.dims)
            .then(|| Self { run: self.run + next.run, ..self.clone() }.fold())
    }
}

/// The fewest nests for K and V.
fn fold(sides: Vec<Nest>) -> Vec<Nest> {
    let sides: Vec<Nest> = sides.into_iter().map(Nest::fold).collect();
    match &sides[..] {
        [keys, values] => keys.joined(values).map_or(sides, |both| vec![both]),
        _ => sides,
    }
}

/// The fewest blocks for K and V of a page.
pub(super) fn blocks(sides: Vec<PageBlock>) -> Vec<PageBlock> {
    fold(sides.iter().map(|block| Nest::of(block, 1)).collect()).iter().map(Nest::block).collect()
}

/// Calls `take` with one run (more where it is too long for one) for each element of the nest, in the source's memory
/// order.
fn visit(nest: &[Dimension], at: Run, take: &mut impl FnMut(Run)) {
    match nest {
        [] => {
            let mut done = 0;
            while done < at.length {
                let length = (at.length - done).min(LONGEST_RUN);
                take(Run { source: at.source + done, target: at.target + done, length });
                done += length;
            }
        }
        [outer, inner @ ..] => {
            for index in 0..outer.extent {
                let (source, target) = (at.source + index * outer.source, at.target + index * outer.target);
                visit(inner, Run { source, target, ..at }, take);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k_and_v_are_one_block_only_where_they_follow_each_other_on_every_page_of_both_sides() {
        let one = Dimension { extent: 1, source: 0, target: 0 };
        let layers = Dimension { extent: 3, source: 30, target: 40 };
        let keys = PageBlock {
            run: 10,
            source: 0,
            target: 0,
            source_page: 100,
            target_page: 200,
            dims: [one, layers, one],
        };
        let values = PageBlock { run: 20, source: 10, target: 10, ..keys };
        // The layers follow each other at the source, but not at the target.
        let both = PageBlock { run: 30, dims: [one, one, layers], ..keys };
        assert_eq!(blocks(vec![keys, values]), [both]);
        for apart in [
            PageBlock { source: 11, ..values },
            PageBlock { target: 11, ..values },
            PageBlock { source_page: 300, ..values },
            PageBlock { target_page: 300, ..values },
            PageBlock { dims: [one, one, Dimension { target: 50, ..layers }], ..values },
        ] {
            assert_eq!(blocks(vec![keys, apart]).len(), 2, "{apart:?}");
        }
    }
}
