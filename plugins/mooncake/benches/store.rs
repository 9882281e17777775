//! Compares the tier with Mooncake Store alone: the same pages through the tier, and through the wheel's own Python API, in turns.
//!
//! `cargo bench -p host-plugin-mooncake --bench store`, where `cargo xtask test` has installed the wheel.
//!
//! 256 MiB in each round. Each pass has processes of its own: a master, one that lends the memory, and one for each side,
//! all with the same settings of Mooncake's. Both sides register shared memory like a worker's, once, use names of the same
//! length, and make calls of at most 1024 keys. Python makes one call after the other, as its users do. Both sides have the
//! same two processors, and the lender and the master one each, because rounds of the same side differ by half when threads
//! are not bound to processors. The side that comes first changes from round to round, and the lent memory is written once
//! before. The ratio is computed within a pass, from medians. The table shows the median of the passes' ratios, with the
//! lowest and the highest, and the medians of all rounds in GB/s of 10^9 bytes. `BENCH_RAW` prints all rounds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods)]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::BorrowedFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use host_memory::SharedMemory;
use host_plugin_api::*;
use host_tests::{mooncake, mooncake_pool};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{CpuSet, sched_setaffinity};

const BYTES: usize = 256 << 20;
/// Even, so that each side is as often the first as the second.
const ROUNDS: usize = 6;
const PASSES: usize = 5;
const PAGES: [usize; 3] = [64 << 10, 1 << 20, 4 << 20];
const LENT_MIB: u32 = 1024;
/// The settings of the plugin, so that no limit slows either side down.
const SETTINGS: [(&str, &str); 5] = [
    ("MC_TCP_ENABLE_CONNECTION_POOL", "1"),
    ("MC_LOG_LEVEL", "ERROR"),
    ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"),
    ("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535"),
    ("MC_TCP_ADMISSION_TIMEOUT_MS", "60000"),
];
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
    keys = [f'python/{round}/{page}/{n}'.ljust(72, '.') for n in range(size // page)]
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

/// Binds this thread, and threads and processes that it starts from now on, to these processors, if the machine has them.
fn keep_to(processors: &[usize]) {
    let mut set = CpuSet::new();
    processors.iter().for_each(|processor| set.set(*processor));
    if let Err(error) = sched_setaffinity(None, &set) {
        eprintln!("threads go where they like, and rounds scatter: no processors {processors:?}: {error}");
    }
}

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
            .envs(SETTINGS)
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

    fn seconds(&mut self, what: &str, page: usize, round: usize) -> f64 {
        writeln!(self.asks, "{what} {page} {round}").unwrap();
        self.line().parse().unwrap()
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
    if std::env::var_os("PASS").is_some() {
        return pass(&pool);
    }
    let passes: Vec<Vec<Round>> = (0..PASSES).map(rounds).collect();
    println!("| pages | | tier, GB/s | wheel | ratio | from | to |");
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: |");
    for (page, what) in PAGES.into_iter().flat_map(|page| [(page, "put"), (page, "get")]) {
        let of = |rounds: &mut dyn Iterator<Item = &Round>, side: &str| {
            median(rounds.filter(|of| of.is(page, what, side)).map(|of| of.seconds).collect())
        };
        let [ours, theirs] =
            ["ours", "theirs"].map(|side| BYTES as f64 / of(&mut passes.iter().flatten(), side) / 1e9);
        let ratio = |pass: &Vec<Round>| of(&mut pass.iter(), "theirs") / of(&mut pass.iter(), "ours");
        let mut ratios: Vec<f64> = passes.iter().map(ratio).collect();
        ratios.sort_by(f64::total_cmp);
        let (from, middle, to) = (ratios[0], ratios[PASSES / 2], ratios[PASSES - 1]);
        let page = page >> 10;
        println!("| {page} KiB | {what} | {ours:.2} | {theirs:.2} | {middle:.2} | {from:.2} | {to:.2} |");
    }
}

/// The result of one side in one round of a pass.
struct Round {
    page: usize,
    what: String,
    side: String,
    seconds: f64,
}

impl Round {
    fn is(&self, page: usize, what: &str, side: &str) -> bool {
        (self.page, self.what.as_str(), self.side.as_str()) == (page, what, side)
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    f64::midpoint(seconds[(seconds.len() - 1) / 2], seconds[seconds.len() / 2])
}

/// Runs a pass, in a process of its own as Python's side is, and returns its rounds.
fn rounds(number: usize) -> Vec<Round> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output =
        command.arg("--bench").env("PASS", "1").envs(SETTINGS).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "pass {number}: {}", output.status);
    let said = String::from_utf8(output.stdout).unwrap();
    if std::env::var_os("BENCH_RAW").is_some() {
        said.lines().for_each(|line| eprintln!("{number} {line}"));
    }
    let round = |line: &str| {
        let [page, what, side, seconds] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let (page, seconds) = (page.parse().unwrap(), seconds.parse().unwrap());
        Round { page, what: what.to_owned(), side: side.to_owned(), seconds }
    };
    said.lines().filter_map(|line| line.strip_prefix("@ ")).map(round).collect()
}

/// Runs a pass: measures the tier and Python's side, and prints what each took.
fn pass(pool: &mooncake_pool::Pool) {
    keep_to(&[3]);
    let _master = pool.master();
    keep_to(&[2]);
    let _owner = pool.owner(LENT_MIB);
    keep_to(&[0, 1]);
    let mut python = Python::start(pool);
    let memory = SharedMemory::new("bench", BYTES).unwrap();
    // SAFETY: the whole mapping, which nothing else knows yet.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.address().as_ptr(), BYTES) };
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 7) as u8);
    let more = std::env::var("STORE_BENCH_CONFIG").unwrap_or_default();
    let config = pool.config(&format!("global_segment_size = \"0\"\nstore_deadline_ms = 60000\n{more}"));
    let tier = host_plugin_mooncake::open_storage(&Opening { name: "bench".into(), config }).unwrap();
    let region = tier.register(&Memory {
        address: Address::of(memory.address().as_ptr()),
        length: BYTES as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 1,
        fd_offset: 0,
    });
    let region = region.unwrap().0;
    // Writes the pool's memory once: the first write to a place waits until the system gives the memory.
    let fill = ROUNDS + 1..ROUNDS + 1 + LENT_MIB as usize / 4 * 3 / (BYTES >> 20);
    for (what, round) in fill.clone().map(|round| ("put", round)).chain(fill.map(|round| ("remove", round))) {
        python.seconds(what, 1 << 20, round);
    }
    for page in PAGES {
        // The first round is not counted.
        for round in 0..=ROUNDS {
            let pages = pages(region, page, round);
            let mut one = |side: &str, what: &str| match side {
                "ours" => {
                    let start = Instant::now();
                    run(&tier, &pages, what);
                    start.elapsed().as_secs_f64()
                }
                _ => python.seconds(if what == "delete" { "remove" } else { what }, page, round),
            };
            let sides = if round % 2 == 0 { ["ours", "theirs"] } else { ["theirs", "ours"] };
            for what in ["put", "get", "delete"] {
                for side in sides {
                    let seconds = one(side, what);
                    if round > 0 && what != "delete" {
                        println!("@ {page} {what} {side} {seconds:.6}");
                    }
                }
            }
        }
    }
    tier.shutdown(10_000).unwrap();
}

fn pages(region: u32, page: usize, run: usize) -> Vec<TierPage> {
    let of = |number: usize| {
        let mut key = [run as u8; 32];
        key[..8].copy_from_slice(&(number as u64).to_le_bytes());
        key[8..16].copy_from_slice(&(page as u64).to_le_bytes());
        TierPage {
            key: Key(key),
            region: RegionId(region),
            length: page as u32,
            offset: (number * page) as u64,
        }
    };
    (0..BYTES / page).map(of).collect()
}

/// Moves all pages in batches, all of which are in flight at once.
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
