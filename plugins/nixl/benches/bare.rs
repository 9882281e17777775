//! Compares the plugin's speed with NIXL's own: the same writes between two processes through the plugin, and through
//! NIXL's C API with nothing around it, in turns.
//!
//! `NIXL_LIBRARY=… cargo bench -p host-plugin-nixl --bench bare [-- KIB…]`
//!
//! The bare way describes the ranges once. For each submission it makes a request of them, posts it, and polls until it is
//! done. The receiver polls for messages without a pause. The plugin's side does what the host does: `submit`, and `poll`
//! when the descriptor says so. Pieces do not touch each other, so that nothing is joined. A submission has up to 1024
//! pieces or 4 MiB, or one piece if the piece is larger. Eight submissions are in flight, each with a notification. A round
//! ends when the sender knows that all is done, and the receiver has said, through a pipe, that every notification came.
//!
//! The load of the machine changes from second to second, so ratios are of neighbouring rounds: bare, `submit`, and the same
//! backwards, make a block. A block gives one ratio, of the times of its two rounds each. The table shows the medians of the
//! blocks' ratios with their quartiles, and of the rounds' GB/s of 10^9 bytes. BBR paces on loopback, too, by its estimates, so
//! that the same round takes half or twice as long. Therefore measure in a network namespace with another congestion control.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../src"]
mod plugin {
    #[allow(dead_code, unused_imports, reason = "the plugin uses all of it")]
    pub mod capi;
}

use host_plugin_api::RegionId;
use std::collections::VecDeque;
use std::ffi::CString;
use std::io::{BufRead, BufReader};
use std::os::fd::BorrowedFd;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use host_memory::SharedMemory;
use host_plugin_api::*;
use plugin::capi::{Agent, Extent, Library, Progress, Ranges, Segment};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, kill_process};

/// Larger than any cache, on both sides.
const BYTES: usize = 128 << 20;
/// Blocks of a size: at least this many, and for at least the time below.
const BLOCKS: usize = 15;
const LONG: Duration = Duration::from_secs(10);
const FLIGHTS: usize = 8;
const PIECES: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];
const END: &[u8] = b"end";

fn main() {
    match std::env::var("RECEIVER").as_deref() {
        Ok("bare") => return bare_receiver(),
        Ok(_) => return plugin_receiver(),
        Err(_) => {}
    }
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let wanted: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let mut bare = Bare::start();
    let mut plugin = Plugin::start();
    println!("    piece    bare  submit            submit/bare");
    for piece in PIECES.into_iter().filter(|piece| wanted.is_empty() || wanted.contains(&(piece >> 10))) {
        bare.prepare(piece);
        plugin.prepare(piece);
        let mut round = |way: usize| match way {
            0 => seconds(|| bare.round()),
            _ => seconds(|| plugin.round(piece)),
        };
        // The first round of each way finds everything cold.
        let mut times = [0, 1].map(|way| Vec::from(&[round(way)][1..]));
        let start = Instant::now();
        while times[0].len() < 2 * BLOCKS || start.elapsed() < LONG {
            [0, 1, 1, 0].into_iter().for_each(|way| times[way].push(round(way)));
        }
        let bytes = (offsets(piece).len() * piece) as f64;
        let rate = |way: usize| bytes / quartiles(times[way].clone())[1] / 1e9;
        let beside_bare = |way: usize| {
            let blocks = times[0].chunks(2).zip(times[way].chunks(2));
            let ratios = blocks.map(|(bare, other)| bare.iter().sum::<f64>() / other.iter().sum::<f64>());
            let [low, middle, high] = quartiles(ratios.collect());
            format!("{middle:.3} ({low:.3}..{high:.3})")
        };
        let [bare, submit] = [0, 1].map(rate).map(|rate| format!("{rate:>7.3}"));
        println!("{:>5} KiB {bare} {submit} {:>22}", piece >> 10, beside_bare(1));
    }
    bare.end();
    plugin.end();
}

/// Seconds that a round takes.
fn seconds(round: impl FnOnce()) -> f64 {
    let start = Instant::now();
    round();
    start.elapsed().as_secs_f64()
}

fn quartiles(mut figures: Vec<f64>) -> [f64; 3] {
    figures.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| figures[figures.len() * quarter / 4])
}

/// Offsets of the pieces: every other one of its size.
fn offsets(piece: usize) -> Vec<u64> {
    (0..BYTES as u64).step_by(2 * piece).collect()
}

/// Pieces of one submission.
fn batch(piece: usize) -> usize {
    ((4 << 20) / piece).clamp(1, 1024)
}

fn memory() -> SharedMemory {
    let memory = SharedMemory::new("bench", BYTES).unwrap();
    // SAFETY: the whole mapping, before anything else knows of it. Touched, so that page faults are not measured.
    unsafe { memory.address().as_ptr().write_bytes(1, BYTES) };
    memory
}

/// The other process.
struct Receiver {
    child: Child,
    says: BufReader<ChildStdout>,
}

impl Receiver {
    /// Waits until everything of a round has come.
    fn everything_came(&mut self) {
        let mut line = String::new();
        self.says.read_line(&mut line).unwrap();
        assert_eq!(line, "came\n");
    }
}

/// Notifications of a round that came. Each says how many there are.
#[derive(Default)]
struct Came(u64);

impl Came {
    fn one(&mut self, message: &[u8]) {
        self.0 += 1;
        if message == self.0.to_le_bytes() {
            self.0 = 0;
            println!("came");
        }
    }
}

/// Starts the other process. Returns it with the line that says how to reach it.
fn receiver(kind: &str) -> (Receiver, String, Vec<u8>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env("RECEIVER", kind)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut says = BufReader::new(child.stdout.take().unwrap());
    says.read_line(&mut line).unwrap();
    let (place, endpoint) = line.trim().split_once(' ').unwrap();
    let byte = |at| u8::from_str_radix(&endpoint[at..at + 2], 16).unwrap();
    let endpoint_bytes = (0..endpoint.len()).step_by(2).map(byte).collect();
    (Receiver { child, says }, place.to_owned(), endpoint_bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bare_agent(name: &str, memory: &SharedMemory) -> (Arc<Library>, Agent) {
    let path = std::env::var_os("NIXL_LIBRARY").expect("NIXL_LIBRARY names libnixl_capi.so");
    let library = Arc::new(Library::load(path.as_ref(), None).unwrap());
    let name = CString::new(name).unwrap();
    let parameters = [(c"engine_config".to_owned(), c"TLS=^sm,NET_DEVICES=lo".to_owned())];
    let mut agent = Agent::new(&library, &name, c"UCX", &parameters, None).unwrap();
    let address = memory.address().as_ptr() as u64;
    let place = Extent { segment: Segment::Dram, address, length: BYTES as u64, device: 0 };
    agent.register(1, place).unwrap();
    (library, agent)
}

fn bare_receiver() {
    let memory = memory();
    let (_library, mut agent) = bare_agent("receiver", &memory);
    println!("{} {}", memory.address().as_ptr() as u64, hex(&agent.metadata().unwrap()));
    let (mut ended, mut came) = (false, Came::default());
    while !ended {
        let each = |message: &[u8]| match message {
            END => ended = true,
            message => came.one(message),
        };
        agent.received(each).unwrap();
        std::thread::yield_now();
    }
}

struct Bare {
    receiver: Receiver,
    library: Arc<Library>,
    agent: Agent,
    peer: CString,
    addresses: (u64, u64),
    /// Local and remote ranges of each submission of a round.
    ranges: Vec<(Ranges, Ranges)>,
    _memory: SharedMemory,
}

impl Bare {
    fn start() -> Self {
        let (receiver, target, metadata) = receiver("bare");
        let memory = memory();
        let (library, mut agent) = bare_agent("sender", &memory);
        let peer = agent.learn(&metadata).unwrap();
        let addresses = (memory.address().as_ptr() as u64, target.parse().unwrap());
        let new = Self { receiver, library, agent, peer, addresses, ranges: Vec::new(), _memory: memory };
        new.signal(Signal::STOP);
        new
    }

    /// Stops or continues the receiver. It never rests, so it is stopped while others are measured.
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.receiver.child), signal).unwrap();
    }

    fn prepare(&mut self, piece: usize) {
        let new = || Ranges::new(&self.library, Segment::Dram).unwrap();
        let described = |offsets: &[u64]| {
            let (mut ours, mut theirs) = (new(), new());
            for offset in offsets {
                ours.add(self.addresses.0 + offset, piece, 0).unwrap();
                theirs.add(self.addresses.1 + offset, piece, 0).unwrap();
            }
            (ours, theirs)
        };
        self.ranges = offsets(piece).chunks(batch(piece)).map(described).collect();
    }

    fn round(&mut self) {
        self.signal(Signal::CONT);
        let mut left = self.ranges.iter();
        let message = (left.len() as u64).to_le_bytes();
        let mut flights = VecDeque::new();
        loop {
            if flights.len() < FLIGHTS
                && let Some((ours, theirs)) = left.next()
            {
                let started = self.agent.write(ours, theirs, &self.peer, &message);
                flights.push_back(started.unwrap().0);
                continue;
            }
            let Some(oldest) = flights.front() else { break };
            match self.agent.progress(oldest) {
                Progress::Running => std::thread::yield_now(),
                Progress::Done => self.agent.release(flights.pop_front().unwrap()),
                Progress::Failed => panic!("a bare write failed"),
            }
        }
        self.receiver.everything_came();
        self.signal(Signal::STOP);
    }

    fn end(mut self) {
        self.signal(Signal::CONT);
        self.agent.notify(&self.peer, END).unwrap();
        while self.receiver.child.try_wait().unwrap().is_none() {
            // Drives progress, because the message may still be on its way out. An error is fine: the receiver may be gone.
            let _gone = self.agent.received(|_| {}).is_err();
        }
    }
}

fn open(name: &str, memory: &SharedMemory) -> (Box<dyn TransferBackend>, RegionId) {
    let backend = host_plugin_nixl::open(&Opening { name: name.into(), config: String::new() }).unwrap();
    let region = backend.register(&Memory {
        address: Address::of(memory.address().as_ptr()),
        length: BYTES as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 1,
        fd_offset: 0,
    });
    (Box::new(backend), region.unwrap())
}

/// Waits until the instance has something for its host.
fn rest(backend: &dyn TransferBackend) {
    // SAFETY: the descriptor is the instance's, which lives longer than this call.
    let event = unsafe { BorrowedFd::borrow_raw(backend.event_fd()) };
    poll(&mut [PollFd::new(&event, PollFlags::IN)], None).unwrap();
}

fn plugin_receiver() {
    let memory = memory();
    let (backend, region) = open("decode", &memory);
    println!("{} {}", region.0, hex(&backend.endpoint().unwrap()));
    let empty = Notification {
        kind: NotificationKind(0),
        length: 0,
        peer_name_length: 0,
        reserved: 0,
        payload: [0; NOTIFICATION_BYTES],
        peer_name: [0; 64],
    };
    let mut notifications = [empty; 16];
    let mut came = Came::default();
    loop {
        rest(&*backend);
        let count = backend.notifications(&mut notifications) as usize;
        for notification in &notifications[..count] {
            if notification.kind == NotificationKind::PEER_LOST {
                return;
            }
            came.one(&notification.payload[..notification.length as usize]);
        }
    }
}

struct Plugin {
    receiver: Receiver,
    backend: Box<dyn TransferBackend>,
    peer: PeerId,
    regions: (RegionId, u32),
    writes: Vec<Write>,
    _memory: SharedMemory,
}

impl Plugin {
    fn start() -> Self {
        let (receiver, target, endpoint) = receiver("plugin");
        let memory = memory();
        let (backend, region) = open("prefill", &memory);
        let peer = backend.connect("decode", &endpoint).unwrap();
        let regions = (region, target.parse().unwrap());
        Self { receiver, backend, peer, regions, writes: Vec::new(), _memory: memory }
    }

    fn prepare(&mut self, piece: usize) {
        let write = |offset| Write {
            source_region: self.regions.0,
            target_region: RegionId(self.regions.1),
            source_offset: offset,
            target_offset: offset,
            length: piece as u32,
            target_generation: 1,
        };
        self.writes = offsets(piece).into_iter().map(write).collect();
    }

    fn round(&mut self, piece: usize) {
        let mut batches = self.writes.chunks(batch(piece));
        let mut notification = [0; NOTIFICATION_BYTES];
        notification[..8].copy_from_slice(&(batches.len() as u64).to_le_bytes());
        let (mut flights, mut tag) = (0, 0);
        let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 64];
        let mut bytes = 0;
        loop {
            if flights < FLIGHTS
                && let Some(writes) = batches.next()
            {
                let submission =
                    Submission { peer: self.peer, notification_length: 8, tag: Tag(tag), notification };
                assert_eq!(self.backend.submit(&submission, writes), 0);
                (flights, tag) = (flights + 1, tag + 1);
                continue;
            }
            if flights == 0 {
                break;
            }
            rest(&*self.backend);
            let count = self.backend.poll(&mut done) as usize;
            assert!(done[..count].iter().all(|c| c.status == 0));
            bytes += done[..count].iter().map(|c| c.bytes).sum::<u64>();
            flights -= count;
        }
        assert_eq!(bytes as usize, self.writes.len() * piece);
        self.receiver.everything_came();
    }

    fn end(mut self) {
        self.backend.shutdown(5000).unwrap();
        assert!(self.receiver.child.wait().unwrap().success());
    }
}
