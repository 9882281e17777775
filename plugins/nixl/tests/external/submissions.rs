//! The NIXL plugin's long submissions, over the real NIXL: what they write, and in which order the receiver hears of it.

use host_memory::SharedMemory;
use host_plugin_api::*;
use host_test_peer::*;
use host_tests::{nixl, plugin_files};

const PAGE: usize = 1024;
/// More than one request holds.
const PAGES: usize = 1000;
const BYTES: usize = 2 * PAGE * PAGES;

/// Two instances in one process, the second of which is written to.
struct Pair {
    sender: Worker,
    receiver: Worker,
    peer: PeerId,
}

impl Pair {
    fn open() -> Option<Self> {
        let config = format!("{}connect_timeout_ms = 60000\nfence_timeout_ms = 60000\n", nixl::config()?);
        let directory = plugin_files::directory(&["nixl"]);
        let sender = Worker::open(directory.path(), "nixl", "prefill", BYTES, &config);
        let receiver = Worker::open(directory.path(), "nixl", "decode", BYTES, &config);
        let peer = sender.backend.connect("decode", &receiver.backend.endpoint().unwrap()).unwrap();
        sender.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / PAGE) as u8 ^ at as u8);
        Some(Self { sender, receiver, peer })
    }

    /// Page by page, each from its place to the mirrored one, so that none of them touch on both sides.
    fn pages(&self) -> Vec<Write> {
        (0..PAGES).map(|page| self.write(2 * page, 2 * (PAGES - 1 - page))).collect()
    }

    fn write(&self, from: usize, to: usize) -> Write {
        Write {
            source_region: self.sender.region,
            target_region: self.receiver.region,
            source_offset: (from * PAGE) as u64,
            target_offset: (to * PAGE) as u64,
            length: PAGE as u32,
            target_generation: 1,
        }
    }

    /// What the receiver's memory must be when these writes have landed in it, and nothing else.
    fn expected<'a>(&self, writes: impl IntoIterator<Item = &'a Write>) -> u64 {
        let mut bytes = vec![0; BYTES];
        for write in writes {
            let (from, to, length) =
                (write.source_offset as usize, write.target_offset as usize, write.length as usize);
            bytes[to..to + length].copy_from_slice(&self.sender.bytes()[from..from + length]);
        }
        hash(&bytes)
    }

    /// Waits for the receiver's notification and says what was in its memory then.
    fn arrived(&self, text: &[u8]) -> u64 {
        let seen = self.receiver.notification();
        let landed = hash(self.receiver.bytes());
        assert_eq!((seen.kind, &seen.payload[..seen.length as usize]), (NotificationKind::ARRIVED, text));
        landed
    }
}

#[test]
fn a_submission_of_many_requests_is_heard_of_once_and_after_all_of_it() {
    let Some(pair) = Pair::open() else { return };
    let writes = pair.pages();
    for round in 1..=10u64 {
        pair.receiver.bytes_mut().fill(0);
        let text = round.to_le_bytes();
        assert_eq!(pair.sender.backend.submit(&submission(pair.peer, round, &text), &writes), 0);
        // A short submission right after it does not wait for it, and has a notification of its own.
        assert_eq!(pair.sender.backend.submit(&submission(pair.peer, 100 + round, b"short"), &[]), 0);
        let (mut landed, mut short) = (None, 0);
        while landed.is_none() || short == 0 {
            let seen = pair.receiver.notification();
            match &seen.payload[..seen.length as usize] {
                b"short" => short += 1,
                long if long == text => landed = Some(hash(pair.receiver.bytes())),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((landed, short), (Some(pair.expected(&writes)), 1), "round {round}");
        let ends = [pair.sender.completion(), pair.sender.completion()];
        let long = ends.iter().find(|end| end.tag == Tag(round)).unwrap();
        assert_eq!((long.status, long.bytes), (0, (PAGES * PAGE) as u64));
    }
}

#[test]
fn pages_that_touch_on_both_sides_arrive_whole() {
    let Some(pair) = Pair::open() else { return };
    let writes: Vec<Write> = (10..600).chain(700..PAGES).map(|page| pair.write(page, page + 1)).collect();
    assert_eq!(pair.sender.backend.submit(&submission(pair.peer, 1, b"n"), &writes), 0);
    assert_eq!(pair.arrived(b"n"), pair.expected(&writes));
}

#[test]
fn pages_of_two_regions_arrive_in_one_submission_and_a_region_that_went_is_named_no_more() {
    let Some(pair) = Pair::open() else { return };
    let second = SharedMemory::new("second", BYTES).unwrap();
    let region = register(&*pair.sender.backend, &second, 1).unwrap();
    let mut writes = pair.pages();
    writes.iter_mut().step_by(2).for_each(|write| write.source_region = region);
    assert_eq!(pair.sender.backend.submit(&submission(pair.peer, 1, b""), &writes), 0);
    assert_eq!(pair.sender.completion().status, 0);
    pair.sender.backend.deregister(region).unwrap();
    drop(second);
    let refused = pair.sender.backend.submit(&submission(pair.peer, 2, b""), &writes);
    assert_eq!(refused, ErrorCode::INVALID_ARGUMENT.0);
    assert_eq!(pair.sender.backend.submit(&submission(pair.peer, 3, b""), &pair.pages()), 0);
    assert_eq!(pair.sender.completion().status, 0);
}
