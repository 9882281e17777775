//! The NIXL plugin's prepared lists and long submissions, over the real NIXL: what a post of a list writes, and in which order
//! the receiver hears of it.

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
        let config = nixl::config()?;
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
            source_region: self.sender.region.0,
            target_region: self.receiver.region.0,
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

    fn post(&self, list: PreparedId, tag: u64, text: &[u8], places: &[u32]) -> Completion {
        assert_eq!(self.sender.backend.post(&submission(self.peer, tag, text), list, places), 0);
        self.sender.completion()
    }
}

#[test]
fn a_post_writes_the_places_that_it_names_and_is_heard_of_after_all_of_them() {
    let Some(pair) = Pair::open() else { return };
    let writes = pair.pages();
    let list = pair.sender.backend.prepare(pair.peer, &writes).unwrap();
    let mut state = 0x2545_f491_u32;
    println!("seed {state:#x}");
    for round in 1..=12u64 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Some rounds post what others did, which takes a request that has ended.
        let (start, step) = [(0, 1), (state as usize % 7, 3), (5, 1), (1, 2)][round as usize % 4];
        let mut places: Vec<u32> = (start..PAGES).step_by(step).map(|place| place as u32).collect();
        if round % 5 == 0 {
            places.reverse();
        }
        pair.receiver.bytes_mut().fill(0);
        let text = round.to_le_bytes();
        assert_eq!(pair.sender.backend.post(&submission(pair.peer, round, &text), list, &places), 0);
        let expected = pair.expected(places.iter().map(|place| &writes[*place as usize]));
        assert_eq!(pair.arrived(&text), expected, "round {round}");
        let done = pair.sender.completion();
        assert_eq!((done.tag, done.status, done.bytes), (Tag(round), 0, (places.len() * PAGE) as u64));
    }
    // Without a notification after one with: nothing is heard of it.
    assert_eq!(pair.post(list, 90, b"", &[3, 4]).status, 0);
    assert_eq!(pair.post(list, 91, b"end", &[3, 4]).status, 0);
    pair.arrived(b"end");
    pair.sender.backend.release(list).unwrap();
    let refused = pair.sender.backend.post(&submission(pair.peer, 92, b""), list, &[3]);
    assert_eq!(refused, ErrorCode::INVALID_ARGUMENT.0);
}

#[test]
fn pages_that_touch_on_both_sides_arrive_whole_from_a_list() {
    let Some(pair) = Pair::open() else { return };
    let writes: Vec<Write> = (0..PAGES).map(|page| pair.write(page, page + 1)).collect();
    let list = pair.sender.backend.prepare(pair.peer, &writes).unwrap();
    let places: Vec<u32> = (10..600).chain(700..PAGES as u32).collect();
    assert_eq!(pair.sender.backend.post(&submission(pair.peer, 1, b"n"), list, &places), 0);
    assert_eq!(pair.arrived(b"n"), pair.expected(places.iter().map(|place| &writes[*place as usize])));
}

#[test]
fn a_submission_of_many_requests_is_heard_of_once_and_after_all_of_it() {
    let Some(pair) = Pair::open() else { return };
    let writes = pair.pages();
    for round in 1..=10u64 {
        pair.receiver.bytes_mut().fill(0);
        let text = round.to_le_bytes();
        assert_eq!(pair.sender.backend.submit(&submission(pair.peer, round, &text), &writes), 0);
        // A short one right after it does not wait for it, and is another's.
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
fn a_list_goes_with_the_region_that_it_reads_and_with_its_peer() {
    let Some(pair) = Pair::open() else { return };
    let second = SharedMemory::new("second", BYTES).unwrap();
    let region = register(&*pair.sender.backend, &second, 1).unwrap();
    let mut writes = pair.pages();
    let first = pair.sender.backend.prepare(pair.peer, &writes).unwrap();
    writes.iter_mut().step_by(2).for_each(|write| write.source_region = region.0);
    let mixed = pair.sender.backend.prepare(pair.peer, &writes).unwrap();
    let places: Vec<u32> = (0..PAGES as u32).collect();
    for list in [first, mixed] {
        assert_eq!(pair.post(list, 1, b"", &places).status, 0);
    }
    pair.sender.backend.deregister(region).unwrap();
    drop(second);
    assert_eq!(pair.post(mixed, 2, b"", &places).status, ErrorCode::INVALID_ARGUMENT.0);
    assert_eq!(pair.post(first, 3, b"", &places).status, 0);
    pair.sender.backend.disconnect(pair.peer).unwrap();
    let gone = pair.sender.backend.post(&submission(pair.peer, 4, b""), first, &places);
    assert_eq!(gone, ErrorCode::INVALID_ARGUMENT.0);
    assert!(pair.sender.backend.prepare(pair.peer, &writes).is_err());
}

#[test]
fn lists_that_leave_their_regions_are_refused_when_they_are_prepared() {
    let Some(pair) = Pair::open() else { return };
    let good = pair.pages();
    for bad in [
        Write { source_offset: BYTES as u64, ..good[0] },
        Write { target_offset: u64::MAX - 3, ..good[0] },
        Write { target_generation: 2, ..good[0] },
        Write { source_region: 99, ..good[0] },
    ] {
        let mut writes = good.clone();
        writes[77] = bad;
        let error = pair.sender.backend.prepare(pair.peer, &writes).unwrap_err();
        assert_eq!(error.code, ErrorCode::INVALID_ARGUMENT);
        assert!(error.message.contains("write 77"), "{error}");
    }
    let empty = pair.sender.backend.prepare(pair.peer, &[]).unwrap();
    assert_eq!(pair.post(empty, 1, b"n", &[]).status, 0);
    pair.arrived(b"n");
}
