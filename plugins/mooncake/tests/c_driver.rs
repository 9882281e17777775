//! The C driver against a library with the same functions, which is built here and fails on request.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use host_plugin_api::Address;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use host_plugin_api::*;
use host_plugin_mooncake::{MooncakeBackend, check, open};
use host_tests::wait::poll_until;

/// Builds the library, once.
fn library() -> PathBuf {
    static BUILT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let build = || {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("libtransfer_engine.so");
        let output = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
            .args([
                "--edition=2024",
                "--crate-type=cdylib",
                "--crate-name=transfer_engine",
                "-Cpanic=abort",
                "-o",
            ])
            .arg(&file)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake/transfer_engine.rs"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (folder, file)
    };
    BUILT.get_or_init(build).1.clone()
}

/// One test at a time: the library counts what all of them do.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn count(what: i32) -> usize {
    // SAFETY: our own library, loaded already, and a function of this type.
    unsafe {
        let library = libloading::Library::new(library()).unwrap();
        library.get::<unsafe extern "C" fn(i32) -> usize>(b"fakeCount").unwrap()(what)
    }
}

fn opened(name: &str, more: &str) -> MooncakeBackend {
    let patient = "connect_timeout_ms = 60000\nfence_timeout_ms = 60000\n";
    let library = library().display().to_string();
    let config = format!("backend = \"c\"\nlibrary = {library:?}\n{patient}{more}");
    check("transfer", &config).unwrap();
    open(&Opening { name: name.into(), config }).unwrap()
}

fn wait<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    poll_until(what, || ask().ok_or("nothing"))
}

/// Two instances, their memory, and the sender's peer.
struct Pair {
    sender: MooncakeBackend,
    receiver: MooncakeBackend,
    source: Box<[u8]>,
    target: Box<[u8]>,
    regions: (RegionId, RegionId),
    peer: PeerId,
}

const BYTES: usize = 1 << 20;

fn register(backend: &MooncakeBackend, memory: &[u8]) -> RegionId {
    let memory = Memory {
        address: Address::of(memory.as_ptr()),
        length: memory.len() as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 1,
        fd_offset: 0,
    };
    backend.register(&memory).unwrap()
}

impl Pair {
    fn new(more: &str) -> Self {
        let (sender, receiver) = (opened("sender", more), opened("receiver", more));
        let source: Box<[u8]> = (0..BYTES).map(|at| (at * 7 + at / 251) as u8).collect();
        let target = vec![0; BYTES].into_boxed_slice();
        let regions = (register(&sender, &source), register(&receiver, &target));
        let peer = sender.connect("receiver", &receiver.endpoint().unwrap()).unwrap();
        Self { sender, receiver, source, target, regions, peer }
    }

    fn write(&self, from: usize, to: usize, length: usize) -> Write {
        Write {
            source_region: self.regions.0,
            target_region: self.regions.1,
            source_offset: from as u64,
            target_offset: to as u64,
            length: length as u32,
            target_generation: 1,
        }
    }

    fn submit(&self, tag: u64, writes: &[Write]) {
        let submission = Submission {
            peer: self.peer,
            notification_length: 8,
            tag: Tag(tag),
            notification: {
                let mut bytes = [0; NOTIFICATION_BYTES];
                bytes[..8].copy_from_slice(&tag.to_le_bytes());
                bytes
            },
        };
        assert_eq!(self.sender.submit(&submission, writes), 0);
    }

    fn completion(&self) -> Completion {
        let mut one = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }];
        wait("a completion", || (self.sender.poll(&mut one) == 1).then_some(one[0]))
    }

    fn notification(&self) -> Notification {
        let mut one = [Notification {
            kind: NotificationKind(0),
            length: 0,
            peer_name_length: 0,
            reserved: 0,
            payload: [0; NOTIFICATION_BYTES],
            peer_name: [0; 64],
        }];
        wait("a notification", || (self.receiver.notifications(&mut one) == 1).then_some(one[0]))
    }

    fn end(self) {
        self.sender.shutdown(60_000).unwrap();
        self.receiver.shutdown(60_000).unwrap();
        // Message senders hold on to the front until they have ended.
        wait("all engines to end", || (count(0) == 0).then_some(()));
    }
}

#[test]
fn writes_are_there_when_their_notification_is_and_nothing_is_left_behind() {
    let _alone = alone();
    let pair = Pair::new("");
    let before = count(1);
    let mut state = 0x2545_f491_u32;
    println!("seed {state:#x}");
    for tag in 1..=50u64 {
        let mut writes = Vec::new();
        let mut at = 0;
        while at < BYTES && writes.len() < 1000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Leaves out the lengths that stand for failures.
            let length = (20 + (state >> 8) as usize % 5000).min(BYTES - at);
            if state >> 31 == 0 && length >= 20 {
                writes.push(pair.write(at, at, length));
            }
            at += length;
        }
        pair.submit(tag, &writes);
        let seen = pair.notification();
        assert_eq!((seen.kind, &seen.payload[..8]), (NotificationKind::ARRIVED, &tag.to_le_bytes()[..]));
        for write in &writes {
            let range = write.source_offset as usize..write.source_offset as usize + write.length as usize;
            assert!(pair.source[range.clone()] == pair.target[range.clone()], "submission {tag}, {range:?}");
        }
        let bytes: u64 = writes.iter().map(|write| u64::from(write.length)).sum();
        let done = pair.completion();
        assert_eq!((done.tag, done.status, done.bytes), (Tag(tag), 0, bytes));
    }
    assert_eq!(count(1), before, "batches were not given back");
    pair.end();
}

#[test]
fn mooncake_is_never_given_more_than_max_outstanding() {
    let _alone = alone();
    let pair = Pair::new("max_outstanding = 7\n");
    count(2);
    // No two writes are neighbours.
    let writes: Vec<Write> = (0..500).map(|i| pair.write(i * 100, i * 200, 50)).collect();
    for tag in 1..=4 {
        pair.submit(tag, &writes);
    }
    for _ in 0..4 {
        assert_eq!(pair.completion().status, 0);
    }
    assert_eq!(count(2), 7);
    pair.end();
}

#[test]
fn a_failed_write_is_settled_only_once_both_engines_have_ended() {
    let _alone = alone();
    let pair = Pair::new("");
    // One write fails, and one that was submitted with it never ends.
    pair.submit(1, &[pair.write(0, 0, 13), pair.write(100, 100, 17), pair.write(300, 300, 50)]);
    let done = pair.completion();
    assert_eq!(done.status, ErrorCode::PEER_LOST.0);
    wait("the submission to settle", || (pair.sender.settled(Tag(1)) == 1).then_some(()));
    // Two fronts are left: the ends of the link's engine and of the inbound endpoint's settled it.
    assert_eq!(count(0), 2);
    assert_eq!(pair.notification().kind, NotificationKind::PEER_LOST);
    // The peer itself still works.
    let peer = pair.sender.connect("receiver", &pair.receiver.endpoint().unwrap()).unwrap();
    let pair = Pair { peer, ..pair };
    pair.submit(2, &[pair.write(1000, 1000, 500)]);
    assert_eq!(pair.completion().status, 0);
    assert!(pair.target[1000..1500] == pair.source[1000..1500]);
    pair.end();
}

#[test]
fn a_slow_write_holds_its_own_submission_back_and_those_after_it_and_none_overtakes() {
    let _alone = alone();
    let pair = Pair::new("");
    pair.submit(1, &[pair.write(0, 0, 19)]);
    pair.submit(2, &[pair.write(100, 100, 50)]);
    for tag in 1..=2u64 {
        assert_eq!(pair.notification().payload[..8], tag.to_le_bytes());
        assert_eq!(pair.completion().tag, Tag(tag));
    }
    pair.end();
}

#[test]
fn a_write_that_never_ends_ends_with_the_connection() {
    let _alone = alone();
    let pair = Pair::new("");
    pair.submit(1, &[pair.write(0, 0, 17)]);
    assert_eq!(pair.sender.settled(Tag(1)), 0);
    pair.sender.disconnect(pair.peer).unwrap();
    assert_eq!(pair.completion().status, ErrorCode::PEER_LOST.0);
    assert_eq!(pair.sender.settled(Tag(1)), 1);
    pair.end();
}

#[test]
fn a_region_that_is_taken_back_is_unknown_to_the_engines_before_the_call_returns() {
    let _alone = alone();
    let pair = Pair::new("");
    pair.submit(1, &[pair.write(0, 0, 50)]);
    assert_eq!(pair.completion().status, 0);
    // The sender's link learns of it. The inbound endpoint at the receiver stays.
    pair.sender.deregister(pair.regions.0).unwrap();
    assert_eq!(count(0), 4);
    // The inbound endpoint leads to this region, and closes.
    pair.receiver.deregister(pair.regions.1).unwrap();
    wait("the link to end", || (count(0) == 2).then_some(()));
    pair.end();
}

#[test]
fn a_library_that_is_not_mooncake_is_refused_with_the_functions_it_lacks() {
    for config in ["library = \"/lib/x86_64-linux-gnu/libc.so.6\"", "library = \"/no/such.so\""] {
        let error = check("transfer", config).unwrap_err();
        let opened = open(&Opening { name: "n".into(), config: config.into() }).err().unwrap();
        for error in [error, opened] {
            let part = if config.contains("libc") { "createTransferEngine" } else { "/no/such.so" };
            assert!(error.code == ErrorCode::UNSUPPORTED && error.message.contains(part), "{error}");
        }
    }
}
