//! What the kit guarantees for every store: fences, completions, cancelling, panics, ending.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{
    Address, ErrorCode, Key, Memory, MemoryKind, RegionId, Result, StorageTier, Tag, TierCompletion, TierPage,
};
use host_tier_kit::{Limits, Store, Tier, other_length};

/// Calls for the key [`HELD`] report themselves, and go on when the test says so. Calls for [`DEFECT`] panic.
struct Map {
    values: Mutex<BTreeMap<Key, Vec<u8>>>,
    begun: Mutex<Sender<()>>,
    goes_on: Mutex<Receiver<()>>,
}

const HELD: Key = Key([0xee; 32]);
const DEFECT: Key = Key([0xdd; 32]);

impl Store for Map {
    fn get(&self, key: &Key, to: &mut [u8]) -> Result<bool> {
        let values = self.values.lock().unwrap();
        let Some(value) = values.get(key) else { return Ok(false) };
        if value.len() != to.len() {
            return Err(other_length(value.len() as u64, to.len()));
        }
        to.copy_from_slice(value);
        Ok(true)
    }
    fn put(&self, key: &Key, from: &[u8]) -> Result<()> {
        assert_ne!(*key, DEFECT, "a defect of the store");
        if *key == HELD {
            self.begun.lock().unwrap().send(()).unwrap();
            self.goes_on.lock().unwrap().recv().unwrap();
        }
        self.values.lock().unwrap().insert(*key, from.to_vec());
        Ok(())
    }
    fn exists(&self, key: &Key) -> Result<Option<u64>> {
        Ok(self.values.lock().unwrap().get(key).map(|value| value.len() as u64))
    }
    fn delete(&self, key: &Key) -> Result<Option<u64>> {
        Ok(self.values.lock().unwrap().remove(key).map(|value| value.len() as u64))
    }
    fn scan(&self, after: Option<&Key>, keys: &mut [Key]) -> Result<usize> {
        let values = self.values.lock().unwrap();
        let start = after.map_or(Bound::Unbounded, |key| Bound::Excluded(*key));
        let found = values.range((start, Bound::Unbounded)).map(|(key, _)| *key);
        Ok(keys.iter_mut().zip(found).map(|(to, key)| *to = key).count())
    }
}

/// A tier with 64 bytes of registered memory.
struct Fixture {
    /// Before the tier: when a test fails, dropping this first ends the call that the tier's end waits for.
    goes_on: Sender<()>,
    tier: Arc<Tier<Map>>,
    bytes: Box<[u8; 64]>,
    region: RegionId,
    begun: Receiver<()>,
}

fn fixture(threads: u32) -> Fixture {
    let (begun_here, begun) = channel();
    let (goes_on, goes_on_there) = channel();
    let map =
        Map { values: Mutex::default(), begun: Mutex::new(begun_here), goes_on: Mutex::new(goes_on_there) };
    let limits =
        Limits { threads, writers: threads, max_batches: 2, max_pages: 4, max_value: 32, alignment: 1 };
    let tier = Arc::new(Tier::start(map, limits).unwrap());
    let mut bytes = Box::new([5; 64]);
    let memory = Memory {
        address: Address::of(bytes.as_mut_ptr()),
        length: 64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 0,
        fd_offset: 0,
    };
    let region = tier.register(&memory).unwrap();
    Fixture { tier, bytes, region, begun, goes_on }
}

/// Calls `look` until it has an answer. Until then, `look` returns what it sees instead.
fn until<T>(what: &str, mut look: impl FnMut() -> std::result::Result<T, String>) -> T {
    let deadline = Instant::now() + Duration::from_secs(300);
    loop {
        match look() {
            Ok(answer) => return answer,
            Err(seen) => assert!(Instant::now() < deadline, "waited in vain for {what}: {seen}"),
        }
        std::thread::yield_now();
    }
}

impl Fixture {
    fn page(&self, key: Key, offset: u64, length: u32) -> TierPage {
        TierPage { key, region: self.region, length, offset }
    }

    /// The next completions, in the order of their pages.
    fn ended(&self, count: usize) -> Vec<TierCompletion> {
        let mut all = Vec::new();
        until("completions", || {
            let mut done = [TierCompletion::default()];
            match self.tier.poll(&mut done) {
                0 => {}
                1 => all.push(done[0]),
                code => panic!("poll answered {code}"),
            }
            if all.len() == count { Ok(()) } else { Err(format!("{} of {count}", all.len())) }
        });
        all.sort_by_key(|done| (done.tag, done.page));
        all
    }

    fn statuses(&self, count: usize) -> Vec<i32> {
        self.ended(count).iter().map(|done| done.status).collect()
    }
}

fn key(number: u8) -> Key {
    Key([number; 32])
}

#[test]
fn what_was_put_comes_back_and_what_was_deleted_does_not() {
    let mut fixture = fixture(2);
    fixture.bytes[..4].copy_from_slice(b"page");
    assert_eq!(fixture.tier.put(Tag(1), &[fixture.page(key(1), 0, 4)]), 0);
    assert_eq!(fixture.statuses(1), [STORED]);
    assert_eq!(fixture.tier.get(Tag(2), &[fixture.page(key(1), 8, 4), fixture.page(key(2), 16, 4)]), 0);
    assert_eq!(fixture.statuses(2), [FOUND, MISSING]);
    assert_eq!(&fixture.bytes[8..12], b"page");
    assert_eq!(fixture.tier.exists(Tag(3), &[key(1)]), 0);
    assert_eq!(fixture.ended(1)[0].bytes, 4);
    assert_eq!(fixture.tier.delete(Tag(4), &[key(1)]), 0);
    assert_eq!(fixture.statuses(1), [FOUND]);
    assert_eq!(fixture.tier.exists(Tag(5), &[key(1)]), 0);
    assert_eq!(fixture.statuses(1), [MISSING]);
}

#[test]
fn a_page_outside_its_region_never_reaches_the_store() {
    let fixture = fixture(1);
    let strange = TierPage { region: RegionId(fixture.region.0 + 1), ..fixture.page(key(2), 0, 4) };
    let wrong = [
        fixture.page(key(1), 61, 4),
        strange,
        fixture.page(key(3), 0, 33),
        fixture.page(key(4), u64::MAX, 1),
    ];
    assert_eq!(fixture.tier.put(Tag(1), &wrong), 0);
    assert_eq!(fixture.statuses(4), [ErrorCode::INVALID_ARGUMENT.0; 4]);
    assert!(fixture.tier.store().values.lock().unwrap().is_empty());
}

#[test]
fn deregistering_waits_for_the_call_that_uses_the_region() {
    let fixture = fixture(2);
    assert_eq!(fixture.tier.put(Tag(1), &[fixture.page(HELD, 0, 4)]), 0);
    fixture.begun.recv().unwrap();
    let (tier, region) = (fixture.tier.clone(), fixture.region);
    let deregistering = std::thread::spawn(move || tier.deregister(region));
    // Puts still find the region until it is known to be going.
    until("the region to be going", || {
        assert_eq!(fixture.tier.put(Tag(2), &[fixture.page(key(1), 0, 4)]), 0);
        if fixture.statuses(1) == [STORED] { Err("a put finds it".to_owned()) } else { Ok(()) }
    });
    assert!(!deregistering.is_finished(), "the fence did not wait for the call of the store");
    fixture.goes_on.send(()).unwrap();
    deregistering.join().unwrap().unwrap();
    assert_eq!(fixture.statuses(1), [STORED]);
    let again = fixture.tier.deregister(region).unwrap_err();
    assert_eq!(again.code, ErrorCode::INVALID_ARGUMENT);
}

#[test]
fn cancelling_ends_pages_that_wait_and_lets_the_one_that_runs_end() {
    let fixture = fixture(1);
    let pages = [fixture.page(HELD, 0, 4), fixture.page(key(1), 0, 4), fixture.page(key(2), 0, 4)];
    assert_eq!(fixture.tier.put(Tag(7), &pages), 0);
    fixture.begun.recv().unwrap();
    assert_eq!(fixture.tier.cancel(Tag(7)), 0);
    assert_eq!(fixture.statuses(2), [ErrorCode::CANCELLED.0; 2]);
    assert_eq!(fixture.tier.settled(Tag(7)), 0);
    fixture.goes_on.send(()).unwrap();
    assert_eq!(fixture.statuses(1), [STORED]);
    assert_eq!(fixture.tier.settled(Tag(7)), 1);
    assert_eq!(fixture.tier.cancel(Tag(7)), ErrorCode::INVALID_ARGUMENT.0);
    assert_eq!(fixture.tier.store().values.lock().unwrap().len(), 1);
}

#[test]
fn a_full_queue_would_block_until_a_batch_was_polled() {
    let fixture = fixture(1);
    for tag in [1, 2] {
        assert_eq!(fixture.tier.exists(Tag(tag), &[key(1)]), 0);
    }
    assert_eq!(fixture.tier.exists(Tag(3), &[key(1)]), ErrorCode::WOULD_BLOCK.0);
    assert_eq!(fixture.statuses(1), [MISSING]);
    assert_eq!(fixture.tier.exists(Tag(3), &[key(1)]), 0);
    assert_eq!(fixture.tier.exists(Tag(4), &[key(1); 5]), ErrorCode::INVALID_ARGUMENT.0);
}

#[test]
fn after_a_panic_of_the_store_every_call_answers_so_and_memory_is_taken_back() {
    let fixture = fixture(2);
    assert_eq!(fixture.tier.put(Tag(1), &[fixture.page(DEFECT, 0, 4)]), 0);
    until("the panic to be known", || match fixture.tier.poll(&mut [TierCompletion::default()]) {
        code if code == ErrorCode::PANICKED.0 => Ok(()),
        code => Err(format!("poll answers {code}")),
    });
    assert_eq!(fixture.tier.exists(Tag(2), &[key(1)]), ErrorCode::PANICKED.0);
    assert_eq!(fixture.tier.usage().unwrap_err().code, ErrorCode::PANICKED);
    fixture.tier.deregister(fixture.region).unwrap();
    fixture.tier.shutdown(60_000).unwrap();
}

#[test]
fn shutting_down_says_that_a_call_still_runs_and_ends_when_it_does() {
    let fixture = fixture(1);
    assert_eq!(fixture.tier.put(Tag(1), &[fixture.page(HELD, 0, 4)]), 0);
    fixture.begun.recv().unwrap();
    assert_eq!(fixture.tier.shutdown(1).unwrap_err().code, ErrorCode::TIMEOUT);
    assert_eq!(fixture.tier.exists(Tag(2), &[key(1)]), ErrorCode::CLOSED.0);
    fixture.goes_on.send(()).unwrap();
    fixture.tier.shutdown(60_000).unwrap();
}

#[test]
fn a_scan_in_steps_sees_every_key_once() {
    let fixture = fixture(1);
    fixture.tier.store().values.lock().unwrap().extend((0..5).map(|number| (key(number), Vec::new())));
    let (mut seen, mut cursor) = (Vec::new(), 0);
    loop {
        let mut keys = [Key::default(); 2];
        let step = fixture.tier.scan(cursor, &mut keys).unwrap();
        seen.extend_from_slice(&keys[..step.keys as usize]);
        cursor = step.cursor;
        if cursor == 0 {
            break;
        }
    }
    assert_eq!(seen, (0..5).map(key).collect::<Vec<_>>());
    let unknown = fixture.tier.scan(99, &mut [Key::default()]).unwrap_err();
    assert_eq!(unknown.code, ErrorCode::INVALID_ARGUMENT);
}
