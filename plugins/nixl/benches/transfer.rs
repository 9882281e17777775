//! Measures how fast pieces of several sizes move between two processes through NIXL, beside the shared-memory plugin
//! and beside a plain copy, all in the same run.
//!
//! `NIXL_LIBRARY=… cargo bench -p host-plugin-nixl --bench transfer [-- CONFIG]`. CONFIG is the NIXL plugin's, in TOML.
//!
//! With `knee` as the argument: 64 MiB in small pieces, written directly, and gathered into 4 MiB that are written at
//! once and scattered by the receiver, each through both plugins. The sender's thread gathers, the receiver's thread
//! scatters. The round does not wait for the last piece of the scatter, and no room is granted first. So the staged
//! figures are an upper bound of what staging can reach.
//!
//! Pieces do not touch each other, so that nothing can be joined. Each figure is the best of the rounds, in GB/s of 10^9
//! bytes. A round ends when the sender's completions say that everything is in the peer's memory.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use host_plugin_api::RegionId;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use host_memory::SharedMemory;
use host_plugin_api::*;

/// Larger than any cache, on both sides.
const BYTES: usize = 256 << 20;
const ROUNDS: usize = 5;
/// Submissions in flight.
const FLIGHTS: usize = 8;

fn main() {
    if let Ok(what) = std::env::var("RECEIVER") {
        let (plugin, config) = what.split_once('\n').unwrap();
        return receive(plugin, config);
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    let config = arguments.iter().find(|argument| *argument != "--bench").cloned().unwrap_or_default();
    if config == "knee" {
        return knee();
    }
    println!(
        "{:>9} {:>12} {:>9} {:>9} {:>12} {:>10}",
        "piece", "memcpy", "shm", "nixl", "nixl/memcpy", "nixl/shm"
    );
    for piece in [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let copied = copy(piece);
        let (shm, nixl) = (transfer("shm", "", piece), transfer("nixl", &config, piece));
        println!(
            "{:>5} KiB {copied:>12.2} {shm:>9.2} {nixl:>9.2} {:>12.3} {:>10.3}",
            piece >> 10,
            nixl / copied,
            nixl / shm
        );
    }
}

fn knee() {
    println!(
        "{:>9} {:>11} {:>11} {:>11} {:>11}",
        "piece", "shm direct", "shm staged", "nixl direct", "nixl staged"
    );
    for piece in [256, 1 << 10, 4 << 10, 16 << 10, 64 << 10] {
        let of = |plugin, staged| Transfer { plugin, config: "", piece, staged, bytes: 64 << 20 }.best();
        println!(
            "{:>5} B {:>15.3} {:>11.3} {:>11.3} {:>11.3}",
            piece,
            of("shm", false),
            of("shm", true),
            of("nixl", false),
            of("nixl", true)
        );
    }
}

/// Offsets of the pieces: every other one of its size.
fn offsets(piece: usize) -> impl Iterator<Item = usize> {
    (0..BYTES).step_by(2 * piece)
}

/// Offset of the staged bytes, on both sides: behind the pieces of a run of 64 MiB.
const STAGE: usize = 128 << 20;
const STAGED: usize = 4 << 20;

/// Copies pieces between their places, from the `first` on, and one dense slot, in either direction.
fn copy_pieces(memory: &SharedMemory, first: usize, piece: usize, slot: usize, gather: bool) {
    let base = memory.address().as_ptr();
    for at in 0..STAGED / piece {
        let (sparse, dense) = ((first + at) * 2 * piece, STAGE + slot * STAGED + at * piece);
        assert!(sparse + piece <= STAGE && dense + piece <= BYTES);
        let (from, to) = if gather { (sparse, dense) } else { (dense, sparse) };
        // SAFETY: both ranges lie inside the mapping and apart, as the assertion says. NIXL or the peer may use the
        // slot at the same time, which does not matter: the bytes are not read.
        unsafe { std::ptr::copy_nonoverlapping(base.add(from), base.add(to), piece) };
    }
}

fn open(plugin: &str, name: &str, config: &str) -> (Box<dyn TransferBackend>, SharedMemory, RegionId) {
    let opening = Opening { name: name.into(), config: config.into() };
    let backend: Box<dyn TransferBackend> = match plugin {
        "shm" => Box::new(host_plugin_shm::open(&opening).unwrap()),
        _ => Box::new(host_plugin_nixl::open(&opening).unwrap()),
    };
    let memory = SharedMemory::new("bench", BYTES).unwrap();
    // SAFETY: the whole mapping, before anything else knows of it. Touched, so that page faults are not measured.
    unsafe { memory.address().as_ptr().write_bytes(1, BYTES) };
    let region = backend.register(&Memory {
        address: Address::of(memory.address().as_ptr()),
        length: BYTES as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: std::os::fd::AsRawFd::as_raw_fd(&memory.fd()),
        generation: 1,
        fd_offset: 0,
    });
    let region = region.unwrap();
    (backend, memory, region)
}

/// The other process: takes notifications until the sender is gone.
fn receive(plugin: &str, config: &str) {
    let (backend, memory, region) = open(plugin, "decode", config);
    let endpoint: String = backend.endpoint().unwrap().iter().map(|b| format!("{b:02x}")).collect();
    println!("{} {endpoint}", region.0);
    let empty = Notification {
        kind: NotificationKind(0),
        length: 0,
        peer_name_length: 0,
        reserved: 0,
        payload: [0; NOTIFICATION_BYTES],
        peer_name: [0; 64],
    };
    let mut notifications = [empty; 16];
    loop {
        let count = backend.notifications(&mut notifications) as usize;
        for notification in &notifications[..count] {
            if notification.kind == NotificationKind::PEER_LOST {
                return;
            }
            let number =
                |at: usize| u32::from_le_bytes(*notification.payload[at..].first_chunk().unwrap()) as usize;
            let (piece, first, slot) = (number(0), number(4), number(8));
            if piece > 0 {
                copy_pieces(&memory, first, piece, slot, false);
            }
        }
        std::thread::sleep(Duration::from_micros(if count > 0 { 0 } else { 100 }));
    }
}

fn transfer(plugin: &str, config: &str, piece: usize) -> f64 {
    Transfer { plugin, config, piece, staged: false, bytes: BYTES / 2 }.best()
}

/// One measurement.
struct Transfer<'a> {
    plugin: &'a str,
    config: &'a str,
    piece: usize,
    /// Whether pieces go through dense slots.
    staged: bool,
    bytes: usize,
}

impl Transfer<'_> {
    fn best(&self) -> f64 {
        let Self { plugin, config, piece, .. } = *self;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env("RECEIVER", format!("{plugin}\n{config}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (target, endpoint) = line.trim().split_once(' ').unwrap();
        let byte = |i| u8::from_str_radix(&endpoint[i..i + 2], 16).unwrap();
        let endpoint: Vec<u8> = (0..endpoint.len()).step_by(2).map(byte).collect();
        let (backend, memory, region) = open(plugin, "prefill", config);
        let peer = backend.connect("decode", &endpoint).unwrap();
        let write = |offset: usize, length: usize| Write {
            source_region: region,
            target_region: RegionId(target.parse().unwrap()),
            source_offset: offset as u64,
            target_offset: offset as u64,
            length: length as u32,
            target_generation: 1,
        };
        let writes: Vec<Write> =
            offsets(piece).take(self.bytes / piece).map(|offset| write(offset, piece)).collect();
        // A chunk of a prompt: 4 MiB, or as many pieces as fit.
        let direct: Vec<&[Write]> = writes.chunks((STAGED / piece).clamp(1, 1024)).collect();
        let slots: Vec<Write> = (0..FLIGHTS).map(|slot| write(STAGE + slot * STAGED, STAGED)).collect();
        let batches = if self.staged { self.bytes / STAGED } else { direct.len() };
        let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 64];
        let mut best = 0f64;
        for _ in 0..ROUNDS {
            let (mut submitted, mut completed, mut bytes) = (0, 0, 0);
            let start = Instant::now();
            while completed < batches {
                if submitted < batches && submitted - completed < FLIGHTS {
                    let mut submission = Submission {
                        peer,
                        notification_length: 12,
                        tag: Tag(submitted as u64),
                        notification: [0; NOTIFICATION_BYTES],
                    };
                    let batch = if self.staged {
                        let (first, slot) = (submitted * (STAGED / piece), submitted % FLIGHTS);
                        copy_pieces(&memory, first, piece, slot, true);
                        let numbers = [piece, first, slot].map(|number| (number as u32).to_le_bytes());
                        submission.notification[..12].copy_from_slice(numbers.as_flattened());
                        &slots[slot..=slot]
                    } else {
                        direct[submitted]
                    };
                    assert_eq!(backend.submit(&submission, batch), 0);
                    submitted += 1;
                    continue;
                }
                let count = backend.poll(&mut done) as usize;
                assert!(done[..count].iter().all(|c| c.status == 0));
                bytes += done[..count].iter().map(|c| c.bytes).sum::<u64>();
                completed += count;
                if count == 0 {
                    // The poller must not take a core from the transfer, which is what is measured.
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
            best = best.max(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
        backend.shutdown(5000).unwrap();
        assert!(child.wait().unwrap().success());
        best
    }
}

/// Measures a copy by one thread, piece by piece, between two mappings of the same kind.
fn copy(piece: usize) -> f64 {
    let memory = || {
        let memory = SharedMemory::new("bench", BYTES).unwrap();
        // SAFETY: the whole mapping, which nothing else knows.
        unsafe { memory.address().as_ptr().write_bytes(1, BYTES) };
        memory
    };
    let (source, target) = (memory(), memory());
    let mut best = 0f64;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let mut bytes = 0;
        for offset in offsets(piece) {
            let (from, to) = (source.address().as_ptr(), target.address().as_ptr());
            // SAFETY: the offsets lie inside both mappings, which are different and known to nothing else.
            unsafe { std::ptr::copy_nonoverlapping(from.add(offset), to.add(offset), piece) };
            bytes += piece;
        }
        best = best.max(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    best
}
