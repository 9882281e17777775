//! A worker's memory with a backend, and the same in another process, driven by lines.

// Each test uses its part.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::io::Write as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;

use host_memory::SharedMemory;
use host_plugin_api::*;
use host_plugins::{Catalog, open_transfer};
use host_tests::lines::Lines;
use host_tests::wait::poll_until;

/// One instance with one region.
pub struct Worker {
    pub backend: Arc<dyn TransferBackend>,
    pub memory: SharedMemory,
    pub region: RegionId,
    pub generation: u32,
}

impl Worker {
    pub fn open(directory: &Path, plugin: &str, name: &str, bytes: usize, config: &str) -> Self {
        let catalog = Catalog::scan([directory]);
        let entry = catalog.find(plugin).unwrap();
        let opening = Opening { name: name.to_owned(), config: config.to_owned() };
        let backend = open_transfer(entry, &opening).unwrap();
        let memory = SharedMemory::new("test", bytes).unwrap();
        let region = register(&*backend, &memory, 1).unwrap();
        Self { backend, memory, region, generation: 1 }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping lives as long as `self`; tests read what nobody writes any more.
        unsafe { std::slice::from_raw_parts(self.memory.address().as_ptr(), self.memory.bytes()) }
    }

    #[allow(clippy::mut_from_ref)]
    pub fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: as above; tests hold one such slice at a time.
        unsafe { std::slice::from_raw_parts_mut(self.memory.address().as_ptr(), self.memory.bytes()) }
    }

    /// The next completion; drives nothing else.
    pub fn completion(&self) -> Completion {
        let mut one = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }];
        wait("a completion", || match self.backend.poll(&mut one) {
            0 => None,
            1 => Some(one[0]),
            code => panic!("poll answered {code}"),
        })
    }

    pub fn notification(&self) -> Notification {
        let mut one = [empty_notification()];
        wait("a notification", || match self.backend.notifications(&mut one) {
            0 => None,
            1 => Some(one[0]),
            code => panic!("notifications answered {code}"),
        })
    }
}

pub fn empty_notification() -> Notification {
    Notification {
        kind: NotificationKind(0),
        length: 0,
        peer_name_length: 0,
        reserved: 0,
        payload: [0; NOTIFICATION_BYTES],
        peer_name: [0; 64],
    }
}

pub fn register(backend: &dyn TransferBackend, memory: &SharedMemory, generation: u32) -> Result<RegionId> {
    use std::os::fd::AsRawFd;
    backend.register(&Memory {
        address: memory.address().as_ptr() as u64,
        length: memory.bytes() as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: memory.fd().as_raw_fd(),
        generation,
        fd_offset: 0,
    })
}

/// A submission with `text` as its notification.
pub fn submission(peer: PeerId, tag: u64, text: &[u8]) -> Submission {
    let mut notification = [0; NOTIFICATION_BYTES];
    notification[..text.len()].copy_from_slice(text);
    Submission { peer, notification_length: text.len() as u32, tag: Tag(tag), notification }
}

/// Asks until there is an answer.
pub fn wait<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    poll_until(what, || ask().ok_or("still no answer"))
}

/// A [`Worker`] in a child process: this test binary again, running its test `child`.
pub struct Remote {
    pub process: Child,
    input: ChildStdin,
    output: Lines,
}

impl Remote {
    pub fn start(directory: &Path, plugin: &str, name: &str, bytes: usize, config: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored", "--nocapture", "--test-threads=1"])
            .env("CHILD", format!("{}\n{plugin}\n{name}\n{bytes}\n{config}", directory.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take().unwrap();
        let output = Lines::of(process.stdout.take().unwrap());
        Self { process, input, output }
    }

    /// Says a line and returns the answer.
    pub fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.answer()
    }

    pub fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    pub fn answer(&mut self) -> String {
        // What the test harness prints shares the pipe, also on our line.
        let answer = |line: &str| line.split_once("@ ").map(|(_, answer)| answer.trim_end().to_owned());
        self.output.find("the child process's answer", answer).expect("the child process ended")
    }

    pub fn endpoint(&mut self) -> Vec<u8> {
        unhex(&self.ask("endpoint"))
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let _already_gone = self.process.kill();
        let _reaped = self.process.wait();
    }
}

/// The child's side of [`Remote`]; returns when there is nothing to be.
pub fn be_child() {
    let Ok(what) = std::env::var("CHILD") else { return };
    let mut fields = what.splitn(5, '\n');
    let mut field = || fields.next().unwrap();
    let (directory, plugin, name, bytes) = (field(), field(), field(), field().parse().unwrap());
    let mut worker = Worker::open(Path::new(directory), plugin, name, bytes, field());
    let mut peer = PeerId(0);
    let answer = |text: String| println!("@ {text}");
    let outcome = |result: Result<()>| match result {
        Ok(()) => "ok".to_owned(),
        Err(error) => error.to_string(),
    };
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().unwrap();
        match words[0] {
            "endpoint" => answer(hex(&worker.backend.endpoint().unwrap())),
            "region" => answer(worker.region.0.to_string()),
            "notification" => {
                let n = worker.notification();
                let kind = if n.kind == NotificationKind::PEER_LOST { "lost" } else { "arrived" };
                let name = std::str::from_utf8(&n.peer_name[..n.peer_name_length as usize]).unwrap();
                answer(format!("{kind} {name} {}", hex(&n.payload[..n.length as usize])));
            }
            "hash" => answer(hash(&worker.bytes()[number(1)..number(1) + number(2)]).to_string()),
            "byte" => answer(worker.bytes()[number(1)].to_string()),
            "fill" => {
                worker.bytes_mut().fill(number(1) as u8);
                answer("ok".to_owned());
            }
            "connect" => {
                peer = worker.backend.connect("parent", &unhex(words[1])).unwrap();
                answer("ok".to_owned());
            }
            "disconnect" => answer(outcome(worker.backend.disconnect(peer))),
            "deregister" => answer(outcome(worker.backend.deregister(worker.region))),
            "reregister" => {
                worker.backend.deregister(worker.region).unwrap();
                worker.generation += 1;
                worker.region = register(&*worker.backend, &worker.memory, worker.generation).unwrap();
                answer(worker.region.0.to_string());
            }
            // Submits one write of everything, over and over, until killed.
            "flood" => {
                let target = words[1].parse().unwrap();
                let write = Write {
                    source_region: worker.region.0,
                    target_region: target,
                    length: worker.memory.bytes() as u32,
                    target_generation: 1,
                    ..Write::default()
                };
                answer("ok".to_owned());
                let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 16];
                for tag in 1.. {
                    if worker.backend.submit(&submission(peer, tag, &tag.to_le_bytes()), &[write]) < 0 {
                        worker.backend.poll(&mut done);
                        std::thread::yield_now();
                    }
                }
            }
            other => panic!("unknown word {other}"),
        }
    }
}

pub fn hash(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |i| u8::from_str_radix(&text[i..i + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}
