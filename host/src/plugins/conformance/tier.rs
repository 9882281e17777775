//! Cases for storage tiers.

#![allow(clippy::disallowed_methods, reason = "the kit measures other people's code, in real time")]

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{
    ErrorCode, Key, Memory, MemoryKind, RegionId, StorageTier, Tag, TierCompletion, TierPage, capability,
};

use super::common::DEADLINE_MS;
use super::observe::{wait_for, waits};
use super::random::Random;
use super::{Case, Outcome, Stop, Subject, allocations, ensure};
use crate::executor::memory::SharedMemory;

const fn case(name: &'static str, about: &'static str, run: fn(&Subject) -> Outcome) -> Case {
    Case { name, role: Some("tier"), about, run }
}

pub(super) const CASES: &[Case] = &[
    case("tier-data", "what was put comes back, byte for byte, and deleted values are gone", data),
    case("tier-completions", "each page of a batch ends in exactly one completion", completions),
    case("tier-missing", "a key that is not there is missing, and memory stays as it was", missing),
    case("tier-scan", "a scan lists each key once, and usage counts them", scan),
    case("tier-bounds", "pages outside of regions are refused or fail, and touch nothing", bounds),
    case("tier-flow-control", "a full tier says WOULD_BLOCK and recovers", flow_control),
    case("tier-threads", "several threads start batches at once", threads),
    case("tier-hot-allocations", "exists, get, put, poll and settled allocate nothing", no_allocations),
    case("tier-hot-blocking", "exists, get, put, poll and settled do not wait", no_waiting),
    case("tier-panics", "wrong input is answered with a code, not with a panic", panics),
    case("tier-closed", "after shutdown every call answers CLOSED", closed),
];

const BYTES: usize = 1 << 20;
/// Where gets put what they find, behind what puts take.
const BACK: u64 = BYTES as u64 / 2;

struct World {
    tier: Arc<dyn StorageTier>,
    memory: SharedMemory,
    region: RegionId,
    /// Bytes of one page, as the tier's limits allow.
    page: u32,
    /// Pages in one batch.
    batch: u32,
    run: [u8; 8],
}

impl World {
    fn open(subject: &Subject) -> Result<Self, Stop> {
        let memory = SharedMemory::new("tier", BYTES).map_err(|e| Stop::Skip(format!("no memory: {e}")))?;
        let tier = subject.tier("conformance")?;
        let limits = tier.limits();
        ensure!(
            limits.max_pages > 0 && limits.max_batches > 0 && limits.max_value > 0 && limits.alignment > 0,
            "limits says that nothing fits: {limits:?}"
        );
        let alignment = limits.alignment.min(BACK);
        let page = (16_384 / alignment).max(1) * alignment;
        let page = if page > limits.max_value { limits.max_value / alignment * alignment } else { page };
        let page = u32::try_from(page).unwrap_or(16_384);
        let batch = limits.max_pages.min(16);
        ensure!(page > 0 && u64::from(page * batch) <= BACK, "no page fits the limits: {limits:?}");
        let offered = Memory {
            address: memory.address().as_ptr() as u64,
            length: BYTES as u64,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: memory.fd().as_raw_fd(),
            generation: 1,
            fd_offset: 0,
        };
        let region =
            tier.register(&offered).map_err(|e| format!("register of shared host memory answered {e}"))?;
        // Keys of this run, since a persistent tier remembers the last one.
        let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let run = (clock.as_nanos() as u64 ^ (u64::from(std::process::id()) << 48)).to_le_bytes();
        Ok(Self { tier, memory, region, page, batch, run })
    }

    fn key(&self, number: u32) -> Key {
        let mut key = [0x5C; 32];
        key[..8].copy_from_slice(&self.run);
        key[8..12].copy_from_slice(&number.to_le_bytes());
        Key(key)
    }

    /// Pages of the keys `0..count`, one after the other from `base` on.
    fn pages(&self, count: u32, base: u64) -> Vec<TierPage> {
        (0..count)
            .map(|number| TierPage {
                key: self.key(number),
                region: self.region.0,
                length: self.page,
                offset: base + u64::from(number) * u64::from(self.page),
            })
            .collect()
    }

    fn keys(&self, count: u32) -> Vec<Key> {
        (0..count).map(|number| self.key(number)).collect()
    }

    /// Starts a batch, as often as the tier asks to come again.
    fn start(&self, what: &str, mut call: impl FnMut() -> i32) -> Result<(), Stop> {
        let code = wait_for(|| Some(call()).filter(|code| *code != ErrorCode::WOULD_BLOCK.0));
        match code {
            Some(0) => Ok(()),
            Some(code) => Err(Stop::Fail(format!("{what} answered {:?}", ErrorCode(code)))),
            None => Err(Stop::Fail(format!("{what} answered WOULD_BLOCK for ever"))),
        }
    }

    /// The statuses of a batch of `count` pages.
    fn finish(&self, what: &str, tag: u64, count: u32) -> Result<Vec<i32>, Stop> {
        let mut ended: BTreeMap<u32, i32> = BTreeMap::new();
        while ended.len() < count as usize {
            let mut one = [TierCompletion::default()];
            let answer = wait_for(|| Some(self.tier.poll(&mut one)).filter(|n| *n != 0));
            let Some(answer) = answer else {
                let seen = ended.len();
                return Err(Stop::Fail(format!("of {count} pages of a {what} only {seen} completed")));
            };
            ensure!(answer == 1, "poll with room for one answered {:?}", ErrorCode(answer));
            let TierCompletion { tag: found, page, status, .. } = one[0];
            ensure!(found == tag, "the {what} {tag} alone is in flight, but {found} completed");
            ensure!(page < count, "page {page} of a {what} of {count} pages completed");
            let before = ended.insert(page, status);
            ensure!(before.is_none(), "page {page} of a {what} completed twice");
        }
        Ok(ended.into_values().collect())
    }

    fn all(&self, what: &str, tag: u64, count: u32, status: i32, call: impl FnMut() -> i32) -> Outcome {
        self.start(what, call)?;
        let ended = self.finish(what, tag, count)?;
        let wrong = ended.iter().position(|found| *found != status);
        if let Some(page) = wrong {
            let found = ended[page];
            ensure!(false, "page {page} of a {what} ended with {found}, it should be {status}");
        }
        Ok(())
    }

    fn put_all(&self, tag: u64) -> Outcome {
        let pages = self.pages(self.batch, 0);
        self.all("put", tag, self.batch, STORED, || self.tier.put(Tag(tag), &pages))
    }

    fn delete_all(&self, tag: u64) -> Outcome {
        let keys = self.keys(self.batch);
        self.start("delete", || self.tier.delete(Tag(tag), &keys))?;
        self.finish("delete", tag, self.batch).map(drop)
    }

    fn filled(&self) -> Vec<u8> {
        let mut bytes = vec![0; BACK as usize];
        Random::new().fill(&mut bytes);
        self.memory.write(0, &bytes);
        bytes
    }

    fn back(&self) -> Vec<u8> {
        let mut bytes = vec![0; BACK as usize];
        self.memory.read(BACK as usize, &mut bytes);
        bytes
    }
}

fn data(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let (bytes, count) = (world.filled(), world.batch);
    world.put_all(1)?;
    let keys = world.keys(count);
    world.all("exists", 2, count, FOUND, || world.tier.exists(Tag(2), &keys))?;
    let pages = world.pages(count, BACK);
    world.all("get", 3, count, FOUND, || world.tier.get(Tag(3), &pages))?;
    let length = (count * world.page) as usize;
    let wrong = world.back()[..length].iter().zip(&bytes).position(|(found, put)| found != put);
    ensure!(wrong.is_none(), "byte {} of what was put came back changed", wrong.unwrap_or_default());
    // The same key again is stored already.
    world.put_all(4)?;
    world.all("delete", 5, count, FOUND, || world.tier.delete(Tag(5), &keys))?;
    world.all("exists of deleted keys", 6, count, MISSING, || world.tier.exists(Tag(6), &keys))
}

fn completions(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    world.filled();
    // Several batches in flight, ended in whatever order.
    let keys = world.keys(world.batch);
    let batches = u64::from(world.tier.limits().max_batches.min(8));
    for tag in 1..=batches {
        world.start("exists", || world.tier.exists(Tag(tag), &keys))?;
    }
    let mut seen: BTreeMap<(u64, u32), u32> = BTreeMap::new();
    let expected = batches as usize * world.batch as usize;
    let mut take = || {
        let mut done = [TierCompletion::default(); 32];
        let count = world.tier.poll(&mut done);
        for completion in &done[..usize::try_from(count).unwrap_or(0)] {
            *seen.entry((completion.tag, completion.page)).or_insert(0) += 1;
        }
        (count < 0 || seen.len() >= expected).then_some(())
    };
    wait_for(&mut take);
    for _ in 0..1000 {
        take();
    }
    ensure!(seen.len() == expected, "of {expected} pages in flight {} completed", seen.len());
    for ((tag, page), times) in seen {
        let known = (1..=batches).contains(&tag) && page < world.batch;
        ensure!(known, "page {page} of batch {tag} completed and was never asked for");
        ensure!(times == 1, "page {page} of batch {tag} completed {times} times");
    }
    Ok(())
}

fn missing(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let (count, before) = (world.batch, world.back());
    let (keys, pages) = (world.keys(count), world.pages(count, BACK));
    world.all("exists of unknown keys", 1, count, MISSING, || world.tier.exists(Tag(1), &keys))?;
    world.all("get of unknown keys", 2, count, MISSING, || world.tier.get(Tag(2), &pages))?;
    world.all("delete of unknown keys", 3, count, MISSING, || world.tier.delete(Tag(3), &keys))?;
    ensure!(world.back() == before, "a get that found nothing changed memory");
    Ok(())
}

fn scan(subject: &Subject) -> Outcome {
    if !subject.declares("tier", capability::SCAN) {
        return Err(Stop::Skip("the manifest does not declare scan".to_owned()));
    }
    let world = World::open(subject)?;
    world.filled();
    world.put_all(1)?;
    let mut found = BTreeSet::new();
    let (mut cursor, mut steps) = (0, 0);
    loop {
        let mut keys = [Key::default(); 5];
        let step = world.tier.scan(cursor, &mut keys).map_err(|e| format!("scan answered {e}"))?;
        for key in &keys[..step.keys as usize] {
            ensure!(found.insert(*key), "a scan lists a key twice");
        }
        (cursor, steps) = (step.cursor, steps + 1);
        if cursor == 0 {
            break;
        }
        ensure!(steps < 1_000_000, "a scan does not come to its end");
    }
    let lacking = world.keys(world.batch).into_iter().filter(|key| !found.contains(key)).count();
    ensure!(lacking == 0, "a scan leaves out {lacking} of {} keys", world.batch);
    let usage = world.tier.usage().map_err(|e| format!("usage answered {e}"))?;
    ensure!(
        usage.values >= u64::from(world.batch),
        "usage counts {} values, {} are there",
        usage.values,
        found.len()
    );
    world.delete_all(2)
}

fn bounds(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let before = world.filled();
    let good = world.pages(1, 0)[0];
    let cases = [
        ("beyond its region", TierPage { offset: BYTES as u64 - 1, ..good }),
        ("past the end of all numbers", TierPage { offset: u64::MAX - 8, ..good }),
        ("of no bytes", TierPage { length: 0, ..good }),
        ("of an unknown region", TierPage { region: 999_999, ..good }),
    ];
    for (number, (what, page)) in cases.into_iter().enumerate() {
        for (call, code) in [
            ("put", world.tier.put(Tag(number as u64 * 2 + 1), &[page])),
            ("get", world.tier.get(Tag(number as u64 * 2 + 2), &[page])),
        ] {
            if code == 0 {
                let mut one = [TierCompletion::default()];
                let done = wait_for(|| (world.tier.poll(&mut one) == 1).then_some(()));
                ensure!(done.is_some(), "a {call} of a page {what} was accepted and never completed");
                ensure!(one[0].status <= 0, "a {call} of a page {what} ended as if it had worked");
            }
        }
    }
    let mut after = vec![0; before.len()];
    world.memory.read(0, &mut after);
    ensure!(after == before, "a page outside of its region changed memory");
    Ok(())
}

fn flow_control(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let limits = world.tier.limits();
    let keys = world.keys(1);
    ensure!(world.tier.poll(&mut []) == 0, "poll without room answers something else than 0");
    for tag in 1..=u64::from(limits.max_batches.min(4096)) * u64::from(limits.max_pages.min(4096)) + 1 {
        match world.tier.exists(Tag(tag), &keys) {
            0 if tag > 200_000 => break,
            0 => {}
            code if code == ErrorCode::WOULD_BLOCK.0 => break,
            code => ensure!(false, "exists number {tag} answered {:?}", ErrorCode(code)),
        }
    }
    let mut done = [TierCompletion::default(); 64];
    let recovered = wait_for(|| {
        let _drained = world.tier.poll(&mut done);
        (world.tier.exists(Tag(u64::MAX), &keys) == 0).then_some(())
    });
    ensure!(
        recovered.is_some(),
        "a tier that was full still answers WOULD_BLOCK after everything was polled"
    );
    if limits.max_pages < 1 << 20 {
        let keys = vec![world.key(0); limits.max_pages as usize + 1];
        let code = world.tier.exists(Tag(u64::MAX - 1), &keys);
        ensure!(code < 0, "a batch of more keys than limits allows was accepted");
    }
    Ok(())
}

fn threads(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    world.filled();
    world.put_all(1)?;
    let keys = world.keys(world.batch);
    let failed = std::thread::scope(|scope| {
        let start = |thread: u64| {
            let (world, keys) = (&world, &keys);
            move || {
                (0..4).try_for_each(|n| {
                    let tag = Tag(100 + thread * 4 + n);
                    world.start("exists", || world.tier.exists(tag, keys))
                })
            }
        };
        let workers: Vec<_> = (0..4).map(|thread| scope.spawn(start(thread))).collect();
        // Polled meanwhile, so that a small tier does not stay full.
        let mut done = [TierCompletion::default(); 16];
        let mut found = 0;
        let all = wait_for(|| {
            let count = world.tier.poll(&mut done);
            let done = &done[..usize::try_from(count).unwrap_or(0)];
            found += done.iter().filter(|d| d.status == FOUND).count();
            (count < 0 || found >= 16 * keys.len()).then_some(())
        });
        let ends: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        if all.is_none() {
            return Some(Stop::Fail(format!(
                "4 threads asked for {} keys, {found} were found",
                16 * keys.len()
            )));
        }
        ends.into_iter().filter_map(|end| end.ok().and_then(Result::err)).next()
    });
    failed.map_or(Ok(()), Err)?;
    world.delete_all(2)
}

const CALLS: [&str; 5] = ["put", "get", "exists", "poll", "settled"];
const WARM_UP: u64 = 16;
const ROUNDS: u64 = 100;

fn rounds(world: &World, measure: impl Fn() -> u64) -> Result<[u64; 5], Stop> {
    let (pages, back, keys) = (world.pages(1, 0), world.pages(1, BACK), world.keys(1));
    let mut done = [TierCompletion::default(); 16];
    let mut sums = [0; 5];
    for round in 1..=WARM_UP + ROUNDS {
        let tag = |n| Tag(round * 4 + n);
        let mut at = [measure(); 6];
        let put = world.tier.put(tag(0), &pages);
        at[1] = measure();
        let get = world.tier.get(tag(1), &back);
        at[2] = measure();
        let exists = world.tier.exists(tag(2), &keys);
        at[3] = measure();
        // The second often finds nothing, which must not make it wait.
        let poll = world.tier.poll(&mut done).min(world.tier.poll(&mut done));
        at[4] = measure();
        let settled = world.tier.settled(tag(0));
        at[5] = measure();
        for (call, code) in CALLS.iter().zip([put, get, exists, poll, settled]) {
            let fine = code >= 0 || code == ErrorCode::WOULD_BLOCK.0 || code == ErrorCode::UNSUPPORTED.0;
            ensure!(fine, "{call} answered {:?} in round {round}", ErrorCode(code));
        }
        if round > WARM_UP {
            for (sum, pair) in sums.iter_mut().zip(at.windows(2)) {
                *sum += pair[1] - pair[0];
            }
        }
        std::thread::yield_now();
    }
    Ok(sums)
}

fn no_allocations(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let cannot = |text| Stop::Skip(format!("allocations cannot be counted: {text}"));
    allocations::watch(&subject.entry.path).map_err(cannot)?;
    for (call, sum) in CALLS.iter().zip(rounds(&world, allocations::count)?) {
        ensure!(sum == 0, "{ROUNDS} calls of {call} allocated {sum} times");
    }
    Ok(())
}

fn no_waiting(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    for (call, sum) in CALLS.iter().zip(rounds(&world, waits)?) {
        ensure!(sum < ROUNDS / 4, "in {ROUNDS} rounds {call} gave up the processor {sum} times to wait");
    }
    Ok(())
}

fn panics(subject: &Subject) -> Outcome {
    let tier = subject.tier("panics")?;
    let page = TierPage { key: Key([0xFF; 32]), region: u32::MAX, length: u32::MAX, offset: u64::MAX };
    let memory = Memory {
        address: u64::MAX,
        length: u64::MAX,
        kind: MemoryKind(77),
        device: u32::MAX,
        fd: -1,
        generation: 0,
        fd_offset: u64::MAX,
    };
    let code = |result: host_plugin_api::Result<()>| result.err().map_or(0, |e| e.code.0);
    let answers: [(&str, i32); 12] = [
        ("put of a page in no region", tier.put(Tag(u64::MAX), &[page])),
        ("get of a page in no region", tier.get(Tag(u64::MAX), &[page])),
        ("put of nothing", tier.put(Tag(0), &[])),
        ("exists of nothing", tier.exists(Tag(0), &[])),
        ("delete of nothing", tier.delete(Tag(0), &[])),
        ("cancel of an unknown tag", tier.cancel(Tag(3))),
        ("settled of an unknown tag", tier.settled(Tag(3))),
        ("register of memory of an unknown kind", code(tier.register(&memory).map(drop))),
        ("deregister of an unknown region", code(tier.deregister(RegionId(u32::MAX)))),
        ("scan from an unknown cursor", code(tier.scan(u64::MAX, &mut []).map(drop))),
        ("shutdown", code(tier.shutdown(DEADLINE_MS))),
        ("a second shutdown", code(tier.shutdown(DEADLINE_MS))),
    ];
    for (what, answer) in answers {
        ensure!(answer != ErrorCode::PANICKED.0, "{what} made the plugin panic");
    }
    Ok(())
}

fn closed(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let keys = world.keys(1);
    world.start("exists", || world.tier.exists(Tag(1), &keys))?;
    world.tier.shutdown(DEADLINE_MS).map_err(|e| format!("shutdown with a batch in flight answered {e}"))?;
    let mut one = [TierCompletion::default()];
    let answers = [
        ("exists", world.tier.exists(Tag(2), &keys)),
        ("poll", world.tier.poll(&mut one)),
        ("usage", world.tier.usage().err().map_or(0, |e| e.code.0)),
    ];
    for (call, answer) in answers {
        let closed = answer == ErrorCode::CLOSED.0;
        ensure!(closed, "{call} after shutdown answers {answer} instead of CLOSED");
    }
    Ok(())
}
