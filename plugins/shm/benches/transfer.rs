//! Measures how fast pages move between two processes, beside how fast this machine copies memory, in the same run.
//!
//! `cargo bench -p host-plugin-shm --bench transfer`

#![allow(clippy::unwrap_used, clippy::expect_used)]

use host_plugin_api::RegionId;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

use host_memory::SharedMemory;
use host_plugin_api::*;
use host_plugin_shm::ShmBackend;

/// Larger than any cache, on both sides.
const BYTES: usize = 256 << 20;
const ROUNDS: usize = 8;
/// Bytes in one submission.
const BATCH: usize = 4 << 20;

fn main() {
    if let Ok(name) = std::env::var("RECEIVER") {
        return receive(&name);
    }
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    println!(
        "{:>9} {:>13} {:>14} {:>14} {:>8}",
        "page", "copy threads", "memcpy GB/s", "transfer GB/s", "ratio"
    );
    for page in [64 << 10, 1 << 20] {
        for copy_threads in [1, 2] {
            let copied = copy(page);
            let moved = transfer(page, copy_threads);
            let (page, ratio) = (page >> 10, moved / copied);
            println!("{page:>5} KiB {copy_threads:>13} {copied:>14.2} {moved:>14.2} {ratio:>8.3}");
        }
    }
}

fn open(name: &str, copy_threads: usize) -> (ShmBackend, SharedMemory, RegionId) {
    let opening = Opening { name: name.into(), config: format!("copy_threads = {copy_threads}") };
    let backend = host_plugin_shm::open(&opening).unwrap();
    let memory = SharedMemory::new("bench", BYTES).unwrap();
    // SAFETY: the whole mapping, before anything else knows of it. Touched, so that page faults are not measured.
    unsafe { memory.address().as_ptr().write_bytes(1, BYTES) };
    let fd = std::os::fd::AsRawFd::as_raw_fd(&memory.fd());
    let region = backend.register(&Memory {
        address: Address::of(memory.address().as_ptr()),
        length: BYTES as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd,
        generation: 1,
        fd_offset: 0,
    });
    (backend, memory, region.unwrap())
}

/// The other process: takes notifications until the sender is gone.
fn receive(name: &str) {
    let (backend, _memory, region) = open(name, 1);
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
        if notifications[..count].iter().any(|n| n.kind == NotificationKind::PEER_LOST) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
}

fn transfer(page: usize, copy_threads: usize) -> f64 {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env("RECEIVER", "decode")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let (target, endpoint) = line.trim().split_once(' ').unwrap();
    let byte = |i| u8::from_str_radix(&endpoint[i..i + 2], 16).unwrap();
    let endpoint: Vec<u8> = (0..endpoint.len()).step_by(2).map(byte).collect();
    let (backend, _memory, region) = open("prefill", copy_threads);
    let peer = backend.connect("decode", &endpoint).unwrap();
    let write = |offset: usize| Write {
        source_region: region,
        target_region: RegionId(target.parse().unwrap()),
        source_offset: offset as u64,
        target_offset: offset as u64,
        length: page as u32,
        target_generation: 1,
    };
    let batches: Vec<Vec<Write>> = (0..BYTES)
        .step_by(BATCH)
        .map(|start| (start..start + BATCH).step_by(page).map(write).collect())
        .collect();
    let mut best = 0f64;
    let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 64];
    for _ in 0..ROUNDS {
        let (mut submitted, mut completed) = (0, 0);
        let start = Instant::now();
        while completed < batches.len() {
            if submitted < batches.len() && submitted - completed < 16 {
                let notification = [0; NOTIFICATION_BYTES];
                let tag = Tag(submitted as u64);
                let submission = Submission { peer, notification_length: 8, tag, notification };
                assert_eq!(backend.submit(&submission, &batches[submitted]), 0);
                submitted += 1;
                continue;
            }
            let count = backend.poll(&mut done) as usize;
            assert!(done[..count].iter().all(|c| c.status == 0));
            completed += count;
            if count == 0 {
                // The poller must not take a core from the copies, which are what is measured.
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
        }
        best = best.max(BYTES as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    backend.shutdown(5000).unwrap();
    assert!(child.wait().unwrap().success());
    best
}

/// Measures a copy by one thread, page by page, between two mappings of the same kind.
fn copy(page: usize) -> f64 {
    let (_one, source, _) = open("source", 1);
    let (_other, target, _) = open("target", 1);
    let mut best = 0f64;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for offset in (0..BYTES).step_by(page) {
            let (from, to) = (source.address().as_ptr(), target.address().as_ptr());
            // SAFETY: the offsets lie inside both mappings, which are different and have no connection.
            unsafe { std::ptr::copy_nonoverlapping(from.add(offset), to.add(offset), page) };
        }
        best = best.max(BYTES as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    best
}
