//! The plugin against the wheel's own Python API, in one run: the same bytes, from one process to another over loopback,
//! turn by turn. `cargo bench -p host-plugin-mooncake --bench transfer`, with `MOONCAKE_PYTHON` and `MOONCAKE_PRELOAD` as
//! `cargo xtask test` sets them, or a Python with Mooncake on the path.
//!
//! Both move shared memory, as a worker's is. Each figure is the median of the rounds of several passes, each with processes
//! of its own, since passes differ by more than ways do. The ratio is the middle one of the passes', with the lowest and the
//! highest.
//!
//! A round of ours is a submission without a notification, as theirs have none, from the call to its completion; "told" is
//! one with a notification, which completes when the peer has taken it, two messages later. A round of theirs is one call
//! of `batch_transfer_sync_write`, or one batch per write, polled. The ratio is to the better of the two.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use host::executor::memory::SharedMemory;
use host_plugin_api::*;
use host_plugin_mooncake::{MooncakeBackend, open};

const BYTES: usize = 256 << 20;
/// Even, so that each way is as often the first of its process as the second.
const ROUNDS: usize = 8;
const PASSES: usize = 5;
const COUNTS: [usize; 4] = [1, 256, 1024, 4096];
const CONFIG: &str = "backend = \"python\"\nmax_writes = 4096\nmax_outstanding = 4096\n";

/// A process that answers lines.
struct Other {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(command: &mut Command) -> Self {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = process.stdin.take().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self { process, input, output }
    }

    fn wheel(role: &str) -> Self {
        let python = std::env::var_os("MOONCAKE_PYTHON").unwrap_or_else(|| "python3".into());
        let preload = std::env::var_os("MOONCAKE_PRELOAD").unwrap_or_default();
        let mut command = Command::new(python);
        command.args(["-c", include_str!("wheel.py"), role, &BYTES.to_string()]);
        // What the plugin sets, so that neither is slowed down by a limit.
        command.envs([
            ("MC_TCP_ENABLE_CONNECTION_POOL", "1"),
            ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"),
            ("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535"),
            ("MC_TCP_ADMISSION_TIMEOUT_MS", "60000"),
            ("MC_FORCE_TCP", "1"),
            ("MC_LOG_LEVEL", "ERROR"),
        ]);
        Self::start(command.args(std::env::split_paths(&preload).filter(|path| !path.as_os_str().is_empty())))
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
    // SAFETY: as long as it says, and nobody else knows it yet.
    unsafe { bytes.address().as_ptr().write_bytes(1, BYTES) };
    let memory = Memory {
        address: bytes.address().as_ptr() as u64,
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

/// The receiver's process: takes notifications until nobody is there any more.
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

/// The sender's side of ours.
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
        let mut receiver = Other::start(Command::new(own).env("RECEIVE", "1"));
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
            source_region: self.regions.0,
            target_region: self.regions.1,
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
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
        assert_eq!((done[0].status, done[0].bytes), (0, BYTES as u64));
        start.elapsed().as_secs_f64()
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn main() {
    if std::env::var_os("RECEIVE").is_some() {
        return receive();
    }
    let mut times = COUNTS.map(|_| [const { Vec::new() }; 4]);
    let mut ratios = COUNTS.map(|_| Vec::new());
    for _ in 0..PASSES {
        for (index, pass) in pass().into_iter().enumerate() {
            let [ours, _, sync, polled] = pass.clone().map(median);
            ratios[index].push(sync.min(polled) / ours);
            for (all, pass) in times[index].iter_mut().zip(pass) {
                all.extend(pass);
            }
        }
    }
    println!("| pieces | ours, GB/s | told | sync | async | ratio | from | to |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    for ((count, times), mut ratios) in COUNTS.into_iter().zip(times).zip(ratios) {
        let [ours, told, sync, polled] = times.map(|seconds| BYTES as f64 / median(seconds) / 1e9);
        ratios.sort_by(f64::total_cmp);
        let (from, middle, to) = (ratios[0], ratios[PASSES / 2], ratios[PASSES - 1]);
        let size = BYTES / count / 1024;
        println!(
            "| {count} x {size} KiB | {ours:.2} | {told:.2} | {sync:.2} | {polled:.2} | {middle:.2} | {from:.2} | {to:.2} |"
        );
    }
}

/// The seconds of rounds, by count and way, with processes that are started for them.
fn pass() -> [[Vec<f64>; 4]; COUNTS.len()] {
    let mut ours = Ours::start();
    let mut receiver = Other::wheel("receive");
    let mut sender = Other::wheel("send");
    let target = receiver.answer();
    sender.answer();
    let mut theirs = |count: usize, mode: &str| -> f64 {
        sender.ask(&format!("{target} {count} {mode}")).parse().unwrap()
    };
    COUNTS.map(|count| {
        let mut all = [const { Vec::new() }; 4];
        for round in 0..ROUNDS {
            // Who comes second finds its own memory in the caches.
            let in_turn = |pair: [usize; 2]| if round % 2 == 0 { pair } else { [pair[1], pair[0]] };
            for way in in_turn([0, 1]) {
                all[way].push(ours.round(count, [0, 8][way]));
            }
            for way in in_turn([2, 3]) {
                all[way].push(theirs(count, ["sync", "async"][way - 2]));
            }
        }
        all
    })
}
