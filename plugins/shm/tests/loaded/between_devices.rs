//! Memory of devices keeps the same contract as host memory, in every combination of the two.
//!
//! The devices are those of the stand-in for NVIDIA's driver. In processes with `STAND_IN_COPY_US` each copy takes this
//! many microseconds, so that a copy is under way whenever the test looks.

use std::sync::OnceLock;

use host_plugin_api::RegionId;
use host_plugin_api::*;
use host_test_peer::*;
use host_tests::plugin_files;
use libloading::os::unix::{Library, RTLD_NOW};
use rustix::process::{Pid, Signal, kill_process};

use crate::{CONNECTS, PATIENT};

const BYTES: usize = 4 << 20;
/// Where sender and receiver have their memory.
pub const PLACES: [(Place, Place); 3] =
    [(Place::Device, Place::Device), (Place::Host, Place::Device), (Place::Device, Place::Host)];
const SLOW: &[(&str, &str)] = &[("STAND_IN_COPY_US", "3000")];

/// Gives this process a device.
pub fn load_stand_in() {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let file = host_tests::cuda::library();
        // SAFETY: it has no initialisers.
        unsafe { Library::open(Some(file), RTLD_NOW) }.unwrap()
    });
}

fn everything(sender: &Worker, target: u32) -> Write {
    Write {
        source_region: sender.region,
        target_region: RegionId(target),
        length: sender.bytes().len() as u32,
        target_generation: 1,
        ..Write::default()
    }
}

/// This process receives, and a child sends with slow copies.
struct Pair {
    receiver: Worker,
    sender: Remote,
    peer: PeerId,
}

fn pair((from, to): (Place, Place), config: &str) -> Pair {
    println!("{from:?} to {to:?}");
    load_stand_in();
    let directory = plugin_files::directory(&["shm"]);
    let receiver = Worker::open_on(to, directory.path(), "shm", "decode", BYTES, config);
    let mut sender = Remote::start_on(from, directory.path(), "shm", "prefill", BYTES, (PATIENT, SLOW));
    let peer = receiver.backend.connect("prefill", &sender.endpoint()).unwrap();
    sender.ask(&format!("connect {}", hex(&receiver.backend.endpoint().unwrap())));
    Pair { receiver, sender, peer }
}

/// As [`pair`], and the child writes all of the receiver's memory over and over.
fn flooded(places: (Place, Place), config: &str) -> Pair {
    let mut pair = pair(places, config);
    pair.sender.ask("fill 7");
    pair.sender.ask(&format!("flood {}", pair.receiver.region.0));
    assert_eq!(pair.receiver.notification().kind, NotificationKind::ARRIVED);
    pair
}

fn is_all(worker: &Worker, value: u8) -> bool {
    worker.bytes().iter().all(|byte| *byte == value)
}

#[test]
fn a_notification_and_a_completion_come_when_the_device_has_copied() {
    for places in PLACES {
        let mut pair = pair(places, PATIENT);
        let region = pair.receiver.region.0;
        for value in 1..=5 {
            pair.sender.ask(&format!("fill {value}"));
            assert_eq!(pair.sender.ask(&format!("send {region} {value}")), "0");
            if value % 2 == 0 {
                assert_eq!(pair.sender.ask("completion"), "0");
                assert!(is_all(&pair.receiver, value), "completed before the data came");
            }
            assert_eq!(pair.receiver.notification().payload[0], value);
            assert!(is_all(&pair.receiver, value), "notified before the data came");
            if value % 2 == 1 {
                assert_eq!(pair.sender.ask("completion"), "0");
            }
        }
    }
}

#[test]
fn nothing_lands_after_a_fence_although_the_peers_device_keeps_writing() {
    for places in PLACES {
        for deregister in [false, true] {
            let mut pair = flooded(places, PATIENT);
            match deregister {
                true => pair.receiver.backend.deregister(pair.receiver.region).unwrap(),
                false => pair.receiver.backend.disconnect(pair.peer).unwrap(),
            }
            pair.receiver.bytes_mut().fill(1);
            // All copies end that were under way.
            pair.sender.floods_on(1000, &pair.receiver);
            assert!(is_all(&pair.receiver, 1), "a late write landed");
        }
    }
}

#[test]
fn a_sender_killed_while_its_device_copies_is_lost_and_leaves_nothing_behind() {
    for places in PLACES {
        let mut pair = flooded(places, PATIENT);
        pair.sender.kill();
        while pair.receiver.notification().kind != NotificationKind::PEER_LOST {}
        // The copies of the stand-in have ended with the process.
        pair.receiver.bytes_mut().fill(1);
        assert!(is_all(&pair.receiver, 1), "a write of a lost peer landed");
        pair.receiver.backend.deregister(pair.receiver.region).unwrap();
    }
}

#[test]
fn a_sender_stopped_while_its_device_copies_is_not_fenced_before_it_is_dead() {
    // Stopped at random, it has a copy under way most of the time. When it has none, the fence holds at once.
    let config = format!("{CONNECTS}fence_timeout_ms = 300");
    for _ in 0..20 {
        let mut pair = flooded((Place::Device, Place::Device), &config);
        kill_process(Pid::from_child(&pair.sender.process), Signal::STOP).unwrap();
        if let Err(error) = pair.receiver.backend.disconnect(pair.peer) {
            assert_eq!(error.code, ErrorCode::TIMEOUT, "{error}");
            pair.sender.kill();
            wait("the fence", || pair.receiver.backend.disconnect(pair.peer).ok());
            return;
        }
    }
    panic!("nothing was ever under way");
}

#[test]
fn the_memory_of_a_receiver_that_is_gone_is_closed_and_its_successor_is_reached() {
    load_stand_in();
    let directory = plugin_files::directory(&["shm"]);
    let start =
        |name: &str| Remote::start_on(Place::Device, directory.path(), "shm", name, BYTES, (PATIENT, SLOW));
    let mut sender = start("prefill");
    for (number, value) in [("one", 3), ("two", 4)] {
        let mut receiver = start(number);
        let region = receiver.ask("region");
        sender.ask(&format!("connect {}", hex(&receiver.endpoint())));
        assert_eq!(sender.ask("opened"), "1");
        sender.ask(&format!("fill {value}"));
        assert_eq!(sender.ask(&format!("send {region} 1{value}")), "0");
        assert_eq!(sender.ask("completion"), "0");
        assert_eq!(receiver.ask(&format!("byte {}", BYTES - 1)), value.to_string());
        assert_eq!(sender.ask(&format!("send {region} 2{value}")), "0");
        receiver.kill();
        // The copy was under way, or not.
        let status: i32 = sender.ask("completion").parse().unwrap();
        assert!([0, ErrorCode::PEER_LOST.0].contains(&status), "{status}");
        wait("the memory to be closed", || (sender.ask("opened") == "0").then_some(()));
        assert_eq!(sender.ask("notification"), format!("lost {number}"));
    }
}

#[test]
fn a_region_that_was_taken_back_is_closed_by_peers_and_written_no_more() {
    let mut pair = pair((Place::Device, Place::Device), PATIENT);
    let region = pair.receiver.region;
    assert_eq!(pair.sender.ask("opened"), "1");
    pair.receiver.backend.deregister(region).unwrap();
    assert_eq!(pair.sender.ask("opened"), "0", "closed before the host frees it");
    assert_eq!(pair.sender.ask(&format!("send {} 1", region.0)), "0");
    assert_eq!(pair.sender.ask("completion"), ErrorCode::INVALID_ARGUMENT.0.to_string());
    // Registered again, and reached over another connection.
    pair.receiver.register().unwrap();
    pair.sender.ask(&format!("connect {}", hex(&pair.receiver.backend.endpoint().unwrap())));
    pair.sender.ask("fill 5");
    assert_eq!(pair.sender.ask(&format!("send {} 2", pair.receiver.region.0)), "0");
    assert_eq!(pair.sender.ask("completion"), "0");
    assert!(is_all(&pair.receiver, 5));
}

/// Two workers in this process.
fn together(from: Place, to: Place) -> (Worker, Worker, PeerId) {
    load_stand_in();
    let directory = plugin_files::directory(&["shm"]);
    let sender = Worker::open_on(from, directory.path(), "shm", "prefill", BYTES, PATIENT);
    let receiver = Worker::open_on(to, directory.path(), "shm", "decode", BYTES, PATIENT);
    let peer = sender.backend.connect("decode", &receiver.backend.endpoint().unwrap()).unwrap();
    (sender, receiver, peer)
}

#[test]
fn writes_of_a_submission_land_in_their_order_on_devices_too() {
    for (from, to) in PLACES {
        let (sender, receiver, peer) = together(from, to);
        sender.bytes_mut().chunks_mut(4096).enumerate().for_each(|(i, page)| page.fill(i as u8));
        let write = |i: u64| Write {
            source_offset: i * 4096,
            length: 4096,
            ..everything(&sender, receiver.region.0)
        };
        for (tag, last) in [(1, 5), (2, 3)] {
            assert_eq!(sender.backend.submit(&submission(peer, tag, b"x"), &[7, 0, last].map(write)), 0);
            assert_eq!(receiver.notification().kind, NotificationKind::ARRIVED);
            assert_eq!(receiver.bytes()[0], last as u8);
            assert_eq!(sender.completion().bytes, 3 * 4096);
        }
    }
}

#[test]
fn a_submission_may_write_between_all_places() {
    let (sender, receiver, peer) = together(Place::Device, Place::Device);
    let from_host = register(&*sender.backend, &sender.memory, 1).unwrap();
    let to_host = register(&*receiver.backend, &receiver.memory, 1).unwrap();
    // The second region of the peer is known to a new connection.
    let again = sender.backend.connect("again", &receiver.backend.endpoint().unwrap()).unwrap();
    assert_ne!(peer, again);
    // SAFETY: both are mapped, and nothing else uses them now.
    let hosts = [&sender, &receiver]
        .map(|worker| unsafe { std::slice::from_raw_parts_mut(worker.memory.address().as_ptr(), 4096) });
    sender.bytes_mut().fill(1);
    hosts[0].fill(2);
    let write = |from: RegionId, to: RegionId, target_offset: u64| Write {
        source_region: from,
        target_region: to,
        target_offset,
        length: 1000,
        ..everything(&sender, 0)
    };
    // From host to host last, first, and in between.
    let (device, on_device) = (sender.region, receiver.region);
    let writes = [
        write(from_host, to_host, 0),
        write(device, to_host, 500),
        write(from_host, on_device, 0),
        write(from_host, to_host, 1000),
        write(device, on_device, 500),
        write(device, to_host, 1500),
        write(from_host, to_host, 2000),
    ];
    for tag in 1..=10 {
        receiver.bytes_mut().fill(0);
        hosts[1].fill(0);
        assert_eq!(sender.backend.submit(&submission(again, tag, b"x"), &writes), 0);
        assert_eq!(receiver.notification().kind, NotificationKind::ARRIVED);
        assert_eq!(sender.completion().bytes, 7000);
        let runs = |bytes: &[u8]| {
            let runs = bytes.chunk_by(|a, b| a == b);
            runs.map(|run| (run[0], run.len())).collect::<Vec<_>>()
        };
        assert_eq!(runs(&receiver.bytes()[..2000]), [(2, 500), (1, 1000), (0, 500)]);
        assert_eq!(runs(&hosts[1][..4000]), [(2, 500), (1, 500), (2, 500), (1, 500), (2, 1000), (0, 1000)]);
    }
    assert!(sender.backend.settled(Tag(10)) == 1);
}

#[test]
fn ranges_outside_their_region_are_refused_on_devices_too() {
    let (sender, receiver, peer) = together(Place::Device, Place::Device);
    let good = Write { length: 4096, ..everything(&sender, receiver.region.0) };
    let end = BYTES as u64;
    for write in [
        Write { source_offset: end - 4095, ..good },
        Write { target_offset: end - 4095, ..good },
        Write { source_offset: u64::MAX, ..good },
        Write { target_offset: u64::MAX - 1, ..good },
    ] {
        let code = sender.backend.submit(&submission(peer, 1, b""), &[good, write]);
        assert_eq!(code, ErrorCode::INVALID_ARGUMENT.0, "{write:?}");
    }
    let memory = sender.device.as_ref().unwrap().offer(1);
    let refused = |memory: &Memory| sender.backend.register(memory).unwrap_err().to_string();
    let long = refused(&Memory { length: memory.length + 1, ..memory });
    assert!(long.contains("leave their allocation"), "{long}");
    let other = refused(&Memory { address: Address(8), ..memory });
    assert!(other.contains("cannot find the allocation of 0x8"), "{other}");
    let third = refused(&Memory { device: 2, ..memory });
    assert!(third.contains("cannot find GPU 2"), "{third}");
    assert!(refused(&Memory { length: 0, ..memory }).contains("cannot register 0 bytes"));
}

#[test]
fn a_peers_device_is_found_by_its_name_and_missed_with_a_reason() {
    let directory = plugin_files::directory(&["shm"]);
    let start = |name: &str, devices: &str| {
        let variables = [("CUDA_VISIBLE_DEVICES", devices)];
        Remote::start_on(Place::Device, directory.path(), "shm", name, BYTES, (PATIENT, &variables))
    };
    let mut receiver = start("decode", "3");
    let endpoint = hex(&receiver.endpoint());
    // Its memory is on the device that the other has under another number.
    let mut sender = start("prefill", "1,3");
    let refused = sender.ask(&format!("try {endpoint}"));
    assert!(refused.contains("cannot have GPU 0 reach GPU 1: they have no peer access"), "{refused}");
    assert!(refused.contains("--staging always"), "{refused}");
    let mut without = start("prefill", "1");
    let refused = without.ask(&format!("try {endpoint}"));
    assert!(
        refused.contains("cannot write to the GPU memory of parent: this process does not have GPU-"),
        "{refused}"
    );
    let mut with = start("prefill", "3,1");
    assert_eq!(with.ask(&format!("try {endpoint}")), "ok");
}

#[test]
fn without_a_driver_memory_of_a_device_is_refused_with_what_works_instead() {
    let directory = plugin_files::directory(&["shm"]);
    let mut worker = Remote::start(directory.path(), "shm", "prefill", BYTES, PATIENT);
    let refused = worker.ask("offer-device");
    assert!(refused.contains("shm cannot register memory of a GPU: "), "{refused}");
    assert!(refused.contains("--staging always"), "{refused}");
}
