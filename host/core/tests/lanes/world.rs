//! The pools of two workers, byte by byte, and their expected contents.

use std::ops::Range;

use host_core::PageId;
use host_core::heads::{HeadLane, rank_heads};
use host_core::layout::{Dtype, KvLayout, KvOrder, KvShape};
use host_core::transfer::{KvSlice, Lane, PagesCopy, Run};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

/// One transfer between two workers.
#[derive(Clone, Debug)]
pub struct Case {
    /// KV heads of the model.
    pub kv_heads: usize,
    /// Ranks of the sender.
    pub sources: usize,
    /// Ranks of the receiver.
    pub targets: usize,
    source_order: KvOrder,
    target_order: KvOrder,
    shape: KvShape,
    target_pool: usize,
    piece_size: u8,
    /// Layers that are sent.
    pub layers: Range<usize>,
    /// Pages of the sender.
    pub source_pages: Vec<PageId>,
    /// Pages of the receiver, none twice.
    pub target_pages: Vec<PageId>,
}

impl Case {
    /// Both sides have the same layout.
    pub fn one_order(&self) -> bool {
        self.source_order == self.target_order
    }

    /// A size for pieces of a staged lane: from one head of one layer of one page up to about two pages.
    pub fn piece_bytes(&self) -> usize {
        let blocks = 1 + self.piece_size as usize % (2 * self.kv_heads * self.shape.layers);
        blocks * self.shape.block_bytes()
    }
}

/// Page numbers with neighbours and gaps, the first above 0, and the size of a pool whose last page is free.
fn pages(gaps: &[u32]) -> (Vec<PageId>, usize) {
    let numbers: Vec<u32> =
        gaps.iter().scan(0, |last, gap| Some(std::mem::replace(last, *last + gap) + gap)).collect();
    let pool = numbers.last().map_or(1, |last| last + 2);
    (numbers.into_iter().map(PageId).collect(), pool as usize)
}

pub fn case() -> impl Strategy<Value = Case> {
    let gap = || prop_oneof![3 => Just(1_u32), 1 => 2_u32..4];
    let ranks = (1..=12_usize, 1..=8_usize, 1..=8_usize);
    let orders = (select(&KvOrder::ALL), select(&KvOrder::ALL));
    let sizes = (1..=3_usize, 1..=3_usize, 1..=3_usize, 0..=3_usize, any::<bool>());
    // How target pages are paired with source pages (as they are, or in any order), and the length of a prefix that is there.
    let lists = (0..7_usize).prop_flat_map(move |count| (vec(gap(), count), vec(gap(), count)));
    let pairing = (any::<bool>(), any::<u64>(), 0..4_usize);
    (ranks, orders, sizes, lists, pairing, any::<[u8; 3]>()).prop_map(
        |(ranks, orders, sizes, (from, to), (shuffled, seed, prefix), [start, length, piece_size])| {
            let (layers, page_tokens, head_dim, value_dim, wide) = sizes;
            let dtype = if wide { Dtype::F32 } else { Dtype::Bf16 };
            let (mut source_pages, source_pool) = pages(&from);
            let (mut target_pages, target_pool) = pages(&to);
            if shuffled {
                shuffle(&mut source_pages, seed);
                shuffle(&mut target_pages, seed.rotate_left(17));
            }
            let prefix = prefix.min(source_pages.len());
            let first = start as usize % layers;
            Case {
                kv_heads: ranks.0,
                sources: ranks.1,
                targets: ranks.2,
                source_order: orders.0,
                target_order: orders.1,
                shape: KvShape {
                    pages: source_pool,
                    heads: ranks.0,
                    layers,
                    page_tokens,
                    head_dim,
                    value_dim,
                    dtype,
                },
                target_pool,
                piece_size,
                layers: first..first + 1 + length as usize % (layers - first),
                source_pages: source_pages.split_off(prefix),
                target_pages: target_pages.split_off(prefix),
            }
        },
    )
}

fn shuffle(pages: &mut [PageId], mut seed: u64) {
    for index in (1..pages.len()).rev() {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        pages.swap(index, (seed >> 33) as usize % (index + 1));
    }
}

const UNTOUCHED: u8 = 0xee;

/// One rank's pool, and how often each byte of it was written.
struct Pool {
    share: KvSlice,
    bytes: Vec<u8>,
    written: Vec<u8>,
}

/// All ranks of both workers.
pub struct World<'a> {
    case: &'a Case,
    sources: Vec<Pool>,
    targets: Vec<Pool>,
}

/// Every row of some heads and layers of a page: (head, layer, K or V, token).
fn rows(
    shape: KvShape,
    heads: Range<usize>,
    layers: Range<usize>,
) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    heads.flat_map(move |head| {
        layers.clone().flat_map(move |layer| {
            (0..2).flat_map(move |kv| (0..shape.page_tokens).map(move |token| (head, layer, kv, token)))
        })
    })
}

fn at(share: &KvSlice, page: PageId, (head, layer, kv, token): (usize, usize, usize, usize)) -> Range<usize> {
    let start =
        share.layout.row(page.0 as usize, head - share.first_head, layer - share.first_layer, kv, token);
    start..start + share.layout.shape.row_bytes(kv)
}

/// The byte at a place of a source pool, the same on every rank that holds the head.
fn value(page: PageId, row: (usize, usize, usize, usize), byte: usize) -> u8 {
    let (head, layer, kv, token) = row;
    let number = [page.0 as usize, head, layer, kv, token, byte].iter().fold(0_u64, |sum, part| {
        (sum + *part as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
    });
    (number >> 40) as u8
}

impl<'a> World<'a> {
    pub fn new(case: &'a Case) -> Self {
        let pool = |ranks: usize, rank: usize, order: KvOrder, pages: usize| {
            let heads = rank_heads(case.kv_heads, ranks, rank);
            let shape = KvShape { pages, heads: heads.len(), ..case.shape };
            let share = KvSlice::pool(KvLayout::new(shape, order), heads.start);
            let size = share.layout.bytes();
            Pool { share, bytes: vec![UNTOUCHED; size], written: vec![0; size] }
        };
        let mut sources: Vec<Pool> = (0..case.sources)
            .map(|rank| pool(case.sources, rank, case.source_order, case.shape.pages))
            .collect();
        for Pool { share, bytes, .. } in &mut sources {
            let all = share.layout.shape;
            for page in (0..all.pages as u32).map(PageId) {
                for row in rows(all, share.heads(), share.layers()) {
                    for (byte, place) in at(share, page, row).enumerate() {
                        bytes[place] = value(page, row, byte);
                    }
                }
            }
        }
        let targets = (0..case.targets)
            .map(|rank| pool(case.targets, rank, case.target_order, case.target_pool))
            .collect();
        Self { case, sources, targets }
    }

    /// The pools of a lane.
    pub fn lane(&self, lane: &HeadLane) -> Lane {
        Lane {
            source: self.sources[lane.source].share,
            target: self.targets[lane.target].share,
            heads: lane.heads.clone(),
        }
    }

    pub fn write(&mut self, lane: &HeadLane, runs: &[Run]) {
        copy(&self.sources[lane.source].bytes, &mut self.targets[lane.target], runs);
    }

    /// Copies by blocks with strides, as a machine does that has no lists of runs.
    pub fn write_blocks(&mut self, lane: &HeadLane, copy_of: &PagesCopy) {
        let mut runs = Vec::new();
        for block in copy_of.blocks() {
            for page in copy_of.pages() {
                let [i, j, k] = block.dims.map(|dimension| 0..dimension.extent);
                for (i, j, k) in
                    i.flat_map(|i| j.clone().flat_map(move |j| (0..k.end).map(move |k| (i, j, k))))
                {
                    let steps = [i, j, k].into_iter().zip(block.dims);
                    let (source, target) = steps.fold((0, 0), |(source, target), (index, dimension)| {
                        (source + index * dimension.source, target + index * dimension.target)
                    });
                    runs.push(Run {
                        source: block.source + page[0] as usize * block.source_page + source,
                        target: block.target + page[1] as usize * block.target_page + target,
                        length: block.run,
                    });
                }
            }
        }
        self.write(lane, &runs);
    }

    /// Gathers into a buffer, which must be filled, and scatters out of it.
    pub fn write_through(&mut self, lane: &HeadLane, bytes: usize, gather: &[Run], scatter: &[Run]) {
        let share = self.targets[lane.target].share;
        let mut buffer = Pool { share, bytes: vec![UNTOUCHED; bytes], written: vec![0; bytes] };
        copy(&self.sources[lane.source].bytes, &mut buffer, gather);
        assert!(buffer.written.iter().all(|times| *times == 1), "holes in the buffer");
        copy(&buffer.bytes, &mut self.targets[lane.target], scatter);
    }

    /// Compares every target pool with what an element-wise copy puts there.
    pub fn check(&self) -> Result<(), TestCaseError> {
        let case = self.case;
        for (rank, target) in self.targets.iter().enumerate() {
            let mut expected = vec![UNTOUCHED; target.bytes.len()];
            let mut written = vec![0_u8; target.bytes.len()];
            for (from, to) in case.source_pages.iter().zip(&case.target_pages) {
                for row in rows(case.shape, target.share.heads(), case.layers.clone()) {
                    for (byte, place) in at(&target.share, *to, row).enumerate() {
                        expected[place] = value(*from, row, byte);
                        written[place] = 1;
                    }
                }
            }
            prop_assert_eq!(&target.written, &written, "how often each byte of rank {} is written", rank);
            prop_assert_eq!(&target.bytes, &expected, "rank {}", rank);
        }
        Ok(())
    }
}

fn copy(source: &[u8], target: &mut Pool, runs: &[Run]) {
    for run in runs {
        let to = run.target..run.target + run.length;
        target.bytes[to.clone()].copy_from_slice(&source[run.source..run.source + run.length]);
        target.written[to].iter_mut().for_each(|times| *times += 1);
    }
}

/// The number of contiguous stretches of a lane. Rows that follow each other on both sides count as one stretch.
pub fn fewest(lane: &Lane, case: &Case) -> usize {
    let mut stretches: Vec<Run> = Vec::new();
    for (from, to) in case.source_pages.iter().zip(&case.target_pages) {
        for row in rows(case.shape, lane.heads.clone(), case.layers.clone()) {
            let (source, target) = (at(&lane.source, *from, row), at(&lane.target, *to, row));
            stretches.push(Run { source: source.start, target: target.start, length: source.len() });
        }
    }
    stretches.retain(|run| run.length > 0);
    stretches.sort_by_key(|run| run.source);
    let follows = |a: &Run, b: &Run| a.source + a.length == b.source && a.target + a.length == b.target;
    stretches.chunk_by(follows).count()
}
