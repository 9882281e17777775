//! What the shared-memory plugin does when peers die, leave, lag or send nonsense.

use host_plugin_api::RegionId;
use host_plugin_api::*;
use host_test_peer::*;
use host_tests::plugin_files;

use crate::{CONNECTS, PATIENT};

const BYTES: usize = 4 << 20;

fn everything(sender: &Worker, target: u32) -> Write {
    let length = sender.memory.bytes() as u32;
    Write {
        source_region: sender.region,
        target_region: RegionId(target),
        length,
        target_generation: 1,
        ..Write::default()
    }
}

/// Starts a child that writes all of the receiver's memory over and over. Returns the receiver, the child, and the
/// receiver's peer for it.
fn flooded(directory: &std::path::Path, config: &str) -> (Worker, Remote, PeerId) {
    let receiver = Worker::open(directory, "shm", "decode", BYTES, config);
    let mut sender = Remote::start(directory, "shm", "prefill", BYTES, PATIENT);
    let peer = receiver.backend.connect("prefill", &sender.endpoint()).unwrap();
    sender.ask("fill 7");
    sender.ask(&format!("connect {}", hex(&receiver.backend.endpoint().unwrap())));
    sender.ask(&format!("flood {}", receiver.region.0));
    assert_eq!(receiver.notification().kind, NotificationKind::ARRIVED);
    (receiver, sender, peer)
}

fn no_completion() -> Completion {
    Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }
}

/// One byte in each page of the receiver: few, so that they are set before a late copy has come far.
const MARKED: usize = 4096;

fn mark(receiver: &Worker) {
    receiver.bytes_mut().iter_mut().step_by(MARKED).for_each(|byte| *byte = 1);
}

fn is_marked(receiver: &Worker) -> bool {
    receiver.bytes().iter().step_by(MARKED).all(|byte| *byte == 1)
}

#[test]
fn a_sender_killed_in_mid_transfer_is_reported_lost_after_what_it_delivered() {
    let directory = plugin_files::directory(&["shm"]);
    let (receiver, mut sender, _peer) = flooded(directory.path(), PATIENT);
    sender.kill();
    let mut last = 0;
    loop {
        let notification = receiver.notification();
        if notification.kind == NotificationKind::PEER_LOST {
            break;
        }
        let tag = u64::from_le_bytes(notification.payload[..8].try_into().unwrap());
        assert!(tag > last, "{tag} after {last}");
        last = tag;
    }
    receiver.bytes_mut().fill(1);
    receiver.backend.deregister(receiver.region).unwrap();
    assert!(receiver.bytes().iter().all(|byte| *byte == 1));
}

#[test]
fn nothing_lands_after_a_disconnect_although_the_peer_keeps_writing() {
    let directory = plugin_files::directory(&["shm"]);
    for _ in 0..20 {
        let (receiver, mut sender, peer) = flooded(directory.path(), PATIENT);
        receiver.backend.disconnect(peer).unwrap();
        mark(&receiver);
        // The sender goes on trying until it is dead.
        sender.kill();
        assert!(is_marked(&receiver), "a late write landed");
        assert_eq!(receiver.backend.notifications(&mut [empty_notification()]), 0);
        assert_eq!(receiver.backend.disconnect(peer).unwrap_err().code, ErrorCode::INVALID_ARGUMENT);
    }
}

#[test]
fn nothing_lands_after_a_deregistration_although_the_peer_keeps_writing() {
    let directory = plugin_files::directory(&["shm"]);
    for _ in 0..20 {
        let (receiver, mut sender, _peer) = flooded(directory.path(), PATIENT);
        receiver.backend.deregister(receiver.region).unwrap();
        mark(&receiver);
        sender.kill();
        assert!(is_marked(&receiver), "a late write landed");
    }
}

#[test]
fn a_stopped_sender_cannot_be_fenced_and_its_death_is_the_proof() {
    use rustix::process::{Pid, Signal, kill_process};
    let directory = plugin_files::directory(&["shm"]);
    let config = format!("{CONNECTS}fence_timeout_ms = 300");
    let (receiver, mut sender, peer) = flooded(directory.path(), &config);
    let pid = Pid::from_child(&sender.process);
    // Stopped at random, the sender is inside a copy most of the time. When it is not, the fence holds at once.
    kill_process(pid, Signal::STOP).unwrap();
    let stopped = receiver.backend.disconnect(peer);
    if let Err(error) = stopped {
        assert_eq!(error.code, ErrorCode::TIMEOUT, "{error}");
        sender.kill();
        wait("the fence", || receiver.backend.disconnect(peer).ok());
    }
}

#[test]
fn a_receiver_killed_in_mid_transfer_ends_every_submission_with_peer_lost() {
    let directory = plugin_files::directory(&["shm"]);
    let sender = Worker::open(directory.path(), "shm", "prefill", BYTES, PATIENT);
    let mut receiver = Remote::start(directory.path(), "shm", "decode", BYTES, PATIENT);
    let target: u32 = receiver.ask("region").parse().unwrap();
    let peer = sender.backend.connect("decode", &receiver.endpoint()).unwrap();
    let writes = [everything(&sender, target)];
    // The receiver takes no notifications, so its ring fills and later submissions wait.
    let mut accepted = 0u64;
    let mut completed = 0;
    while accepted < 1024 + 64 {
        let writes = if accepted < 4 { &writes[..] } else { &[] };
        match sender.backend.submit(&submission(peer, accepted + 1, b"n"), writes) {
            0 => accepted += 1,
            code => {
                assert_eq!(code, ErrorCode::WOULD_BLOCK.0);
                assert_eq!(sender.completion().status, 0);
                completed += 1;
            }
        }
    }
    assert_eq!(sender.backend.settled(Tag(accepted)), 0, "beyond the ring nothing is delivered");
    receiver.kill();
    let mut lost = 0;
    while completed < accepted {
        let completion = sender.completion();
        completed += 1;
        lost += u64::from(completion.status == ErrorCode::PEER_LOST.0);
        assert_eq!(sender.backend.settled(completion.tag), 1);
    }
    // Lost are notifications that the ring cannot hold, and submissions that the copy thread had not come to.
    assert!(lost >= 64, "only {lost} were lost");
    assert_eq!(sender.backend.poll(&mut [no_completion()]), 0, "each ends once");
    assert_eq!(sender.notification().kind, NotificationKind::PEER_LOST);
    assert_eq!(sender.backend.submit(&submission(peer, 1, b""), &[]), ErrorCode::PEER_LOST.0);

    // The same name again, in another process.
    let mut receiver = Remote::start(directory.path(), "shm", "decode-2", BYTES, PATIENT);
    let target: u32 = receiver.ask("region").parse().unwrap();
    let again = sender.backend.connect("decode", &receiver.endpoint()).unwrap();
    assert_ne!(again, peer);
    sender.bytes_mut().fill(9);
    assert_eq!(sender.backend.submit(&submission(again, 1, b"again"), &[everything(&sender, target)]), 0);
    assert_eq!(receiver.ask("notification"), format!("arrived prefill {}", hex(b"again")));
    assert_eq!(receiver.ask("byte 4194303"), "9");
}

#[test]
fn a_full_ring_delays_notifications_and_loses_none() {
    const COUNT: u64 = 3000;
    let directory = plugin_files::directory(&["shm"]);
    let sender = Worker::open(directory.path(), "shm", "prefill", 4096, PATIENT);
    let mut receiver = Remote::start(directory.path(), "shm", "decode", 4096, PATIENT);
    let peer = sender.backend.connect("decode", &receiver.endpoint()).unwrap();
    let (mut accepted, mut completed, mut received) = (0u64, 0u64, std::collections::BTreeSet::new());
    let mut take = |receiver: &mut Remote| received.insert(receiver.ask("notification"));
    while accepted < COUNT {
        match sender.backend.submit(&submission(peer, accepted + 1, &accepted.to_le_bytes()), &[]) {
            0 => accepted += 1,
            // One read makes room for one. The sender must find that out by itself.
            _ => {
                assert!(take(&mut receiver));
                let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 64];
                completed += sender.backend.poll(&mut done) as u64;
            }
        }
    }
    for _ in received.len() as u64..COUNT {
        received.insert(receiver.ask("notification"));
    }
    assert_eq!(received.len() as u64, COUNT);
    while completed < COUNT {
        assert_eq!(sender.completion().status, 0);
        completed += 1;
    }
}

#[test]
fn a_write_that_means_an_earlier_registration_lands_nowhere() {
    let directory = plugin_files::directory(&["shm"]);
    let sender = Worker::open(directory.path(), "shm", "prefill", BYTES, PATIENT);
    sender.bytes_mut().fill(9);
    let mut receiver = Remote::start(directory.path(), "shm", "decode", BYTES, PATIENT);
    let target: u32 = receiver.ask("region").parse().unwrap();
    let peer = sender.backend.connect("decode", &receiver.endpoint()).unwrap();
    let other: u32 = receiver.ask("reregister").parse().unwrap();
    assert_eq!(sender.backend.submit(&submission(peer, 1, b"late"), &[everything(&sender, target)]), 0);
    let late = sender.completion();
    assert_eq!((late.status, late.bytes), (ErrorCode::INVALID_ARGUMENT.0, 0));
    assert_eq!(receiver.ask("byte 0"), "0");

    let peer = sender.backend.connect("decode", &receiver.endpoint()).unwrap();
    let wrong = everything(&sender, other);
    assert_eq!(sender.backend.submit(&submission(peer, 2, b"wrong"), &[wrong]), 0);
    assert_eq!(sender.completion().status, ErrorCode::INVALID_ARGUMENT.0, "generation 1 is over");
    let right = Write { target_generation: 2, ..wrong };
    assert_eq!(sender.backend.submit(&submission(peer, 3, b"right"), &[right]), 0);
    assert_eq!(receiver.ask("notification"), format!("arrived prefill {}", hex(b"right")));
    assert_eq!(receiver.ask("byte 0"), "9");
}

#[test]
fn nonsense_on_the_socket_harms_only_its_sender() {
    use rustix::net::*;
    let directory = plugin_files::directory(&["shm"]);
    let receiver = Worker::open(directory.path(), "shm", "decode", 4096, PATIENT);
    let sender = Worker::open(directory.path(), "shm", "prefill", 4096, PATIENT);
    let endpoint = receiver.backend.endpoint().unwrap();
    let name = u128::from_le_bytes(endpoint[8..24].try_into().unwrap());
    let address = SocketAddrUnix::new_abstract_name(format!("host-shm-{name:032x}").as_bytes()).unwrap();
    let stolen = [&endpoint[..8], &[0u8; 16], &endpoint[40..56], b"prefill"].concat();
    let long = [&endpoint[..8], &endpoint[24..56], &[b'x'; 100]].concat();
    for hello in [&b""[..], b"x", &endpoint[..30], &stolen, &long, &[0xff; 3000]] {
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&socket, &address).unwrap();
        send(&socket, hello, SendFlags::NOSIGNAL).unwrap();
        // A refusal, or the end. Never a welcome, which is a code of 0 after the magic.
        let mut answer = [0; 512];
        let (_, length) = recv(&socket, &mut answer, RecvFlags::empty()).unwrap();
        assert!(length == 0 || answer[8..12] != [0; 4], "welcomed after {hello:?}");
    }
    assert_eq!(sender.backend.connect("x", b"").unwrap_err().code, ErrorCode::VERSION);
    assert_eq!(sender.backend.connect("x", &endpoint[..30]).unwrap_err().code, ErrorCode::INVALID_ARGUMENT);
    let peer = sender.backend.connect("decode", &endpoint).unwrap();
    assert_eq!(sender.backend.submit(&submission(peer, 1, b"hi"), &[]), 0);
    assert_eq!(receiver.notification().kind, NotificationKind::ARRIVED);
}
