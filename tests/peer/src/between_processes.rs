//! Tests of a network transfer plugin between processes: bytes arrive before their notification, and fences hold whatever the
//! peer does. The tests of every such plugin call these functions.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use host_plugin_api::RegionId;
use host_plugin_api::*;
use host_tests::wait::until;
use rustix::io::Errno;
use rustix::net::{connect_unspec, getpeername};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, getpid, kill_process, pidfd_getfd, pidfd_open,
};

use crate::{Remote, Worker, hash, hex, submission, wait};

const BYTES: usize = 4 << 20;
/// Tries of a flood after a fence.
const TRIES: u64 = 1000;
/// Messages between two instances, for which their drivers look at all of their connections again and again.
const MESSAGES: u64 = 20;

/// A plugin to test.
#[derive(Clone, Debug)]
pub struct Setup<'a> {
    /// The directory that has it.
    pub directory: &'a Path,
    /// Its name.
    pub plugin: &'a str,
    /// Its configuration, whole lines without `fence_timeout_ms`.
    pub config: String,
}

impl Setup<'_> {
    /// The configuration with a long timeout, so that fences succeed on slow machines, too.
    fn patient(&self) -> String {
        format!("{}fence_timeout_ms = 60000\n", self.config)
    }

    fn worker(&self, name: &str) -> Worker {
        self.worker_with(name, &self.patient())
    }

    fn worker_with(&self, name: &str, config: &str) -> Worker {
        Worker::open(self.directory, self.plugin, name, BYTES, config)
    }

    fn remote(&self, name: &str) -> Remote {
        self.remote_with(name, &self.patient())
    }

    fn remote_with(&self, name: &str, config: &str) -> Remote {
        Remote::start(self.directory, self.plugin, name, BYTES, config)
    }
}

fn write(sender: &Worker, target: u32, offset: usize, length: usize) -> Write {
    Write {
        source_region: sender.region,
        target_region: RegionId(target),
        source_offset: offset as u64,
        target_offset: offset as u64,
        length: length as u32,
        target_generation: 1,
    }
}

/// Starts a child that writes all of the receiver's memory again and again. Returns the receiver, the child, and its peer id.
fn flooded(setup: &Setup<'_>) -> (Worker, Remote, PeerId) {
    let receiver = setup.worker("decode");
    let mut sender = setup.remote("prefill");
    let peer = receiver.backend.connect("prefill", &sender.endpoint()).unwrap();
    sender.ask("fill 7");
    sender.ask(&format!("connect {}", hex(&receiver.backend.endpoint().unwrap())));
    sender.ask(&format!("flood {}", receiver.region.0));
    assert_eq!(receiver.notification().kind, NotificationKind::ARRIVED);
    (receiver, sender, peer)
}

fn is_all(worker: &Worker, value: u8) -> bool {
    worker.bytes().iter().all(|byte| *byte == value)
}

/// Connects the first instance to the second one, sends messages, and waits for each. What the drivers of the two had to do for
/// other connections before is done by then, unless it waits for a peer.
fn exchange((own_name, from): (&str, &Worker), (name, to): (&str, &Worker)) {
    let peer = from.backend.connect(name, &to.backend.endpoint().unwrap()).unwrap();
    for tag in (1000..).map(Tag).take(MESSAGES as usize) {
        assert_eq!(from.backend.submit(&submission(peer, tag.0, b"m"), &[]), 0);
        let done = from.completion();
        assert_eq!((done.tag, done.status), (tag, 0));
        loop {
            let heard = to.notification();
            if heard.peer_name[..heard.peer_name_length as usize] == *own_name.as_bytes() {
                break;
            }
        }
    }
}

/// Connects again to a receiver that was fenced, and sends it a message. Returns what it hears before.
fn send_again(sender: &Worker, receiver: &mut Remote) -> Vec<String> {
    let again = sender.backend.connect("decode", &receiver.endpoint()).unwrap();
    assert_eq!(sender.backend.submit(&submission(again, 1, b"again"), &[]), 0);
    let wanted = format!("arrived prefill {}", hex(b"again"));
    let mut before = Vec::new();
    loop {
        let heard = receiver.ask("notification");
        if heard == wanted {
            return before;
        }
        before.push(heard);
    }
}

/// Scattered writes are in another process when their completion or notification is seen.
pub fn scattered_writes_are_in_another_process_when_their_completion_or_notification_is_seen(
    setup: &Setup<'_>,
) {
    let sender = setup.worker("prefill");
    let mut receiver = setup.remote("decode");
    let target: u32 = receiver.ask("region").parse().unwrap();
    let peer = sender.backend.connect("decode", &receiver.endpoint()).unwrap();
    let mut state = 0x9e37_79b9_u32;
    println!("seed {state:#x}");
    let mut expected = vec![0; BYTES];
    for round in 1..=20u8 {
        sender.bytes_mut().fill(round);
        // Writes of many sizes, some next to each other, in mixed order.
        let mut writes = Vec::new();
        let mut offset = 0;
        while offset < BYTES && writes.len() < 1000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let length = (1 + (state >> 8) as usize % 20_000).min(BYTES - offset);
            if state >> 30 != 0 {
                writes.push(write(&sender, target, offset, length));
                expected[offset..offset + length].fill(round);
            }
            offset += length;
        }
        // The plugin joins neighbours in ascending order only.
        if round % 2 == 0 {
            writes.reverse();
        }
        assert_eq!(sender.backend.submit(&submission(peer, round.into(), &[0, round, 0]), &writes), 0);
        let completed = || {
            let bytes: u64 = writes.iter().map(|write| u64::from(write.length)).sum();
            let done = sender.completion();
            assert_eq!((done.status, done.bytes), (0, bytes));
        };
        let arrived = format!("arrived prefill 00{round:02x}00");
        // The completion or the notification alone proves that all bytes are there.
        if round % 3 == 0 {
            completed();
        } else {
            assert_eq!(receiver.ask("notification"), arrived);
        }
        assert_eq!(receiver.ask(&format!("hash 0 {BYTES}")), hash(&expected).to_string(), "round {round}");
        if round % 3 == 0 {
            assert_eq!(receiver.ask("notification"), arrived);
        } else {
            completed();
        }
    }
}

/// A sender killed in mid transfer is reported lost and leaves nothing behind.
pub fn a_sender_killed_in_mid_transfer_is_reported_lost_and_leaves_nothing_behind(setup: &Setup<'_>) {
    let (receiver, mut sender, _peer) = flooded(setup);
    sender.kill();
    while receiver.notification().kind != NotificationKind::PEER_LOST {}
    receiver.bytes_mut().fill(1);
    // What the killed process has sent was there before.
    let other = setup.worker("other");
    exchange(("other", &other), ("decode", &receiver));
    assert!(is_all(&receiver, 1), "a write of a lost peer landed");
    receiver.backend.deregister(receiver.region).unwrap();
}

/// Nothing lands after a disconnect although the peer keeps writing.
pub fn nothing_lands_after_a_disconnect_although_the_peer_keeps_writing(setup: &Setup<'_>) {
    for _ in 0..5 {
        let (receiver, mut sender, peer) = flooded(setup);
        receiver.backend.disconnect(peer).unwrap();
        receiver.bytes_mut().fill(1);
        sender.floods_on(TRIES, &receiver);
        assert!(is_all(&receiver, 1), "a late write landed");
        assert_eq!(receiver.backend.disconnect(peer).unwrap_err().code, ErrorCode::INVALID_ARGUMENT);
    }
}

/// Nothing lands after a deregistration although the peer keeps writing.
pub fn nothing_lands_after_a_deregistration_although_the_peer_keeps_writing(setup: &Setup<'_>) {
    for _ in 0..5 {
        let (receiver, mut sender, _peer) = flooded(setup);
        receiver.backend.deregister(receiver.region).unwrap();
        receiver.bytes_mut().fill(1);
        sender.floods_on(TRIES, &receiver);
        assert!(is_all(&receiver, 1), "a late write landed");
    }
}

/// A stopped sender is fenced without its help and lands nothing when it goes on.
pub fn a_stopped_sender_is_fenced_without_its_help_and_lands_nothing_when_it_goes_on(setup: &Setup<'_>) {
    let (receiver, mut sender, peer) = flooded(setup);
    let pid = Pid::from_child(&sender.process);
    kill_process(pid, Signal::STOP).unwrap();
    // The stopped sender has bytes in its own buffers and in those of the network.
    receiver.backend.disconnect(peer).unwrap();
    receiver.bytes_mut().fill(1);
    kill_process(pid, Signal::CONT).unwrap();
    sender.floods_on(TRIES, &receiver);
    assert!(is_all(&receiver, 1), "a late write landed");
}

/// A receiver killed in mid transfer ends every submission and its successor is reached.
pub fn a_receiver_killed_in_mid_transfer_ends_every_submission_and_its_successor_is_reached(
    setup: &Setup<'_>,
) {
    let sender = setup.worker("prefill");
    let mut receiver = setup.remote("decode");
    let target: u32 = receiver.ask("region").parse().unwrap();
    let peer = sender.backend.connect("decode", &receiver.endpoint()).unwrap();
    for tag in 1..=200 {
        let everything = [write(&sender, target, 0, BYTES)];
        assert_eq!(sender.backend.submit(&submission(peer, tag, b"n"), &everything), 0);
    }
    receiver.kill();
    let ends: Vec<_> = (0..200).map(|_| sender.completion()).collect();
    let lost = ends.iter().filter(|end| end.status == ErrorCode::PEER_LOST.0).count();
    assert!(lost > 0 && ends.iter().all(|end| [0, ErrorCode::PEER_LOST.0].contains(&end.status)), "{ends:?}");
    for end in &ends {
        // The submissions settle when the plugin detects that the peer is dead, which may take a moment.
        wait("the submissions to settle", || (sender.backend.settled(end.tag) == 1).then_some(()));
    }
    assert_eq!(sender.notification().kind, NotificationKind::PEER_LOST);
    assert_eq!(sender.backend.submit(&submission(peer, 1, b""), &[]), ErrorCode::PEER_LOST.0);

    // The same name again, in another process.
    let mut receiver = setup.remote("decode");
    let target: u32 = receiver.ask("region").parse().unwrap();
    let again = sender.backend.connect("decode", &receiver.endpoint()).unwrap();
    assert_ne!(again, peer);
    sender.bytes_mut().fill(9);
    let everything = [write(&sender, target, 0, BYTES)];
    assert_eq!(sender.backend.submit(&submission(again, 1, b"again"), &everything), 0);
    assert_eq!(receiver.ask("notification"), format!("arrived prefill {}", hex(b"again")));
    assert_eq!(receiver.ask(&format!("byte {}", BYTES - 1)), "9");
}

/// Starts a sender with much in flight to a stopped receiver, and returns its peer id, too. Tries again when nothing was in
/// flight because the driver had not reached the submissions.
fn stuck(setup: &Setup<'_>, config: &str) -> (Worker, Remote, PeerId) {
    until("something in flight", || {
        let sender = setup.worker_with("prefill", config);
        let mut receiver = setup.remote_with("decode", config);
        let target: u32 = receiver.ask("region").parse().unwrap();
        let peer = sender.backend.connect("decode", &receiver.endpoint()).unwrap();
        kill_process(Pid::from_child(&receiver.process), Signal::STOP).unwrap();
        for tag in 1..=64 {
            let everything = [write(&sender, target, 0, BYTES)];
            assert_eq!(sender.backend.submit(&submission(peer, tag, b"n"), &everything), 0);
        }
        let other = setup.worker("other");
        exchange(("prefill", &sender), ("other", &other));
        match sender.backend.disconnect(peer) {
            Ok(()) => {
                (1..=64).for_each(|tag| assert_eq!(sender.backend.settled(Tag(tag)), 1));
                Err("nothing was ever in flight")
            }
            Err(error) => {
                assert_eq!(error.code, ErrorCode::TIMEOUT, "{error}");
                Ok((sender, receiver, peer))
            }
        }
    })
}

/// Writes to a stopped receiver settle only when it says so or is dead.
pub fn writes_to_a_stopped_receiver_settle_only_when_it_says_so_or_is_dead(setup: &Setup<'_>) {
    let config = format!("{}fence_timeout_ms = 300\n", setup.config);
    for revive in [true, false] {
        // Bytes are in the buffers of the receiver's kernel. Whether they land depends on the receiver.
        let (sender, mut receiver, peer) = stuck(setup, &config);
        let ends: Vec<_> = (0..64).map(|_| sender.completion()).collect();
        assert!(ends.iter().all(|end| end.status == ErrorCode::PEER_LOST.0), "{ends:?}");
        assert_eq!(
            sender.backend.settled(Tag(1)),
            0,
            "the receiver has not said that its inbound endpoint is closed"
        );
        if revive {
            kill_process(Pid::from_child(&receiver.process), Signal::CONT).unwrap();
        } else {
            receiver.kill();
        }
        wait("the fence", || sender.backend.disconnect(peer).ok());
        assert!(ends.iter().all(|end| sender.backend.settled(end.tag) == 1));
        if revive {
            receiver.ask("fill 1");
            send_again(&sender, &mut receiver);
            assert_eq!(receiver.ask(&format!("hash 0 {BYTES}")), hash(&vec![1; BYTES]).to_string());
        }
    }
}

/// When the connections to a stopped receiver break, its writes stay unsettled until it says so or is dead. Its process
/// lives, and what its kernel has still lands when it goes on.
pub fn broken_connections_to_a_stopped_receiver_prove_nothing(setup: &Setup<'_>) {
    let config = format!("{}fence_timeout_ms = 300\n", setup.config);
    for revive in [true, false] {
        let (sender, mut receiver, peer) = stuck(setup, &config);
        let ends: Vec<_> = (0..64).map(|_| sender.completion()).collect();
        let process = Pid::from_child(&receiver.process);
        let broken = break_connections(process);
        assert!(!broken.is_empty(), "the two processes are connected");
        wait("the plugin to connect anew, to ask whether the process lives and to send messages", || {
            assert_eq!(sender.backend.settled(Tag(1)), 0, "the receiver's kernel may still have bytes of it");
            let new = connections(process).into_iter().filter(|new| !broken.contains(&new.inode)).count();
            (new >= 2).then_some(())
        });
        let later = setup.worker("later");
        exchange(("prefill", &sender), ("later", &later));
        assert_eq!(sender.backend.settled(Tag(1)), 0, "nothing was proven meanwhile");
        assert_eq!(sender.backend.disconnect(peer).unwrap_err().code, ErrorCode::TIMEOUT);
        if revive {
            kill_process(process, Signal::CONT).unwrap();
        } else {
            receiver.kill();
        }
        wait("the fence", || sender.backend.disconnect(peer).ok());
        assert!(ends.iter().all(|end| sender.backend.settled(end.tag) == 1));
        if revive {
            receiver.ask("fill 1");
            let before = send_again(&sender, &mut receiver);
            assert!(before.iter().all(|heard| heard.starts_with("lost")), "{before:?}");
            assert_eq!(receiver.ask(&format!("hash 0 {BYTES}")), hash(&vec![1; BYTES]).to_string());
        }
    }
}

/// A TCP socket of this process that is connected to another one.
struct Connected {
    inode: u64,
    socket: OwnedFd,
}

/// The TCP sockets of this process whose other end is a port of that process.
fn connections(process: Pid) -> Vec<Connected> {
    let inode =
        |link: PathBuf| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<u64>().ok();
    let inodes = |process: Pid| -> Vec<(i32, u64)> {
        let folder = std::fs::read_dir(format!("/proc/{}/fd", process.as_raw_nonzero())).unwrap();
        let sockets = folder.filter_map(|entry| {
            let path = entry.ok()?.path();
            Some((path.file_name()?.to_str()?.parse().ok()?, inode(std::fs::read_link(&path).ok()?)?))
        });
        sockets.collect()
    };
    let theirs = inodes(process);
    let port = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let inode: u64 = fields[9].parse().ok()?;
        let port = u16::from_str_radix(fields[1].rsplit_once(':')?.1, 16).ok()?;
        theirs.iter().any(|(_, their)| *their == inode).then_some(port)
    };
    let tables = ["tcp", "tcp6"].map(|name| std::fs::read_to_string(format!("/proc/self/net/{name}")));
    let lines = tables.iter().flatten().flat_map(|table| table.lines().skip(1));
    let ports: Vec<u16> = lines.filter_map(port).collect();
    let own = getpid();
    let myself = pidfd_open(own, PidfdFlags::empty()).unwrap();
    let connected = inodes(own).into_iter().filter_map(|(number, inode)| {
        let socket = match pidfd_getfd(&myself, number, PidfdGetfdFlags::empty()) {
            Ok(socket) => socket,
            Err(Errno::BADF) => return None,
            Err(error) => panic!("a descriptor of this process cannot be copied: {error}"),
        };
        let peer = SocketAddr::try_from(getpeername(&socket).ok()??).ok()?;
        ports.contains(&peer.port()).then_some(Connected { inode, socket })
    });
    connected.collect()
}

/// Breaks all TCP connections of this process with another one, as a network does: both ends see a reset. Returns which.
fn break_connections(process: Pid) -> Vec<u64> {
    let broken = connections(process).into_iter().map(|connected| {
        connect_unspec(&connected.socket).unwrap();
        connected.inode
    });
    broken.collect()
}

/// Endpoints that are stale or damaged do no harm.
pub fn endpoints_that_are_stale_or_damaged_do_no_harm(setup: &Setup<'_>) {
    let receiver = setup.worker("decode");
    let sender = setup.worker("prefill");
    let endpoint = receiver.backend.endpoint().unwrap();
    assert_eq!(sender.backend.connect("x", b"").unwrap_err().code, ErrorCode::VERSION);
    assert_eq!(sender.backend.connect("x", &endpoint[..30]).unwrap_err().code, ErrorCode::INVALID_ARGUMENT);
    assert_eq!(receiver.backend.connect("self", &endpoint).unwrap_err().code, ErrorCode::INVALID_ARGUMENT);
    let mut stolen = endpoint.clone();
    stolen[8..24].fill(0);
    let error = sender.backend.connect("decode", &stolen).unwrap_err();
    assert!(error.code == ErrorCode::PEER_LOST && error.message.contains("gone"), "{error}");
    let gone = setup.worker("gone");
    let stale = gone.backend.endpoint().unwrap();
    drop(gone);
    assert_eq!(sender.backend.connect("gone", &stale).unwrap_err().code, ErrorCode::PEER_LOST);
    let peer = sender.backend.connect("decode", &endpoint).unwrap();
    assert_eq!(sender.backend.submit(&submission(peer, 1, b"hi"), &[]), 0);
    assert_eq!(receiver.notification().kind, NotificationKind::ARRIVED);
}
