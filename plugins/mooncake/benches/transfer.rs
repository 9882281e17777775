//! Compares the plugin with the wheel's own Python API, in one run: the same bytes, from one process to another over
//! loopback, turn by turn. `cargo bench -p host-plugin-mooncake --bench transfer`, with `MOONCAKE_PYTHON` and
//! `MOONCAKE_PRELOAD` as `cargo xtask test` sets them, or a Python with Mooncake on the path.
//!
//! Both sides move shared memory, as a worker's is, registered and written once before, with the same settings of
//! Mooncake's. The senders of both sides have the same three processors, and the receivers the same other one, because
//! rounds of the same way differ by half when threads are not bound to processors.
//! The four ways take turns, forwards and backwards, so that each comes as early as any other and after each other as
//! often. Passes, each with processes of its own, differ by more than ways do. So the ratio is computed within a pass,
//! from medians, against the way of the wheel that is better over all passes. The better way of each single pass would
//! be chosen by luck. The table shows the median of the passes' ratios, with the lowest and the highest.
//!
//! A round of "ours" is a submission of the plugin without a notification, from the call to its completion: the wheel's
//! writes have no notification, either. A round of "told" has a notification, and completes when the peer has taken it,
//! two messages later. A round of the wheel is one call of `batch_transfer_sync_write`, or one batch per write, polled.
//! `BENCH_RAW` prints all rounds.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use host_plugin_api::RegionId;
use std::io::{BufRead, BufReader, Write as _};
use std::os::fd::BorrowedFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use host_memory::SharedMemory;
use host_plugin_api::*;
use host_plugin_mooncake::{MooncakeBackend, open};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{CpuSet, sched_setaffinity};

const BYTES: usize = 256 << 20;
/// A multiple of eight: each of the four orders forwards and backwards.
const ROUNDS: usize = 8;
const PASSES: usize = 5;
const WAYS: [&str; 4] = ["ours", "told", "sync", "async"];
const COUNTS: [usize; 4] = [1, 256, 1024, 4096];
const CONFIG: &str = "backend = \"python\"\nmax_writes = 4096\nmax_outstanding = 4096\n";

const SENDERS: &[usize] = &[0, 1, 3];
const RECEIVERS: &[usize] = &[2];

/// Binds this thread, and threads and processes that it starts from now on, to these processors, if the machine has them.
fn keep_to(processors: &[usize]) {
    let mut set = CpuSet::new();
    processors.iter().for_each(|processor| set.set(*processor));
    if let Err(error) = sched_setaffinity(None, &set) {
        eprintln!("threads go where they like, and rounds scatter: no processors {processors:?}: {error}");
    }
}

/// A process that answers lines.
struct Other {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    /// Starts the process, as a receiver if `receives`, else as a sender.
    fn start(command: &mut Command, receives: bool) -> Self {
        keep_to(if receives { RECEIVERS } else { SENDERS });
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        keep_to(SENDERS);
        let input = process.stdin.take().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self { process, input, output }
    }

    fn wheel(role: &str) -> Self {
        let python = std::env::var_os("MOONCAKE_PYTHON").unwrap_or_else(|| "python3".into());
        let preload = std::env::var_os("MOONCAKE_PRELOAD").unwrap_or_default();
        let mut command = Command::new(python);
        command.args(["-c", include_str!("wheel.py"), role, &BYTES.to_string()]);
        // The settings of the plugin, so that no limit slows either side down.
        command.envs([
            ("MC_TCP_ENABLE_CONNECTION_POOL", "1"),
            ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"),
            ("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535"),
            ("MC_TCP_ADMISSION_TIMEOUT_MS", "60000"),
            ("MC_FORCE_TCP", "1"),
            ("MC_LOG_LEVEL", "ERROR"),
        ]);
        command.args(std::env::split_paths(&preload).filter(|path| !path.as_os_str().is_empty()));
        Self::start(&mut command, role == "receive")
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the other process ended");
            if let Some(answer) = line.strip_prefix("@ ") {
                return answer.trim().to_owned();
            }
        }
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").unwrap();
        self.answer()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _already_gone = self.process.kill().and_then(|()| self.process.wait()).is_err();
    }
}

fn instance(name: &str) -> (MooncakeBackend, SharedMemory, RegionId) {
    let backend = open(&Opening { name: name.into(), config: CONFIG.into() }).unwrap();
    let bytes = SharedMemory::new("bench", BYTES).unwrap();
    // SAFETY: the mapping has this many bytes, and nothing else knows it yet.
    unsafe { bytes.address().as_ptr().write_bytes(1, BYTES) };
    let memory = Memory {
        address: Address::of(bytes.address().as_ptr()),
        length: BYTES as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 1,
        fd_offset: 0,
    };
    let region = backend.register(&memory).unwrap();
    (backend, bytes, region)
}

/// The receiver's process: takes notifications until its peer is gone.
fn receive() {
    let (backend, _bytes, region) = instance("receiver");
    let endpoint: String = backend.endpoint().unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("@ {} {endpoint}", region.0);
    let none = Notification {
        kind: NotificationKind(0),
        length: 0,
        peer_name_length: 0,
        reserved: 0,
        payload: [0; NOTIFICATION_BYTES],
        peer_name: [0; 64],
    };
    let mut some = [none; 16];
    loop {
        let came = backend.notifications(&mut some);
        assert!(came >= 0);
        if some[..came as usize].iter().any(|one| one.kind == NotificationKind::PEER_LOST) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// The plugin's side as a sender.
struct Ours {
    backend: MooncakeBackend,
    _bytes: SharedMemory,
    regions: (u32, u32),
    peer: PeerId,
    tag: u64,
    _receiver: Other,
}

impl Ours {
    fn start() -> Self {
        let own = std::env::current_exe().unwrap();
        let mut receiver = Other::start(Command::new(own).env("RECEIVE", "1"), true);
        let said = receiver.answer();
        let (region, endpoint) = said.split_once(' ').unwrap();
        let endpoint: Vec<u8> = (0..endpoint.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&endpoint[at..at + 2], 16).unwrap())
            .collect();
        let (backend, bytes, own) = instance("sender");
        let peer = backend.connect("receiver", &endpoint).unwrap();
        let regions = (own.0, region.parse().unwrap());
        Self { backend, _bytes: bytes, regions, peer, tag: 0, _receiver: receiver }
    }

    fn round(&mut self, count: usize, told: u32) -> f64 {
        let length = BYTES / count;
        let write = |at: usize| Write {
            source_region: RegionId(self.regions.0),
            target_region: RegionId(self.regions.1),
            source_offset: (at * length) as u64,
            target_offset: ((count - 1 - at) * length) as u64,
            length: length as u32,
            target_generation: 1,
        };
        let writes: Vec<Write> = (0..count).map(write).collect();
        self.tag += 1;
        let submission = Submission {
            peer: self.peer,
            notification_length: told,
            tag: Tag(self.tag),
            notification: [7; NOTIFICATION_BYTES],
        };
        let start = Instant::now();
        assert_eq!(self.backend.submit(&submission, &writes), 0);
        let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }];
        while self.backend.poll(&mut done) == 0 {
            // SAFETY: the descriptor is the instance's, which lives longer than this call.
            let event = unsafe { BorrowedFd::borrow_raw(self.backend.event_fd()) };
            poll(&mut [PollFd::new(&event, PollFlags::IN)], None).unwrap();
        }
        assert_eq!((done[0].status, done[0].bytes), (0, BYTES as u64));
        start.elapsed().as_secs_f64()
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    f64::midpoint(seconds[(seconds.len() - 1) / 2], seconds[seconds.len() / 2])
}

fn main() {
    if std::env::var_os("RECEIVE").is_some() {
        return receive();
    }
    let passes: Vec<Pass> = (0..PASSES).map(pass).collect();
    println!("| pieces | ours, GB/s | told | sync | async | ratio | from | to |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    for (index, count) in COUNTS.into_iter().enumerate() {
        let of = |way: usize| median(passes.iter().flat_map(|pass| pass[index][way].clone()).collect());
        let all = [0, 1, 2, 3].map(of);
        let better = if all[2] < all[3] { 2 } else { 3 };
        let ratio = |pass: &Pass| median(pass[index][better].clone()) / median(pass[index][0].clone());
        let mut ratios: Vec<f64> = passes.iter().map(ratio).collect();
        ratios.sort_by(f64::total_cmp);
        let [ours, told, sync, polled] = all.map(|seconds| BYTES as f64 / seconds / 1e9);
        let (from, middle, to) = (ratios[0], ratios[PASSES / 2], ratios[PASSES - 1]);
        let size = BYTES / count / 1024;
        println!(
            "| {count} x {size} KiB | {ours:.2} | {told:.2} | {sync:.2} | {polled:.2} | {middle:.2} | {from:.2} | {to:.2} |"
        );
    }
}

/// The seconds of rounds, by count and way.
type Pass = [[Vec<f64>; WAYS.len()]; COUNTS.len()];

/// Runs a pass, with processes of its own.
fn pass(number: usize) -> Pass {
    let raw = std::env::var_os("BENCH_RAW").is_some();
    let mut receiver = Other::wheel("receive");
    let mut sender = Other::wheel("send");
    let mut ours = Ours::start();
    let target = receiver.answer();
    sender.answer();
    COUNTS.map(|count| {
        let mut one = |way: usize| match WAYS[way] {
            "ours" => ours.round(count, 0),
            "told" => ours.round(count, 8),
            mode => sender.ask(&format!("{target} {count} {mode}")).parse().unwrap(),
        };
        // A warm-up that does not count: it makes connections and touches pages.
        (0..WAYS.len()).for_each(|way| {
            one(way);
        });
        let mut all = [const { Vec::new() }; WAYS.len()];
        for round in 0..ROUNDS {
            for turn in 0..WAYS.len() {
                let turn = if round % 2 == 0 { turn } else { WAYS.len() - 1 - turn };
                let way = (turn + round / 2) % WAYS.len();
                let seconds = one(way);
                if raw {
                    eprintln!("raw {number} {count} {round} {} {seconds:.6}", WAYS[way]);
                }
                all[way].push(seconds);
            }
        }
        all
    })
}
