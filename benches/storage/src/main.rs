//! Compares ways to store pages: raw files, the tier `hicache-file`, SGLang, NIXL and foyer. See `run.sh`.
//!
//! A round writes and reads every page once with each way in turn. See `plugins/hicache-file/benches/tier.rs`.

mod foyer_cache;
mod nixl;
mod sglang;
#[path = "../../../plugins/hicache-file/benches/support/ways.rs"]
mod ways;

use std::path::PathBuf;

use ways::{Bench, Way, number, table};

fn main() {
    let above = std::env::var_os("TIER_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = tempfile::tempdir_in(above).unwrap();
    let mut bench = Bench::new(dir.path());
    let uring = |bench: &Bench| bench.tier_both("io = 'uring'");
    let unpinned = |bench: &Bench| bench.tier_both("io = 'uring'\npinned_mib = 0");
    let threads = |bench: &Bench| bench.tier_both("io = 'threads'");
    let child = sglang::Child::start();
    let hicache_file = |bench: &Bench| child.as_ref().unwrap().both(bench);
    let nixl = |bench: &Bench| nixl::both(bench, true);
    let nixl_buffered = |bench: &Bench| nixl::both(bench, false);
    let paced = |bench: &Bench| foyer_cache::both(bench, Some(64 << 20));
    let burst = |bench: &Bench| foyer_cache::both(bench, None);
    let mut all: Vec<Way<'_>> = vec![
        ("raw", &Bench::raw_both),
        ("hicache-file, io_uring", &uring),
        ("hicache-file, pinned_mib = 0", &unpinned),
        ("hicache-file, threads", &threads),
    ];
    match &child {
        Some(_) => all.push(("SGLang HiCacheFile", &hicache_file)),
        None => println!("SGLang is left out: run benches/storage/install.sh"),
    }
    match std::env::var_os("NIXL_LIBRARY") {
        Some(_) => {
            all.push(("NIXL POSIX through the tier, O_DIRECT", &nixl));
            all.push(("NIXL POSIX through the tier, buffered", &nixl_buffered));
        }
        None => println!("NIXL is left out: run benches/storage/install.sh, or set NIXL_LIBRARY"),
    }
    all.push(("foyer, paced", &paced));
    all.push(("foyer, burst", &burst));
    // Raw always runs, as the first way: the other ways are compared with it.
    let wanted = std::env::var("STORAGE_WAYS").unwrap_or_default();
    all.retain(|(name, _)| {
        *name == "raw" || wanted.is_empty() || wanted.split(',').any(|part| name.contains(part))
    });
    table(&mut bench, &all, number("TIER_BENCH_MIB", 1024), number("TIER_BENCH_ROUNDS", 5));
}
