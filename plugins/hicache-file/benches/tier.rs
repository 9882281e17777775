//! The file tier beside raw direct reads and writes of the same pages, and beside one file per page, in the same run.
//!
//! `TIER_BENCH_DIR=/on/the/disk cargo bench -p host-plugin-hicache-file --bench tier [-- open | table]`
//! with `TIER_BENCH_MIB` (1024) per page size and way, and `TIER_BENCH_ROUNDS` (5). `open` leaves out the first table,
//! `table` leaves out the rest. `TIER_BENCH_WAYS` selects ways by parts of their names, separated by `;`. Raw always
//! takes part, and the default is all. `TIER_BENCH_PAGE_KIB` selects one page size. The memory has huge pages, as the
//! host's has, unless `TIER_BENCH_SMALL_PAGES` is set.
//!
//! A round writes and reads every page once with each way in turn. The table shows the median of the rounds' GB/s, the
//! median of the rounds' ratios to raw, and processor seconds per GB. Writing ends when `syncfs` has returned. Reading
//! starts with nothing of the files in the page cache.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/ways.rs"]
mod ways;

use std::path::PathBuf;
use std::time::Instant;

use host_plugin_api::*;
use ways::{Bench, Way, forget, measure, number, processor, sync, table};

/// Measures for a million pages of 4 KiB how long the tier takes until it serves, and until it knows all pages.
fn opening(bench: &mut Bench) {
    (bench.page, bench.pages) = (4096, 1 << 20);
    // A machine that is busy with other things must not turn a slow start into a miss.
    let config = "fsync = 'never'\nload_wait_ms = 60000";
    let (tier, region) = bench.tier(config);
    let filled = measure(|| bench.through(&tier, region, |tag, pages| tier.put(tag, pages)));
    tier.shutdown(60_000).unwrap();
    sync(&bench.dir);
    println!("\n{} pages of 4 KiB stored in {:.1} s", bench.pages, filled.seconds);
    println!("| page cache | open | first get ends | oldest page found | all known | core s |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    for cold in [true, true, true, false, false, false] {
        if cold {
            forget(&bench.dir.join("tier/tier-v1"));
        }
        let (start, before) = (Instant::now(), processor());
        let (tier, region) = bench.tier(config);
        let opened = start.elapsed();
        let one = |number: usize| {
            let (key, length) = (bench.key(number), 4096);
            assert_eq!(tier.get(Tag(1), &[TierPage { key, region, length, offset: 0 }]), 0);
            let mut done = [TierCompletion::default()];
            while tier.poll(&mut done) == 0 {
                std::thread::yield_now();
            }
            assert_eq!(done[0].status, 1);
            start.elapsed()
        };
        let (first, oldest) = (one(bench.pages - 1), one(0));
        while tier.usage().unwrap().values < bench.pages as u64 {
            std::thread::yield_now();
        }
        let all = start.elapsed();
        let ms = |time: std::time::Duration| format!("{:.1} ms", time.as_secs_f64() * 1e3);
        let (cache, core) = (if cold { "cold" } else { "warm" }, processor() - before);
        println!("| {cache} | {} | {} | {} | {} | {core:.2} |", ms(opened), ms(first), ms(oldest), ms(all));
        if !cold {
            let keys: Vec<Key> = (0..bench.pages).map(|page| bench.key(page * 7919 % bench.pages)).collect();
            let round = measure(|| exists(&tier, &keys));
            println!("exists: {:.2} million keys per second", keys.len() as f64 / round.seconds / 1e6);
        }
    }
    std::fs::remove_dir_all(bench.dir.join("tier")).unwrap();
}

fn exists(tier: &impl StorageTier, keys: &[Key]) {
    let mut batches = keys.chunks(256).enumerate().peekable();
    let mut ended = 0;
    while ended < keys.len() {
        while let Some((tag, keys)) = batches.peek()
            && tier.exists(Tag(*tag as u64), keys) == 0
        {
            batches.next();
        }
        let mut done = [TierCompletion::default(); 256];
        let count = usize::try_from(tier.poll(&mut done)).unwrap();
        assert!(done[..count].iter().all(|done| done.status == 1));
        ended += count;
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    let above = std::env::var_os("TIER_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = tempfile::tempdir_in(above).unwrap();
    let mut bench = Bench::new(dir.path());
    if !arguments.iter().any(|argument| argument == "open") {
        let ways: [Way<'_>; 8] = [
            ("raw", &Bench::raw_both),
            ("tier, io_uring", &|b: &Bench| b.tier_both("io = 'uring'")),
            // Syncs once, in the end, as raw does.
            ("tier, fsync = 'never'", &|b: &Bench| b.tier_both("io = 'uring'\nfsync = 'never'")),
            ("tier, pinned_mib = 0", &|b: &Bench| b.tier_both("io = 'uring'\npinned_mib = 0")),
            ("tier, threads", &|b: &Bench| b.tier_both("io = 'threads'")),
            ("file per page, 1 thread", &|b: &Bench| b.files_both(1, false)),
            ("file per page, 16 threads", &|b: &Bench| b.files_both(16, false)),
            ("same, O_DIRECT", &|b: &Bench| b.files_both(16, true)),
        ];
        let wanted = std::env::var("TIER_BENCH_WAYS").unwrap_or_default();
        let is_wanted =
            |(name, _): &&Way<'_>| *name == "raw" || wanted.split(';').any(|part| name.contains(part.trim()));
        let ways: Vec<Way<'_>> = ways.iter().filter(is_wanted).copied().collect();
        table(&mut bench, &ways, number("TIER_BENCH_MIB", 1024), number("TIER_BENCH_ROUNDS", 5));
    }
    if !arguments.iter().any(|argument| argument == "table") {
        opening(&mut bench);
    }
}
