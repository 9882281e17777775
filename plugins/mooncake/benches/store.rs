//! What the tier leaves of Mooncake Store: the same pages through the tier, and through the wheel's own Python API in a process
//! of its own, in turns, with one master and one process that lends the memory.
//!
//! `cargo bench -p host-plugin-mooncake --bench store`, where `cargo xtask test` has installed the wheel.
//!
//! 256 MiB in each round, medians of 7 rounds, in GB/s of 10^9 bytes, and the median of the rounds' ratios. Both register
//! their memory, shared like a worker's, once, and make calls of at most 1024 keys; Python makes one call after the other, as its users do.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods)]

#[path = "../../../host/tests/plugin_support/mooncake.rs"]
mod mooncake;
#[path = "../../../host/tests/plugin_support/mooncake_pool.rs"]
mod mooncake_pool;
#[path = "../../../host/tests/plugin_support/skip.rs"]
mod skip;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::BorrowedFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use host::executor::memory::SharedMemory;
use host_plugin_api::*;
use rustix::event::{PollFd, PollFlags, poll};

const BYTES: usize = 256 << 20;
const ROUNDS: usize = 7;
const BATCH: usize = 1024;

/// Reads lines `put|get|remove PAGE ROUND`, answers each with seconds.
const SCRIPT: &str = "
import mmap, os, sys, time, ctypes
from mooncake.store import MooncakeDistributedStore
master, size = sys.argv[1], int(sys.argv[2])
store = MooncakeDistributedStore()
assert store.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 16 << 20, 'tcp', '', master) == 0
shared = os.memfd_create('python')
os.ftruncate(shared, size)
memory = mmap.mmap(shared, size)
for at in range(0, size, 4096):
    memory[at] = at // 4096 % 251
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert store.register_buffer(base, size) == 0
print('ready', flush=True)
for line in sys.stdin:
    what, page, round = line.split()
    page = int(page)
    keys = [f'python/{round}/{page}/{n}' for n in range(size // page)]
    places = [base + n * page for n in range(size // page)]
    sizes = [page] * len(keys)
    start = time.perf_counter()
    for at in range(0, len(keys), 1024):
        part = slice(at, at + 1024)
        if what == 'put':
            assert set(store.batch_put_from(keys[part], places[part], sizes[part])) == {0}
        elif what == 'get':
            assert set(store.batch_get_into(keys[part], places[part], sizes[part])) == {page}
        else:
            for key in keys[part]:
                store.remove(key, True)
    print(time.perf_counter() - start, flush=True)
";

struct Python {
    child: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Python {
    fn start(pool: &mooncake_pool::Pool) -> Self {
        let installed = mooncake::installed().unwrap();
        let mut child = Command::new(installed.python())
            .args(["-c", SCRIPT, &pool.address.to_string(), &BYTES.to_string()])
            .envs(pool.environment())
            // As the plugin sets them.
            .envs([
                ("MC_TCP_ENABLE_CONNECTION_POOL", "1"),
                ("MC_LOG_LEVEL", "WARNING"),
                ("MC_FORCE_TCP", "1"),
            ])
            .envs([
                ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"),
                ("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535"),
                ("MC_TCP_ADMISSION_TIMEOUT_MS", "60000"),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (asks, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut python = Self { child, asks, answers };
        while python.line() != "ready" {}
        python
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.answers.read_line(&mut line).unwrap() > 0, "python ended");
        line.trim().to_owned()
    }

    /// GB/s.
    fn rate(&mut self, what: &str, page: usize, round: usize) -> f64 {
        writeln!(self.asks, "{what} {page} {round}").unwrap();
        BYTES as f64 / self.line().parse::<f64>().unwrap() / 1e9
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _gone = self.child.kill().and_then(|()| self.child.wait()).is_err();
    }
}

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let Some(pool) = mooncake_pool::Pool::new() else { return };
    let (_master, _owner) = (pool.master(), pool.owner(1024));
    let mut python = Python::start(&pool);
    let memory = SharedMemory::new("bench", BYTES).unwrap();
    // SAFETY: the whole mapping, which nobody else knows yet.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.address().as_ptr(), BYTES) };
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 7) as u8);
    let more = std::env::var("STORE_BENCH_CONFIG").unwrap_or_default();
    let config = pool.config(&format!("global_segment_size = \"0\"\nstore_deadline_ms = 60000\n{more}"));
    let tier = host_plugin_mooncake::open_storage(&Opening { name: "bench".into(), config }).unwrap();
    let region = tier.register(&Memory {
        address: memory.address().as_ptr() as u64,
        length: BYTES as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 1,
        fd_offset: 0,
    });
    let region = region.unwrap().0;
    println!("     page        put     python      ratio        get     python      ratio");
    for page in [64 << 10, 1 << 20, 4 << 20] {
        let mut figures: [Vec<f64>; 6] = Default::default();
        // The first round is not counted.
        for round in 0..=ROUNDS {
            let pages = pages(region, page, round);
            let ours = |what: &str| {
                let start = Instant::now();
                run(&tier, &pages, what);
                BYTES as f64 / start.elapsed().as_secs_f64() / 1e9
            };
            let [put, get] = match round % 2 {
                0 => ["put", "get"].map(|what| (ours(what), python.rate(what, page, round))),
                _ => ["put", "get"].map(|what| {
                    let theirs = python.rate(what, page, round);
                    (ours(what), theirs)
                }),
            };
            ours("delete");
            python.rate("remove", page, round);
            if round > 0 {
                for (at, (ours, theirs)) in [put, get].into_iter().enumerate() {
                    figures[at * 3].push(ours);
                    figures[at * 3 + 1].push(theirs);
                    figures[at * 3 + 2].push(ours / theirs);
                }
            }
        }
        let medians = figures.map(|mut of| {
            of.sort_by(f64::total_cmp);
            format!(" {:>10.3}", of[ROUNDS / 2])
        });
        println!("{:>5} KiB{}", page >> 10, medians.concat());
    }
    tier.shutdown(10_000).unwrap();
}

fn pages(region: u32, page: usize, run: usize) -> Vec<TierPage> {
    let of = |number: usize| {
        let mut key = [run as u8; 32];
        key[..8].copy_from_slice(&(number as u64).to_le_bytes());
        key[8..16].copy_from_slice(&(page as u64).to_le_bytes());
        TierPage { key: Key(key), region, length: page as u32, offset: (number * page) as u64 }
    };
    (0..BYTES / page).map(of).collect()
}

/// All pages, in batches, all of which are in flight.
fn run(tier: &dyn StorageTier, pages: &[TierPage], what: &str) {
    let mut left = 0;
    for (tag, batch) in pages.chunks(BATCH).enumerate() {
        let keys: Vec<Key> = batch.iter().map(|page| page.key).collect();
        let tag = Tag(tag as u64);
        let code = match what {
            "put" => tier.put(tag, batch),
            "get" => tier.get(tag, batch),
            _ => tier.delete(tag, &keys),
        };
        assert_eq!(code, 0);
        left += batch.len();
    }
    let mut done = [TierCompletion::default(); 256];
    while left > 0 {
        // SAFETY: the descriptor is the instance's, which lives longer than this call.
        let event = unsafe { BorrowedFd::borrow_raw(tier.event_fd()) };
        poll(&mut [PollFd::new(&event, PollFlags::IN)], None).unwrap();
        let count = tier.poll(&mut done) as usize;
        assert!(done[..count].iter().all(|end| end.status == 1), "{what}: {:?}", &done[..count]);
        left -= count;
    }
}
