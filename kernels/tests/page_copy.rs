//! Compares page copies with a copy of one row at a time, for random shapes, strides, orders and pages.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use host_kernels::copy::{Copier, CopyError, Dimension, PageBlock, PagesCopy, Side, Stores};
use proptest::prelude::*;

#[path = "page_copy/cases.rs"]
mod cases;

use cases::{bytes, case, indices, naive};

fn copiers() -> Vec<(&'static str, Copier)> {
    vec![
        ("1 thread", Copier::new(1).unwrap()),
        ("1 thread, cached", Copier::new(1).unwrap().with_stores(Stores::Cached)),
        ("1 thread, streaming", Copier::new(1).unwrap().with_stores(Stores::Streaming)),
        ("3 threads", Copier::new(3).unwrap().with_stores(Stores::Streaming)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 600 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_is_what_a_copy_row_by_row_gives(case in case(), shift in 0..3_usize) {
        let source = bytes(case.source + shift, 1);
        let copy = PagesCopy { pages: &case.pages, blocks: &case.blocks };
        let mut expected = bytes(case.target + shift, 99);
        naive(&copy, &source[shift..], &mut expected[shift..]);
        for (name, copier) in copiers() {
            let mut target = bytes(case.target + shift, 99);
            copier.copy(&copy, &source[shift..], &mut target[shift..]).unwrap();
            prop_assert!(target == expected, "{name}");
        }
    }

    #[test]
    fn one_byte_too_few_on_either_side_is_refused_and_nothing_is_copied(case in case()) {
        let used: Vec<u32> = case.pages.iter().map(|pair| pair[0]).collect();
        let copy = PagesCopy { pages: &case.pages, blocks: &case.blocks };
        let (mut source_end, mut target_end) = (0, 0);
        for block in &case.blocks {
            let end = |side: usize, start: usize, page: usize, steps: [usize; 3]| {
                let last = case.pages.iter().map(|pair| pair[side] as usize).max().unwrap_or(0);
                start + last * page + block.run
                    + block.dims.iter().zip(steps).map(|(d, step)| (d.extent - 1) * step).sum::<usize>()
            };
            source_end = source_end.max(end(0, block.source, block.source_page, block.dims.map(|d| d.source)));
            target_end = target_end.max(end(1, block.target, block.target_page, block.dims.map(|d| d.target)));
        }
        prop_assume!(!used.is_empty());
        let copier = Copier::new(1).unwrap();
        let source = bytes(source_end, 1);
        let untouched = bytes(target_end, 99);
        let mut target = untouched.clone();
        let refused = copier.copy(&copy, &source[..source_end - 1], &mut target).unwrap_err();
        prop_assert!(matches!(refused, CopyError::OutOfBounds { side: Side::Source, .. }), "{refused}");
        let refused = copier.copy(&copy, &source, &mut target[..target_end - 1]).unwrap_err();
        prop_assert!(matches!(refused, CopyError::OutOfBounds { side: Side::Target, .. }), "{refused}");
        prop_assert!(target == untouched);
        prop_assert_eq!(copier.copy(&copy, &source, &mut target), Ok(()));
    }

    /// For all strides: a copy that passes the check writes no byte twice.
    #[test]
    fn rows_that_overlap_in_the_target_are_refused(
        run in 1..6_usize,
        extents in [1..4_usize, 1..4, 1..3],
        steps in [0..30_usize, 0..30, 0..30],
        page in 0..60_usize,
        starts in prop::collection::vec(0..40_usize, 1..3),
    ) {
        let dims = [0, 1, 2].map(|d| Dimension { extent: extents[d], source: 0, target: steps[d] });
        let blocks: Vec<PageBlock> = starts
            .iter()
            .map(|&target| PageBlock { run, source: 0, target, source_page: 0, target_page: page, dims })
            .collect();
        let copy = PagesCopy { pages: &[[0, 0], [0, 1]], blocks: &blocks };
        let mut written = vec![0_u8; 512];
        for block in &blocks {
            for page in 0..2 {
                for (i, j, k) in indices(extents[0], extents[1], extents[2]) {
                    let at = block.target + page * block.target_page + i * steps[0] + j * steps[1] + k * steps[2];
                    written[at..at + run].iter_mut().for_each(|times| *times += 1);
                }
            }
        }
        let overlap = written.iter().any(|&times| times > 1);
        let result = Copier::new(1).unwrap().copy(&copy, &[7; 8], &mut [0; 512]);
        prop_assert!(!overlap || matches!(result, Err(CopyError::RowsOverlap(_) | CopyError::BlocksOverlap(..))), "{result:?}");
    }
}

fn whole_pages(bytes: usize) -> [PageBlock; 1] {
    let [source_page, target_page] = [bytes; 2];
    [PageBlock { run: bytes, source: 0, target: 0, source_page, target_page, dims: [Dimension::NONE; 3] }]
}

#[test]
fn pages_move_inside_a_pool_when_none_is_both_read_and_written() {
    let copier = Copier::new(1).unwrap();
    let blocks = whole_pages(2);
    let mut pool: Vec<u8> = (0..8).collect();
    copier.copy_within(&PagesCopy { pages: &[[0, 2], [0, 3]], blocks: &blocks }, &mut pool).unwrap();
    assert_eq!(pool, [0, 1, 2, 3, 0, 1, 0, 1]);
    let chain = PagesCopy { pages: &[[0, 1], [1, 2]], blocks: &blocks };
    assert_eq!(copier.copy_within(&chain, &mut pool), Err(CopyError::SharedBytes));
    let [mut moved] = whole_pages(2);
    moved.target = 1;
    let shifted = PagesCopy { pages: &[[0, 1], [2, 3]], blocks: &[moved] };
    assert_eq!(
        copier.copy_within(&shifted, &mut pool[..]).unwrap_err().to_string().split(' ').next(),
        Some("block")
    );
    pool.push(0);
    assert_eq!(copier.copy_within(&shifted, &mut pool), Err(CopyError::SharedBytes));
    let [mut other_strides] = whole_pages(2);
    other_strides.target_page = 3;
    let spread = PagesCopy { pages: &[[1, 0], [2, 3]], blocks: &[other_strides] };
    assert_eq!(copier.copy_within(&spread, &mut [0; 11]), Err(CopyError::SharedBytes));
    let [mut close] = whole_pages(4);
    (close.source_page, close.target_page) = (1, 1);
    let overlapping_pages = PagesCopy { pages: &[[1, 0]], blocks: &[close] };
    assert_eq!(copier.copy_within(&overlapping_pages, &mut pool), Err(CopyError::RowsOverlap(0)));
    assert_eq!(pool, [0, 1, 2, 3, 0, 1, 0, 1, 0]);
}

#[test]
fn k_and_v_may_differ_in_row_and_strides() {
    // Two pages of two tokens. K rows of 3 bytes and V rows of 2 lie page by page in one pool, and apart in the other.
    let block = |run: usize, source: usize, target: usize| PageBlock {
        run,
        source,
        target,
        source_page: 10,
        target_page: 2 * run,
        dims: [Dimension { extent: 2, source: run, target: run }, Dimension::NONE, Dimension::NONE],
    };
    let blocks = [block(3, 0, 0), block(2, 6, 12)];
    let copy = PagesCopy { pages: &[[1, 0], [0, 1]], blocks: &blocks };
    assert_eq!(copy.bytes(), 20);
    let source: Vec<u8> = (0..20).collect();
    let mut target = [0; 20];
    Copier::new(1).unwrap().copy(&copy, &source, &mut target).unwrap();
    assert_eq!(target, [10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 16, 17, 18, 19, 6, 7, 8, 9]);
    // And back, where both lie in the same pages.
    let mut back = [0; 20];
    let copy = PagesCopy { pages: &[[0, 1], [1, 0]], blocks: &blocks.map(PageBlock::reversed) };
    Copier::new(1).unwrap().copy(&copy, &target, &mut back).unwrap();
    assert_eq!(back, source[..]);
}

#[test]
fn a_page_written_twice_is_refused() {
    let copier = Copier::new(1).unwrap();
    let copy = PagesCopy { pages: &[[0, 1], [1, 0], [2, 1]], blocks: &whole_pages(2) };
    let mut target = [0; 6];
    assert_eq!(copier.copy(&copy, &[1; 6], &mut target), Err(CopyError::RepeatedTarget(1)));
    assert_eq!(target, [0; 6]);
}

#[test]
fn numbers_that_no_memory_could_hold_are_refused() {
    let copier = Copier::new(1).unwrap();
    let huge = usize::MAX;
    let dims = [Dimension { extent: huge, source: huge, target: huge }; 3];
    let block =
        PageBlock { run: huge, source: huge, target: huge, source_page: huge, target_page: huge, dims };
    let copy = PagesCopy { pages: &[[u32::MAX, u32::MAX]], blocks: &[block] };
    assert_eq!(copy.bytes(), usize::MAX);
    assert!(matches!(copier.copy(&copy, &[0; 4], &mut [0; 4]), Err(CopyError::OutOfBounds { .. })));
}

#[test]
fn nothing_to_copy_is_copied_anywhere() {
    let copier = Copier::new(2).unwrap();
    let [mut block] = whole_pages(1 << 20);
    assert_eq!(copier.copy(&PagesCopy { pages: &[], blocks: &[block] }, &[], &mut []), Ok(()));
    assert_eq!(copier.copy(&PagesCopy { pages: &[[3, 3]], blocks: &[] }, &[], &mut []), Ok(()));
    block.dims[1].extent = 0;
    assert_eq!(copier.copy(&PagesCopy { pages: &[[3, 3]], blocks: &[block] }, &[], &mut []), Ok(()));
}

/// Large enough for several threads and for stores past the caches. Some runs are longer than the bytes that a thread takes at a
/// time, others are shorter.
#[test]
#[cfg_attr(miri, ignore = "megabytes")]
fn a_copy_on_many_threads_is_the_same() {
    let shapes = [
        (3_u32, 3 << 20, [1, 1], 0),
        (40, 1 << 10, [50, 7], 32),
        (40, 70, [9, 61], 3),
        (2, 1 << 20, [1, 5], 64),
    ];
    for (pages, run, [outer, inner], gap) in shapes {
        let (step, row) = ((run + gap) * inner, run * inner);
        let dims = [
            Dimension { extent: inner, source: run + gap, target: run },
            Dimension { extent: outer, source: step + gap, target: row },
            Dimension::NONE,
        ];
        let (source_page, target_page) = ((step + gap) * outer, row * outer);
        let block = PageBlock { run, source: 0, target: 0, source_page, target_page, dims };
        let pairs: Vec<[u32; 2]> = (0..pages).map(|page| [(page * 7) % pages, page]).collect();
        let copy = PagesCopy { pages: &pairs, blocks: &[block] };
        let source = bytes(source_page * pages as usize, 5);
        let mut expected = vec![0; target_page * pages as usize];
        naive(&copy, &source, &mut expected);
        for threads in [1, 2, 4] {
            for stores in [Stores::Auto, Stores::Cached, Stores::Streaming] {
                let mut target = vec![0; expected.len()];
                let copier = Copier::new(threads).unwrap().with_stores(stores);
                copier.copy(&copy, &source, &mut target).unwrap();
                assert!(target == expected, "{threads} threads, {stores:?}, rows of {run}");
            }
        }
    }
}
