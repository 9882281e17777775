//! Compares the tier with plain files: the same pages through NIXL's POSIX plugin, buffered and direct, and written and
//! read by one thread with nothing around it, one file for each, in turns.
//!
//! `TIER_BENCH_DIR=/on/the/disk NIXL_LIBRARY=… cargo bench -p host-plugin-nixl --bench tier`
//!
//! 256 MiB in each round, medians of 5 rounds, in GB/s of 10^9 bytes. Writing ends when `syncfs` has returned, reading
//! starts with nothing of the files in the page cache. The plain way computes no checksum and publishes nothing.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use host_memory::SharedMemory;
use host_plugin_api::*;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Advice, Mode, OFlags, fadvise, syncfs};

const BYTES: usize = 256 << 20;
const ROUNDS: usize = 5;
const BATCH: usize = 128;

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let dir = std::env::var_os("TIER_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = dir.join(format!("nixl-tier-bench-{}", std::process::id()));
    let memory = SharedMemory::new("bench", BYTES).unwrap();
    // SAFETY: the whole mapping, which nothing else knows yet.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.address().as_ptr(), BYTES) };
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 7) as u8);
    println!(
        "{:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "page", "put", "put dir.", "write", "get", "get dir.", "read"
    );
    for page in [64 << 10, 1 << 20, 4 << 20] {
        let mut figures: [Vec<f64>; 6] = Default::default();
        for round in 0..ROUNDS {
            for (way, direct) in [(0, false), (1, true)] {
                let tier = open(&dir, direct);
                let region = register(&*tier, &memory);
                let pages = pages(region, page, round * 2 + way);
                figures[way].push(rate(|| {
                    run(&*tier, &pages, |tier, tag, pages| tier.put(tag, pages));
                    sync(&dir);
                }));
                forget(&dir);
                figures[3 + way].push(rate(|| run(&*tier, &pages, |tier, tag, pages| tier.get(tag, pages))));
                tier.shutdown(5000).unwrap();
                std::fs::remove_dir_all(&dir).unwrap();
            }
            std::fs::create_dir_all(&dir).unwrap();
            let file = |number: usize| dir.join(number.to_string());
            figures[2].push(rate(|| {
                for (number, value) in bytes.chunks(page).enumerate() {
                    std::fs::write(file(number), value).unwrap();
                }
                sync(&dir);
            }));
            forget(&dir);
            figures[5].push(rate(|| {
                for (number, value) in bytes.chunks_mut(page).enumerate() {
                    std::fs::File::open(file(number)).unwrap().read_exact_at(value, 0).unwrap();
                }
            }));
            std::fs::remove_dir_all(&dir).unwrap();
        }
        let medians = figures.map(|mut of| {
            of.sort_by(f64::total_cmp);
            format!(" {:>9.3}", of[ROUNDS / 2])
        });
        println!("{:>5} KiB{}", page >> 10, medians.concat());
    }
}

fn rate(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    BYTES as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn sync(dir: &Path) {
    syncfs(rustix::fs::open(dir, OFlags::RDONLY, Mode::empty()).unwrap()).unwrap();
}

/// Drops the files of a directory from the page cache.
fn forget(dir: &Path) {
    for entry in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap()) {
        match entry.file_type().unwrap().is_dir() {
            true => forget(&entry.path()),
            false => fadvise(std::fs::File::open(entry.path()).unwrap(), 0, None, Advice::DontNeed).unwrap(),
        }
    }
}

fn open(dir: &Path, direct: bool) -> Box<dyn StorageTier> {
    let config = format!("[storage]\ndirectory = {:?}\ndirect = {direct}\n", dir.display().to_string());
    Box::new(host_plugin_nixl::open_storage(&Opening { name: "bench".into(), config }).unwrap())
}

fn register(tier: &dyn StorageTier, memory: &SharedMemory) -> u32 {
    let region = tier.register(&Memory {
        address: Address::of(memory.address().as_ptr()),
        length: BYTES as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 1,
        fd_offset: 0,
    });
    region.unwrap().0
}

fn pages(region: u32, page: usize, run: usize) -> Vec<TierPage> {
    let of = |number: usize| {
        let mut key = [run as u8; 32];
        key[..8].copy_from_slice(&(number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        TierPage {
            key: Key(key),
            region: RegionId(region),
            length: page as u32,
            offset: (number * page) as u64,
        }
    };
    (0..BYTES / page).map(of).collect()
}

/// Moves all pages in batches, two of which are in flight.
fn run(
    tier: &dyn StorageTier,
    pages: &[TierPage],
    start: impl Fn(&dyn StorageTier, Tag, &[TierPage]) -> i32,
) {
    let mut batches = pages.chunks(BATCH).enumerate();
    let (mut left, mut flying) = (pages.len(), 0);
    let mut done = [TierCompletion::default(); 64];
    while left > 0 {
        if flying <= BATCH
            && let Some((tag, batch)) = batches.next()
        {
            assert_eq!(start(tier, Tag(tag as u64), batch), 0);
            flying += batch.len();
            continue;
        }
        // SAFETY: the descriptor is the instance's, which lives longer than this call.
        let event = unsafe { BorrowedFd::borrow_raw(tier.event_fd()) };
        poll(&mut [PollFd::new(&event, PollFlags::IN)], None).unwrap();
        let count = tier.poll(&mut done) as usize;
        assert!(done[..count].iter().all(|end| end.status == 1));
        (left, flying) = (left - count, flying - count);
    }
}
