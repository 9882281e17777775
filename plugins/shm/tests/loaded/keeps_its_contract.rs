//! What a host may rely on, between two instances of the loaded plugin in one process.

use host_plugin_api::RegionId;
use host_plugin_api::*;
use host_test_peer::*;
use host_tests::plugin_files;

const BYTES: usize = 1 << 20;

fn pair(config: &str) -> (Worker, Worker, PeerId) {
    let directory = plugin_files::directory(&["shm"]);
    let config = format!("{}{config}", crate::PATIENT);
    let sender = Worker::open(directory.path(), "shm", "prefill", BYTES, &config);
    let receiver = Worker::open(directory.path(), "shm", "decode", BYTES, &config);
    let peer = sender.backend.connect("decode", &receiver.backend.endpoint().unwrap()).unwrap();
    (sender, receiver, peer)
}

fn page(sender: &Worker, receiver: &Worker) -> Write {
    Write {
        source_region: sender.region,
        target_region: receiver.region,
        source_offset: 0,
        target_offset: 0,
        length: 4096,
        target_generation: 1,
    }
}

#[test]
fn ranges_outside_their_region_are_refused_on_both_sides() {
    let (sender, receiver, peer) = pair("");
    let good = page(&sender, &receiver);
    let end = BYTES as u64;
    let bad = [
        Write { source_offset: end - 4095, ..good },
        Write { target_offset: end - 4095, ..good },
        Write { source_offset: u64::MAX, ..good },
        Write { target_offset: u64::MAX - 1, ..good },
        Write { source_region: RegionId(good.source_region.0 + 1), ..good },
        Write { target_region: RegionId(good.target_region.0 + 1), ..good },
        Write { source_region: RegionId(0), ..good },
        Write { target_region: RegionId(0), ..good },
        Write { length: 0, ..good },
    ];
    for write in bad {
        let code = sender.backend.submit(&submission(peer, 1, b""), &[good, write]);
        assert_eq!(code, ErrorCode::INVALID_ARGUMENT.0, "{write:?}");
    }
    let unknown = submission(PeerId(99), 1, b"");
    assert_eq!(sender.backend.submit(&unknown, &[good]), ErrorCode::INVALID_ARGUMENT.0);
    let long = Submission { notification_length: 49, ..submission(peer, 1, b"") };
    assert_eq!(sender.backend.submit(&long, &[good]), ErrorCode::INVALID_ARGUMENT.0);
    let last = Write { source_offset: end - 4096, target_offset: end - 4096, ..good };
    assert_eq!(sender.backend.submit(&submission(peer, 1, b""), &[last]), 0);
    assert_eq!(sender.completion().status, 0);
    assert_eq!(
        sender.backend.poll(&mut [sender_completion()]),
        0,
        "refused submissions end in no completion"
    );
}

fn sender_completion() -> Completion {
    Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }
}

#[test]
fn memory_that_cannot_be_shared_is_refused() {
    let (sender, _receiver, _peer) = pair("");
    let memory = Memory {
        address: Address::of(sender.memory.address().as_ptr()),
        length: BYTES as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 1,
        fd_offset: 0,
    };
    let code = |memory: &Memory| sender.backend.register(memory).unwrap_err().code;
    assert_eq!(code(&memory), ErrorCode::UNSUPPORTED);
    let fd = std::os::fd::AsRawFd::as_raw_fd(&sender.memory.fd());
    assert_eq!(code(&Memory { fd, kind: MemoryKind::VRAM, ..memory }), ErrorCode::UNSUPPORTED);
    assert_eq!(code(&Memory { fd, length: BYTES as u64 + 1, ..memory }), ErrorCode::INVALID_ARGUMENT);
    assert_eq!(code(&Memory { fd, fd_offset: u64::MAX, ..memory }), ErrorCode::INVALID_ARGUMENT);
    assert_eq!(code(&Memory { fd: 9999, ..memory }), ErrorCode::IO);
}

#[test]
fn a_full_queue_refuses_and_takes_again_after_a_poll() {
    let (sender, receiver, peer) = pair("max_submissions = 2\nmax_writes = 3");
    let limits = sender.backend.limits();
    assert_eq!((limits.max_writes, limits.max_submissions), (3, 2));
    let write = page(&sender, &receiver);
    assert_eq!(sender.backend.submit(&submission(peer, 1, b""), &[write; 3]), 0);
    assert_eq!(sender.backend.submit(&submission(peer, 2, b""), &[write; 1]), 0);
    assert_eq!(sender.backend.submit(&submission(peer, 3, b""), &[write]), ErrorCode::WOULD_BLOCK.0);
    let first = sender.completion();
    assert_eq!(first.bytes, 3 * 4096);
    assert_eq!(sender.backend.submit(&submission(peer, 3, b""), &[write]), 0);
    assert_eq!(
        sender.backend.submit(&submission(peer, 4, b""), &[write; 4]),
        ErrorCode::INVALID_ARGUMENT.0,
        "more than max_writes never fit"
    );
}

#[test]
fn writes_land_in_the_order_in_which_they_are_submitted() {
    let (sender, receiver, peer) = pair("");
    for (i, byte) in sender.bytes_mut().iter_mut().enumerate() {
        *byte = (i / 4096) as u8;
    }
    // All writes go to one place: the last one named stays.
    let write = |i: u64| Write { source_offset: i * 4096, ..page(&sender, &receiver) };
    for (tag, last) in [(1, 5), (2, 3)] {
        assert_eq!(sender.backend.submit(&submission(peer, tag, b"x"), &[7, 0, last].map(write)), 0);
        assert_eq!(receiver.notification().kind, NotificationKind::ARRIVED);
        assert_eq!(receiver.bytes()[0], last as u8);
        assert_eq!(sender.completion().bytes, 3 * 4096);
    }
}

#[test]
fn a_cancelled_submission_ends_once_and_is_then_settled() {
    let (sender, _receiver, peer) = pair("");
    assert_eq!(sender.backend.cancel(Tag(1)), ErrorCode::INVALID_ARGUMENT.0);
    assert_eq!(sender.backend.settled(Tag(1)), 1, "a tag never seen is settled");
    // Fill the receiver's ring, so that what follows is in flight for sure.
    let mut polled = 0;
    for tag in 1..=1024 {
        wait("room", || match sender.backend.submit(&submission(peer, tag, b"n"), &[]) {
            0 => Some(()),
            _ => {
                assert_eq!(sender.completion().status, 0);
                polled += 1;
                None
            }
        });
    }
    (polled..1024).for_each(|_| assert_eq!(sender.completion().status, 0));
    assert_eq!(sender.backend.submit(&submission(peer, 5000, b"stuck"), &[]), 0);
    assert_eq!(sender.backend.settled(Tag(5000)), 0);
    assert_eq!(sender.backend.cancel(Tag(5000)), 0);
    let end = sender.completion();
    assert_eq!((end.tag, end.status), (Tag(5000), ErrorCode::CANCELLED.0));
    assert_eq!(sender.backend.settled(Tag(5000)), 1);
    assert_eq!(sender.backend.cancel(Tag(5000)), ErrorCode::INVALID_ARGUMENT.0);
}

#[test]
fn the_event_is_readable_exactly_while_something_waits() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let (sender, receiver, peer) = pair("");
    let readable = |worker: &Worker| {
        // SAFETY: the instance owns the descriptor and outlives the borrow.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(worker.backend.event_fd()) };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&now)).unwrap() == 1
    };
    let until_readable = |what: &str, worker: &Worker| wait(what, || readable(worker).then_some(()));
    assert!(!readable(&sender) && !readable(&receiver));
    for tag in 1..=2 {
        assert_eq!(sender.backend.submit(&submission(peer, tag, b"x"), &[page(&sender, &receiver)]), 0);
    }
    until_readable("the sender's event", &sender);
    until_readable("the receiver's event", &receiver);
    sender.completion();
    sender.completion();
    receiver.notification();
    until_readable("the receiver's event, because one more waits", &receiver);
    receiver.notification();
    for worker in [&sender, &receiver] {
        // A copy thread may signal once more what was taken already.
        wait("a drained instance to be quiet", || {
            assert_eq!(worker.backend.poll(&mut [sender_completion()]), 0);
            assert_eq!(worker.backend.notifications(&mut [empty_notification()]), 0);
            (!readable(worker)).then_some(())
        });
    }
}

#[test]
fn a_wrong_configuration_is_refused_by_the_manifest_or_by_the_plugin() {
    let directory = plugin_files::directory(&["shm"]);
    let catalog = host_plugins::Catalog::scan([directory.path()]);
    let entry = catalog.find("shm").unwrap();
    let refused = |config: &str| {
        let opening = Opening { name: "a".into(), config: config.into() };
        host_plugins::open_transfer(entry, &opening).err().unwrap().to_string()
    };
    assert!(refused("copy_thread = 2").contains("known: connect_timeout_ms, copy_threads,"));
    assert!(refused("copy_threads = \"two\"").contains("it must be of type integer"));
    assert!(refused("copy_threads = 17").contains("it must be 1 to 16"));
    assert!(refused("not toml").contains("configuration of plugin \"shm\""));
}

#[test]
fn after_a_disconnect_only_a_new_connection_gets_through() {
    let (sender, receiver, old) = pair("");
    let (to_sender, to_receiver) = (sender.backend.endpoint().unwrap(), receiver.backend.endpoint().unwrap());
    let back = receiver.backend.connect("prefill", &to_sender).unwrap();
    receiver.backend.disconnect(back).unwrap();
    // Both sides may have cut the other off. Either may connect first.
    let new = sender.backend.connect("decode", &to_receiver).unwrap();
    assert_ne!(old, new);
    // The old id is lost, or forgotten already: a connection that was lost is replaced by the new one.
    let status = sender.backend.submit(&submission(old, 1, b"old"), &[page(&sender, &receiver)]);
    let ended = if status == 0 { sender.completion().status } else { status };
    assert!([ErrorCode::PEER_LOST.0, ErrorCode::INVALID_ARGUMENT.0].contains(&ended), "{ended}");
    assert_eq!(sender.backend.submit(&submission(new, 2, b"new"), &[page(&sender, &receiver)]), 0);
    let arrived = receiver.notification();
    assert_eq!((arrived.kind, &arrived.payload[..3]), (NotificationKind::ARRIVED, b"new".as_slice()));
}
