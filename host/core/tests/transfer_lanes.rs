//! The transfer planner against an element-wise copy: any two layouts, numbers of ranks, head counts, row sizes and lists
//! of pages. Every lane puts every row of its heads to its place, nothing else is written, nothing is written twice, and
//! no plan has more runs than there are contiguous stretches. Case numbers and seeds are proptest's: a failure prints
//! the smallest case it found.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should panic")]

mod lanes {
    pub mod world;
}

use host_core::PageId;
use host_core::heads::{head_lanes, rank_heads};
use host_core::layout::{Dtype, KvLayout, KvOrder, KvShape};
use host_core::transfer::{Cut, KvSlice, Lane, PlanError, StagedPiece, copy_lane, plan_lane};
use lanes::world::{Case, World, case, fewest};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

fn for_cases(cases: u32, check: impl Fn(&Case) -> Result<(), TestCaseError>) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    if let Err(error) = TestRunner::new(config).run(&case(), |case| check(&case)) {
        panic!("{error}");
    }
}

#[test]
fn every_lane_puts_every_row_of_its_heads_to_its_place_once_and_writes_nothing_else() {
    for_cases(600, |case| {
        let mut world = World::new(case);
        for lane in head_lanes(case.kv_heads, case.sources, case.targets) {
            let plan = world.lane(&lane);
            let runs = plan_lane(&plan, &case.source_pages, &case.target_pages, case.layers.clone()).unwrap();
            world.write(&lane, &runs);
        }
        world.check()
    });
}

#[test]
fn a_plan_has_no_more_runs_than_there_are_contiguous_stretches_and_knows_its_size_unexpanded() {
    for_cases(600, |case| {
        let world = World::new(case);
        for lane in head_lanes(case.kv_heads, case.sources, case.targets) {
            let plan = world.lane(&lane);
            let copy = copy_lane(&plan, &case.source_pages, &case.target_pages, case.layers.clone()).unwrap();
            let runs = copy.runs();
            prop_assert_eq!(copy.size().runs, runs.len());
            prop_assert_eq!(copy.size().bytes, runs.iter().map(|run| run.length).sum::<usize>());
            let fewest = fewest(&plan, case);
            if case.one_order() {
                prop_assert_eq!(runs.len(), fewest, "{:?}", copy);
            } else {
                // In a transposed copy, the last run of a page can touch the first run of the next page. Each group of two or more
                // runs that do not touch has at most one such place.
                prop_assert!(runs.len() <= 2 * fewest, "{} for {}: {:?}", runs.len(), fewest, copy);
            }
        }
        Ok(())
    });
}

#[test]
fn blocks_and_pages_describe_the_same_copy_as_the_runs() {
    for_cases(300, |case| {
        let mut world = World::new(case);
        for lane in head_lanes(case.kv_heads, case.sources, case.targets) {
            let plan = world.lane(&lane);
            let copy = copy_lane(&plan, &case.source_pages, &case.target_pages, case.layers.clone()).unwrap();
            world.write_blocks(&lane, &copy);
        }
        world.check()
    });
}

#[test]
fn gathered_into_dense_buffers_and_scattered_out_of_them_every_row_is_in_its_place() {
    // Pieces as large as the lane, and as small as they can be.
    for_cases(400, |case| {
        for piece_bytes in [usize::MAX, case.piece_bytes()] {
            let mut world = World::new(case);
            for lane in head_lanes(case.kv_heads, case.sources, case.targets) {
                let Lane { source, target, heads } = world.lane(&lane);
                let shape = source.layout.shape;
                let cut = Cut::new(&shape, case.source_pages.len(), case.layers.clone(), heads, piece_bytes)
                    .unwrap();
                for piece in (0..cut.pieces()).map(|number| cut.piece(number).unwrap()) {
                    let StagedPiece { pages, layers, heads } = piece.clone();
                    let dense = piece.slice(shape);
                    let numbers: Vec<PageId> = (0..pages.len() as u32).map(PageId).collect();
                    let gather = Lane { source, target: dense, heads: heads.clone() };
                    let scatter = Lane { source: dense, target, heads };
                    let (from, to) = (&case.source_pages[pages.clone()], &case.target_pages[pages]);
                    let gathered = plan_lane(&gather, from, &numbers, layers.clone()).unwrap();
                    let scattered = plan_lane(&scatter, &numbers, to, layers).unwrap();
                    world.write_through(&lane, dense.layout.bytes(), &gathered, &scattered);
                }
            }
            world.check()?;
        }
        Ok(())
    });
}

/// A model of 8 KV heads of 128, 4 layers, 16 tokens a page.
fn pool(order: KvOrder, heads: usize) -> KvLayout {
    let (layers, page_tokens, head_dim) = (4, 16, 128);
    let shape =
        KvShape { pages: 64, heads, layers, page_tokens, head_dim, value_dim: head_dim, dtype: Dtype::Bf16 };
    KvLayout::new(shape, order)
}

#[test]
fn a_lane_of_some_heads_is_one_run_a_page_in_the_default_layout_and_one_a_token_in_the_engines() {
    let (default, nhd) = (KvOrder::PageHeadLayerKvTokenDim, KvOrder::LayerKvPageTokenHeadDim);
    let pages: Vec<PageId> = (3..23).map(PageId).collect();
    let scattered: Vec<PageId> = (0..20).map(|index| PageId(60 - 2 * index)).collect();
    // (order, heads of source and target, runs of 20 neighbouring pages, of 20 scattered ones)
    for (order, [from, to], neighbours, apart) in [
        (default, [8, 8], 1, 20),
        (default, [2, 8], 20, 20),
        (default, [8, 2], 20, 20),
        (KvOrder::PageLayerHeadKvTokenDim, [8, 8], 1, 20),
        (KvOrder::PageLayerHeadKvTokenDim, [2, 8], 20 * 4, 20 * 4),
        (nhd, [8, 8], 4 * 2, 20 * 4 * 2),
        (nhd, [2, 8], 20 * 4 * 2 * 16, 20 * 4 * 2 * 16),
        (nhd, [8, 2], 20 * 4 * 2 * 16, 20 * 4 * 2 * 16),
    ] {
        let share = |heads: usize| KvSlice::pool(pool(order, heads), 8 - heads);
        let lane = Lane { source: share(from), target: share(to), heads: 8 - from.min(to)..8 };
        let count = |to: &[PageId]| copy_lane(&lane, &pages, to, 0..4).unwrap().size();
        assert_eq!(count(&pages).runs, neighbours, "{order} {from} {to}");
        assert_eq!(count(&scattered).runs, apart, "{order} {from} {to}");
        let whole = order != nhd && from == to;
        assert_eq!(count(&pages).whole_pages, whole, "{order} {from} {to}");
    }
}

#[test]
fn k_and_v_rows_of_different_sizes_are_one_run_where_they_follow_each_other() {
    // (order, pages of the pool, runs of one whole page, of two layers of it)
    for (order, pages, whole, some) in [
        (KvOrder::PageHeadLayerKvTokenDim, 64, 1, 8),
        (KvOrder::PageLayerHeadKvTokenDim, 64, 1, 1),
        (KvOrder::LayerKvPageTokenHeadDim, 64, 4 * 2, 2 * 2),
        (KvOrder::LayerKvPageTokenHeadDim, 1, 1, 1),
    ] {
        let shape = KvShape { pages, head_dim: 192, ..pool(order, 8).shape };
        let share = KvSlice::pool(KvLayout::new(shape, order), 0);
        let lane = Lane { source: share, target: share, heads: 0..8 };
        let count = |layers| {
            let size = copy_lane(&lane, &[PageId(0)], &[PageId(0)], layers).unwrap().size();
            (size.runs, size.bytes)
        };
        let layer = 8 * 16 * (192 + 128) * 2;
        assert_eq!(count(0..4), (whole, 4 * layer), "{order} of {pages} pages");
        assert_eq!(count(1..3), (some, 2 * layer), "{order} of {pages} pages");
    }
}

#[test]
fn neighbouring_pages_are_one_run_in_whatever_order_they_are_named() {
    let share = KvSlice::pool(pool(KvOrder::PageHeadLayerKvTokenDim, 8), 0);
    let lane = Lane { source: share, target: share, heads: 0..8 };
    let pages = |numbers: [u32; 4]| numbers.map(PageId);
    let runs = plan_lane(&lane, &pages([7, 5, 6, 4]), &pages([17, 15, 16, 14]), 0..4).unwrap();
    assert_eq!(runs.len(), 1);
    // Pages that are neighbours on one side only do not merge.
    let runs = plan_lane(&lane, &pages([4, 5, 6, 7]), &pages([17, 16, 15, 14]), 0..4).unwrap();
    assert_eq!(runs.len(), 4);
}

#[test]
fn lanes_start_at_the_right_heads_of_both_pools() {
    // Ranks of both sides, KV heads, and for each lane: sender, receiver, first head in the sender's pool, heads, first head
    // in the receiver's pool. Of senders that hold the same heads, one sends them.
    type Lanes = Vec<[usize; 5]>;
    let cases: [([usize; 3], Lanes); 10] = [
        ([4, 1, 8], vec![[0, 0, 0, 2, 0], [1, 0, 0, 2, 2], [2, 0, 0, 2, 4], [3, 0, 0, 2, 6]]),
        ([8, 4, 8], (0..8).map(|p| [p, p / 2, 0, 1, p % 2]).collect()),
        ([8, 2, 4], vec![[0, 0, 0, 1, 0], [2, 0, 0, 1, 1], [4, 1, 0, 1, 0], [6, 1, 0, 1, 1]]),
        ([8, 1, 2], vec![[0, 0, 0, 1, 0], [4, 0, 0, 1, 1]]),
        ([2, 4, 8], vec![[0, 0, 0, 2, 0], [0, 1, 2, 2, 0], [1, 2, 0, 2, 0], [1, 3, 2, 2, 0]]),
        ([1, 4, 2], vec![[0, 0, 0, 1, 0], [0, 1, 0, 1, 0], [0, 2, 1, 1, 0], [0, 3, 1, 1, 0]]),
        ([4, 8, 4], (0..8).map(|d| [d / 2, d, 0, 1, 0]).collect()),
        ([2, 8, 2], (0..8).map(|d| [d / 4, d, 0, 1, 0]).collect()),
        // Ranks that do not divide each other, nor the heads.
        ([2, 3, 8], vec![[0, 0, 0, 2, 0], [0, 1, 2, 2, 0], [1, 1, 0, 1, 2], [1, 2, 1, 3, 0]]),
        ([3, 2, 4], vec![[0, 0, 0, 1, 0], [1, 0, 0, 1, 1], [2, 1, 0, 2, 0]]),
    ];
    for ([sources, targets, kv_heads], expected) in cases {
        let found: Lanes = head_lanes(kv_heads, sources, targets)
            .into_iter()
            .map(|lane| {
                let share = |ranks, rank| {
                    let heads = rank_heads(kv_heads, ranks, rank);
                    KvSlice::pool(pool(KvOrder::PageHeadLayerKvTokenDim, heads.len()), heads.start)
                };
                let (source, target) = (share(sources, lane.source), share(targets, lane.target));
                let plan = Lane { source, target, heads: lane.heads };
                let [run] = plan_lane(&plan, &[PageId(0)], &[PageId(0)], 0..4).unwrap()[..] else {
                    panic!("one page is one run");
                };
                let head = source.layout.sides[0].head;
                [lane.source, lane.target, run.source / head, run.length / head, run.target / head]
            })
            .collect();
        assert_eq!(found, expected, "{sources} to {targets} ranks of {kv_heads} heads");
    }
}

#[test]
fn shares_that_lack_what_is_asked_for_are_refused_by_name() {
    let order = KvOrder::PageHeadLayerKvTokenDim;
    let lane = |heads| Lane {
        source: KvSlice::pool(pool(order, 4), 0),
        target: KvSlice::pool(pool(order, 4), 2),
        heads,
    };
    let refusal = |lane: &Lane, layers, pages: &[PageId]| {
        plan_lane(lane, pages, &[PageId(0)], layers).unwrap_err().to_string()
    };
    let one = &[PageId(0)];
    assert_eq!(refusal(&lane(0..4), 0..4, one), "heads 0 to 4 of a pool of heads 2 to 6");
    assert_eq!(refusal(&lane(2..5), 0..4, one), "heads 2 to 5 of a pool of heads 0 to 4");
    assert_eq!(refusal(&lane(2..4), 1..5, one), "layers 1 to 5 of a pool of layers 0 to 4");
    assert_eq!(refusal(&lane(2..4), 0..4, &[PageId(64)]), "page 64 lies outside a pool of 64 pages");
    assert_eq!(refusal(&lane(2..4), 0..4, &[]), "0 pages sent for 1 expected");
    let dense = KvSlice::dense(pool(order, 4).shape, 1, 2..4, 1..3);
    let gather = Lane { target: dense, ..lane(2..4) };
    assert_eq!(refusal(&gather, 0..2, one), "layers 0 to 2 of a pool of layers 1 to 3");
    let mut other = lane(2..4);
    other.target.layout.shape.value_dim = 64;
    let message = refusal(&other, 0..4, one);
    assert!(message.contains("x 128 bf16") && message.contains("x 128/64 bf16"), "{message}");
    #[expect(clippy::reversed_empty_ranges, reason = "what a peer may ask for")]
    let backwards = plan_lane(&lane(2..4), one, one, 3..1);
    assert!(matches!(backwards, Err(PlanError::Layers { .. })));
}
