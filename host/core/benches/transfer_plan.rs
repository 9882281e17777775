//! The time to plan a transfer: from two layouts and two lists of pages to the runs that are written.
//!
//! `cargo bench -p host-core --bench transfer_plan`
//!
//! The model has 64 layers and 8 KV heads of 128 (bf16). One lane of each case sends 512 pages of 16 tokens, no two of
//! which are neighbours on either side. "Planned" means that all runs are handed out. "Sized" means that they are
//! counted, which the choice between direct and staged needs. Times are the best of 20, in microseconds, and in
//! nanoseconds a run.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use host_core::PageId;
use host_core::heads::{head_lanes, rank_heads};
use host_core::layout::{Dtype, KvLayout, KvOrder, KvShape};
use host_core::transfer::{KvSlice, Lane, copy_lane};

const HEADS: usize = 8;
const LAYERS: usize = 64;
const PAGES: u32 = 512;

fn main() {
    println!(
        "{:<30} {:>6} {:>9} {:>10} {:>11} {:>9} {:>9}",
        "layout", "ranks", "runs", "bytes each", "planned us", "ns/run", "sized us"
    );
    for order in KvOrder::ALL {
        for (sources, targets) in [(1, 1), (4, 1), (2, 4)] {
            measure(order, sources, targets);
        }
    }
}

fn measure(order: KvOrder, sources: usize, targets: usize) {
    let lane = &head_lanes(HEADS, sources, targets)[0];
    let share = |ranks: usize, rank: usize| {
        let heads = rank_heads(HEADS, ranks, rank);
        let shape = KvShape {
            pages: 2 * PAGES as usize,
            heads: heads.len(),
            layers: LAYERS,
            page_tokens: 16,
            head_dim: 128,
            value_dim: 128,
            dtype: Dtype::Bf16,
        };
        KvSlice::pool(KvLayout::new(shape, order), heads.start)
    };
    let lane = Lane {
        source: share(sources, lane.source),
        target: share(targets, lane.target),
        heads: lane.heads.clone(),
    };
    // A permutation of all pages, as pools hand them out after some use.
    let from: Vec<PageId> = (0..PAGES).map(|index| PageId(index * 389 % PAGES * 2)).collect();
    let to: Vec<PageId> = (0..PAGES).map(|index| PageId(index * 137 % PAGES * 2)).collect();
    let plan = || copy_lane(black_box(&lane), black_box(&from), black_box(&to), 0..LAYERS);
    let planned = best(|| {
        let mut sum = 0;
        if let Ok(copy) = plan() {
            copy.each(|run| sum += run.source ^ run.target);
        }
        sum
    });
    let sized = best(|| plan().map(|copy| copy.size().runs).unwrap_or_default());
    let size = plan().map(|copy| copy.size()).unwrap_or_default();
    println!(
        "{:<30} {:>6} {:>9} {:>10} {:>11.1} {:>9.1} {:>9.1}",
        order.to_string(),
        format!("{sources}->{targets}"),
        size.runs,
        size.bytes / size.runs.max(1),
        planned.as_secs_f64() * 1e6,
        planned.as_secs_f64() * 1e9 / size.runs.max(1) as f64,
        sized.as_secs_f64() * 1e6,
    );
}

fn best(mut work: impl FnMut() -> usize) -> Duration {
    let times = (0..20).map(|_| {
        let start = Instant::now();
        black_box(work());
        start.elapsed()
    });
    times.min().unwrap_or_default()
}
