//! Random copies, and the result that each must give.

use host_kernels::copy::{Dimension, PageBlock, PagesCopy};
use proptest::prelude::*;

/// Copies one row at a time, as the documentation of the module says.
pub fn naive(copy: &PagesCopy<'_>, source: &[u8], target: &mut [u8]) {
    for &[from, to] in copy.pages {
        for block in copy.blocks {
            let [a, b, c] = block.dims;
            for (i, j, k) in indices(a.extent, b.extent, c.extent) {
                let from = block.source
                    + from as usize * block.source_page
                    + i * a.source
                    + j * b.source
                    + k * c.source;
                let to = block.target
                    + to as usize * block.target_page
                    + i * a.target
                    + j * b.target
                    + k * c.target;
                target[to..to + block.run].copy_from_slice(&source[from..from + block.run]);
            }
        }
    }
}

/// All triples of indices below these numbers.
pub fn indices(a: usize, b: usize, c: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..a).flat_map(move |i| (0..b).flat_map(move |j| (0..c).map(move |k| (i, j, k))))
}

/// Strides of dimensions that are nested in some order, with gaps. The narrowest lies around a row.
#[derive(Clone, Debug)]
struct Order {
    /// Dimensions from the narrowest: 0 to 2 of the block, 3 the page, 4 K or V.
    order: Vec<usize>,
    gaps: Vec<usize>,
    start: usize,
}

fn order() -> impl Strategy<Value = Order> {
    let gap = prop_oneof![3 => Just(0_usize), 1 => 1..20_usize, 1 => Just(64)];
    let start = prop_oneof![Just(0), 0..70_usize];
    (Just(vec![0, 1, 2, 3, 4]).prop_shuffle(), prop::collection::vec(gap, 5), start)
        .prop_map(|(order, gaps, start)| Order { order, gaps, start })
}

impl Order {
    /// The stride of each dimension, and the bytes of the whole.
    fn strides(&self, run: usize, extents: [usize; 5]) -> ([usize; 5], usize) {
        let mut strides = [0; 5];
        let mut reach = run;
        for (&dimension, gap) in self.order.iter().zip(&self.gaps) {
            strides[dimension] = reach + gap;
            reach += strides[dimension] * (extents[dimension] - 1);
        }
        (strides, self.start + reach)
    }
}

/// A copy that must be allowed.
#[derive(Clone, Debug)]
pub struct Case {
    pub blocks: Vec<PageBlock>,
    pub pages: Vec<[u32; 2]>,
    /// Bytes of the source.
    pub source: usize,
    /// Bytes of the target.
    pub target: usize,
}

const POOL: usize = 7;

/// Random shapes, strides, orders and pages.
pub fn case() -> impl Strategy<Value = Case> {
    let run =
        prop_oneof![1..=70_usize, Just(16), Just(32), Just(64), Just(128), Just(256), Just(512), Just(1056)];
    let extents = [1..4_usize, 1..4, 1..5];
    let targets = Just((0..POOL as u32).collect::<Vec<_>>()).prop_shuffle();
    let sources = prop_oneof![
        prop::collection::vec(0..POOL as u32, POOL),
        (0..4_u32).prop_map(|first| (first..first + POOL as u32).map(|page| page % POOL as u32).collect()),
    ];
    let ascending = any::<bool>();
    (run, extents, order(), order(), any::<bool>(), (sources, targets, ascending, 0..=POOL)).prop_map(
        |(run, [a, b, c], source, target, two, (sources, mut targets, ascending, count))| {
            let extents = [a, b, c, POOL, if two { 2 } else { 1 }];
            if ascending {
                targets.sort_unstable();
            }
            let (from, source_bytes) = source.strides(run, extents);
            let (to, target_bytes) = target.strides(run, extents);
            let dims = [0, 1, 2].map(|d| Dimension { extent: extents[d], source: from[d], target: to[d] });
            let blocks = (0..extents[4]).map(|side| PageBlock {
                run,
                source: source.start + side * from[4],
                target: target.start + side * to[4],
                source_page: from[3],
                target_page: to[3],
                dims,
            });
            let pages = sources.into_iter().zip(targets).map(|(from, to)| [from, to]).take(count).collect();
            Case { blocks: blocks.collect(), pages, source: source_bytes, target: target_bytes }
        },
    )
}

/// Bytes that differ from their neighbours and from the target's.
pub fn bytes(length: usize, seed: u8) -> Vec<u8> {
    (0..length)
        .map(|at| (at as u8).wrapping_mul(167).wrapping_add((at >> 8) as u8).wrapping_add(seed))
        .collect()
}
