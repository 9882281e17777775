//! Measures how fast scattered pages move between two processes' memory on one GPU, and between GPU and host, beside the driver's
//! own copy of the same bytes in the same run. Every byte is compared, a sender is killed in mid copy, and memory is given back.
//!
//! `cargo bench -p host-plugin-shm --bench device_handover`, on a machine with a GPU of NVIDIA's.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::ffi::{c_int, c_uint, c_void};
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use host_memory::SharedMemory;
use host_plugin_api::*;
use host_plugin_shm::ShmBackend;
use libloading::os::unix::Library;

/// Larger than any cache.
const BYTES: usize = 1 << 30;
/// Fewer bytes for smaller pages, so that a run takes seconds.
const SMALL_BYTES: usize = 256 << 20;
const ROUNDS: usize = 5;
const PAGES: [usize; 5] = [2 << 20, 128 << 10, 32 << 10, 8 << 10, 1 << 10];
const KINDS: [(&str, bool, bool); 3] =
    [("device to device", true, true), ("host to device", false, true), ("device to host", true, false)];

fn main() {
    match std::env::var("ROLE").as_deref() {
        Ok("receiver") => return receive(),
        Ok("flooder") => return flood(),
        _ => {}
    }
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let driver = Driver::load();
    let own = Own::open(&driver, "prefill");
    own.fill(&driver);
    let mut receiver = Peer::start("receiver");
    let target = receiver.line();
    let words: Vec<&str> = target.split(' ').collect();
    let targets: Vec<RegionId> = words[..2].iter().map(|word| RegionId(word.parse().unwrap())).collect();
    let start = Instant::now();
    let peer = own.backend.connect("decode", &unhex(words[2])).unwrap();
    println!("connected in {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
    println!("{:>17} {:>9} {:>12} {:>14} {:>7}", "", "page", "driver GB/s", "transfer GB/s", "ratio");
    let mut tag = 0;
    for (name, from_device, to_device) in KINDS {
        let copied = own.copied(&driver, from_device, to_device);
        for page in PAGES {
            let bytes = if page < 128 << 10 { SMALL_BYTES } else { BYTES };
            receiver.ask("clear");
            let (from, to) = (own.regions[usize::from(!from_device)], targets[usize::from(!to_device)]);
            let moved = transfer(&own.backend, peer, (from, to), bytes, page, &mut tag);
            let ratio = moved / copied;
            let right = receiver.ask(&format!("check {} {bytes} {page}", usize::from(!to_device)));
            println!("{name:>17} {:>5} KiB {copied:>12.1} {moved:>14.1} {ratio:>7.3} {right}", page >> 10);
        }
    }
    println!("a region is taken back and freed: {}", receiver.ask("free"));
    drop(receiver);
    kill(&own, &driver);
    own.backend.shutdown(5000).unwrap();
}

/// Order of the pages at the target: page `i` of the source goes to place `order[i]`.
fn order(pages: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..pages).collect();
    let mut state = 1u64;
    for last in (1..pages).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(last, (state >> 33) as usize % (last + 1));
    }
    order
}

fn word(at: usize) -> u64 {
    (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn transfer(
    backend: &ShmBackend,
    peer: PeerId,
    (from, to): (RegionId, RegionId),
    bytes: usize,
    page: usize,
    tag: &mut u64,
) -> f64 {
    let most = backend.limits().max_writes as usize;
    let write = |(at, place): (usize, &usize)| Write {
        source_region: from,
        target_region: to,
        source_offset: (at * page) as u64,
        target_offset: (place * page) as u64,
        length: page as u32,
        target_generation: 1,
    };
    let writes: Vec<Write> = order(bytes / page).iter().enumerate().map(write).collect();
    let batches: Vec<&[Write]> = writes.chunks(most).collect();
    let mut best = 0f64;
    let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 64];
    for _ in 0..ROUNDS {
        let (mut submitted, mut completed) = (0, 0);
        let start = Instant::now();
        while completed < batches.len() {
            if submitted < batches.len() && submitted - completed < 64 {
                *tag += 1;
                let submission = Submission {
                    peer,
                    notification_length: 8,
                    tag: Tag(*tag),
                    notification: [0; NOTIFICATION_BYTES],
                };
                assert_eq!(backend.submit(&submission, batches[submitted]), 0);
                submitted += 1;
                continue;
            }
            let count = backend.poll(&mut done) as usize;
            assert!(done[..count].iter().all(|completion| completion.status == 0), "{done:?}");
            completed += count;
            std::thread::yield_now();
        }
        best = best.max(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    best
}

/// The other process: takes notifications until the sender is gone, and checks its memory on request.
fn receive() {
    let driver = Driver::load();
    let mut own = Own::open(&driver, "decode");
    println!("{} {} {}", own.regions[0].0, own.regions[1].0, hex(&own.backend.endpoint().unwrap()));
    let lines = std::sync::Arc::new(std::sync::Mutex::new(Vec::<String>::new()));
    let reader = lines.clone();
    std::thread::spawn(move || {
        std::io::stdin().lines().for_each(|line| reader.lock().unwrap().push(line.unwrap()));
    });
    let mut notifications = [empty(); 16];
    loop {
        let count = own.backend.notifications(&mut notifications) as usize;
        if notifications[..count].iter().any(|n| n.kind == NotificationKind::PEER_LOST) {
            return;
        }
        let Some(line) = lines.lock().unwrap().pop() else {
            std::thread::sleep(Duration::from_micros(200));
            continue;
        };
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().unwrap();
        match words[0] {
            "clear" => {
                driver.set(own.device, 0xff, BYTES);
                own.words().fill(0);
                println!("cleared");
            }
            "check" => {
                let (bytes, page) = (number(2), number(3));
                let mut copied = vec![0u64; bytes / 8];
                match number(1) {
                    0 => driver.download(&mut copied, own.device),
                    _ => copied.copy_from_slice(&own.words()[..bytes / 8]),
                }
                let words = page / 8;
                let is_right = |(at, place): (usize, &usize)| {
                    let landed = &copied[place * words..][..words];
                    landed.iter().enumerate().all(|(i, landed)| *landed == word(at * words + i))
                };
                let right = order(bytes / page).iter().enumerate().all(is_right);
                println!("{}", if right { "right" } else { "WRONG" });
            }
            "free" => {
                let before = driver.free();
                let start = Instant::now();
                own.backend.deregister(own.regions[0]).unwrap();
                let took = start.elapsed().as_secs_f64() * 1e3;
                driver.give_back(own.device);
                own.device = 0;
                let freed = (driver.free() - before) >> 20;
                println!("{freed} MiB are free again, the peers closed it in {took:.1} ms");
            }
            other => panic!("unknown word {other}"),
        }
    }
}

/// A sender that writes all of the parent's memory over and over, until it is killed.
fn flood() {
    let driver = Driver::load();
    let own = Own::open(&driver, "flooder");
    println!("{}", hex(&own.backend.endpoint().unwrap()));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let words: Vec<&str> = line.trim().split(' ').collect();
    let peer = own.backend.connect("parent", &unhex(words[2])).unwrap();
    own.words().fill(7);
    let write = |number: usize| Write {
        source_region: own.regions[1],
        target_region: RegionId(words[number].parse().unwrap()),
        length: BYTES as u32,
        target_generation: 1,
        ..Write::default()
    };
    let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 16];
    for tag in 1.. {
        let notification = [0; NOTIFICATION_BYTES];
        let submission = Submission { peer, notification_length: 8, tag: Tag(tag), notification };
        if own.backend.submit(&submission, &[write(0)]) < 0 {
            own.backend.poll(&mut done);
            std::thread::yield_now();
        }
    }
}

/// Kills a process whose GPU writes this process's memory, and checks that nothing lands after the process was reported lost.
fn kill(own: &Own, driver: &Driver) {
    for round in 1..=3 {
        let mut flooder = Peer::start("flooder");
        let _endpoint = flooder.line();
        let endpoint = hex(&own.backend.endpoint().unwrap());
        flooder.say(&format!("{} {} {endpoint}", own.regions[0].0, own.regions[1].0));
        let mut one = [empty()];
        while one[0].kind != NotificationKind::ARRIVED {
            own.backend.notifications(&mut one);
            std::thread::yield_now();
        }
        let start = Instant::now();
        flooder.process.kill().unwrap();
        while one[0].kind != NotificationKind::PEER_LOST {
            own.backend.notifications(&mut one);
            std::thread::yield_now();
        }
        let lost = start.elapsed().as_secs_f64() * 1e3;
        driver.set(own.device, 1, BYTES);
        std::thread::sleep(Duration::from_millis(150));
        let mut seen = vec![0u64; BYTES / 8];
        driver.download(&mut seen, own.device);
        let late = seen.iter().filter(|word| **word != 0x0101_0101_0101_0101).count();
        println!("killed sender {round}: reported lost after {lost:.1} ms, {late} words landed later");
    }
}

fn empty() -> Notification {
    Notification {
        kind: NotificationKind(0),
        length: 0,
        peer_name_length: 0,
        reserved: 0,
        payload: [0; NOTIFICATION_BYTES],
        peer_name: [0; 64],
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// A child that is this program in another role.
struct Peer {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    fn start(role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env("ROLE", role).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let input = process.stdin.take().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self { process, input, output }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.line()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _gone = self.process.kill();
        let _reaped = self.process.wait();
    }
}

/// An instance with memory on the device and in the host, registered in this order.
struct Own {
    backend: ShmBackend,
    device: u64,
    host: SharedMemory,
    regions: [RegionId; 2],
}

impl Own {
    fn open(driver: &Driver, name: &str) -> Self {
        let backend = host_plugin_shm::open(&Opening { name: name.into(), config: String::new() }).unwrap();
        let device = driver.take(BYTES);
        let host = SharedMemory::new("bench", BYTES).unwrap();
        let memory = Memory {
            address: Address(device),
            length: BYTES as u64,
            kind: MemoryKind::VRAM,
            device: 0,
            fd: -1,
            generation: 1,
            fd_offset: 0,
        };
        let on_device = backend.register(&memory).unwrap();
        let address = Address::of(host.address().as_ptr());
        let fd = std::os::fd::AsRawFd::as_raw_fd(&host.fd());
        let in_host = backend.register(&Memory { address, kind: MemoryKind::DRAM, fd, ..memory }).unwrap();
        Self { backend, device, host, regions: [on_device, in_host] }
    }

    #[allow(clippy::mut_from_ref, reason = "the memory is shared with another process anyway")]
    fn words(&self) -> &mut [u64] {
        // SAFETY: the whole mapping, of which one such slice is in use at a time.
        unsafe { std::slice::from_raw_parts_mut(self.host.address().as_ptr().cast(), BYTES / 8) }
    }

    fn fill(&self, driver: &Driver) {
        self.words().iter_mut().enumerate().for_each(|(at, place)| *place = word(at));
        driver.copy(self.device, self.host_address(), BYTES);
    }

    fn host_address(&self) -> u64 {
        self.host.address().as_ptr() as usize as u64
    }

    /// The speed of the driver's own copy of all bytes at once, in GB/s.
    fn copied(&self, driver: &Driver, from_device: bool, to_device: bool) -> f64 {
        let other = driver.take(BYTES);
        // The plugin pins the host memory from the moment on when a peer has memory on a device.
        let from = if from_device { self.device } else { self.host_address() };
        let host = SharedMemory::new("bench", BYTES).unwrap();
        let to = if to_device { other } else { host.address().as_ptr() as usize as u64 };
        if !to_device {
            driver.pin(to, BYTES);
        }
        let round = |_| {
            let start = Instant::now();
            driver.copy(to, from, BYTES);
            BYTES as f64 / start.elapsed().as_secs_f64() / 1e9
        };
        let best = (0..ROUNDS).map(round).fold(0.0, f64::max);
        if !to_device {
            driver.unpin(to);
        }
        driver.give_back(other);
        best
    }
}

/// The driver, as a host uses it.
struct Driver(Library);

macro_rules! call {
    ($driver:expr, $name:literal, ($($type:ty),*), $($argument:expr),*) => {{
        // SAFETY: the type is that of the function in cuda.h, and the caller's arguments are memory of the length that it says.
        let code = unsafe {
            $driver.0.get::<unsafe extern "C" fn($($type),*) -> c_int>($name).unwrap()($($argument),*)
        };
        assert_eq!(code, 0, "{}", String::from_utf8_lossy($name));
    }};
}

impl Driver {
    fn load() -> Self {
        // SAFETY: the driver's initialisers are those that every CUDA program runs.
        let library = unsafe { Library::open(Some("libcuda.so.1"), libloading::os::unix::RTLD_NOW) };
        let driver = Self(library.unwrap());
        let mut context: *mut c_void = std::ptr::null_mut();
        call!(driver, b"cuInit", (c_uint), 0);
        call!(driver, b"cuDevicePrimaryCtxRetain", (*mut *mut c_void, c_int), &raw mut context, 0);
        call!(driver, b"cuCtxSetCurrent", (*mut c_void), context);
        driver
    }

    fn take(&self, bytes: usize) -> u64 {
        let mut address = 0;
        call!(self, b"cuMemAlloc_v2", (*mut u64, usize), &raw mut address, bytes);
        address
    }

    fn give_back(&self, address: u64) {
        call!(self, b"cuMemFree_v2", (u64), address);
    }

    fn free(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        call!(self, b"cuMemGetInfo_v2", (*mut usize, *mut usize), &raw mut free, &raw mut total);
        free
    }

    fn copy(&self, to: u64, from: u64, bytes: usize) {
        call!(self, b"cuMemcpyAsync", (u64, u64, usize, *mut c_void), to, from, bytes, std::ptr::null_mut());
        call!(self, b"cuCtxSynchronize", (),);
    }

    fn download(&self, to: &mut [u64], from: u64) {
        let (to, bytes) = (to.as_mut_ptr().cast(), size_of_val(to));
        call!(self, b"cuMemcpyDtoH_v2", (*mut c_void, u64, usize), to, from, bytes);
    }

    fn set(&self, address: u64, value: u8, bytes: usize) {
        call!(self, b"cuMemsetD8_v2", (u64, u8, usize), address, value, bytes);
        call!(self, b"cuCtxSynchronize", (),);
    }

    fn pin(&self, address: u64, bytes: usize) {
        let address = address as *mut c_void;
        call!(self, b"cuMemHostRegister_v2", (*mut c_void, usize, c_uint), address, bytes, 1);
    }

    fn unpin(&self, address: u64) {
        call!(self, b"cuMemHostUnregister", (*mut c_void), address as *mut c_void);
    }
}
