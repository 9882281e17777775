//! A fake for tests: the tier in memory, with configured faults on some pages and calls.
//!
//! A batch waits until it is due, and `poll` carries it out, so a late get writes late. Faults change values in the host's memory
//! only: the stored values stay intact. A batch with a victim of a `hang` fault never ends, not even when it is cancelled. With a
//! control file it continues when that file is gone.

mod shelf;

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use host_plugin_api::tier::{FOUND, MISSING};
use host_plugin_api::{
    Error, ErrorCode, Key, Level, Memory, Opening, RegionId, Result, Scanned, StorageTier, Tag,
    TierCompletion, TierLimits, TierPage, TierUsage, log,
};
use host_plugin_memory::MemoryTier;
use serde::Deserialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Fault {
    /// Reports a value as found, with one bit changed.
    Flip,
    /// Reports a value as found, but does not write its second half.
    Truncate,
    /// Reports a value as found, with the bytes of another page of the batch, or with zeros.
    Foreign,
    /// Reports an error, after damage.
    Fail,
    /// Never found.
    Forget,
    /// Found by `exists`, missing when it is read.
    Lie,
    /// Not stored, for lack of space.
    Refuse,
    HangExists,
    HangGet,
    HangPut,
    /// The call itself does not return.
    BlockPut,
    BlockGet,
    /// The call itself panics.
    PanicExists,
    PanicGet,
    PanicPut,
    PanicPoll,
}

impl Fault {
    /// Whether the fault strikes the whole call, whatever its pages are.
    fn is_of_calls(self) -> bool {
        use Fault::{BlockGet, BlockPut, PanicExists, PanicGet, PanicPoll, PanicPut};
        matches!(self, BlockPut | BlockGet | PanicExists | PanicGet | PanicPut | PanicPoll)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Stop {
    #[default]
    #[serde(rename = "")]
    Ends,
    Fails,
    Hangs,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Text {
    faults: String,
    every: u64,
    seed: u64,
    delay_ms: u64,
    /// Reads do not end while this file is there.
    hold_file: String,
    /// Calls block only while this file is there.
    block_file: String,
    /// While this file is there, its orders replace the configured ones.
    control_file: String,
    /// The tier begins with the files of this directory as values.
    values_dir: String,
    spare: u64,
    stop: Stop,
    /// If this file is there, an opening removes it and fails.
    late_file: String,
}

/// The faults and delays in force.
struct Orders {
    faults: Vec<Fault>,
    every: u64,
    delay: Duration,
}

impl Orders {
    fn of(text: &Text) -> Result<Self> {
        let wrong = |text: String| Error::new(ErrorCode::CONFIG, text);
        let fault = |word: &str| {
            let named: std::result::Result<Fault, serde::de::value::Error> =
                Fault::deserialize(serde::de::value::StrDeserializer::new(word));
            named.map_err(|e| wrong(e.to_string()))
        };
        let faults: Result<Vec<Fault>> = text.faults.split_whitespace().map(fault).collect();
        Ok(Self { faults: faults?, every: text.every, delay: Duration::from_millis(text.delay_ms) })
    }
}

impl Default for Text {
    fn default() -> Self {
        Self {
            faults: String::new(),
            every: 1,
            seed: 1,
            delay_ms: 0,
            hold_file: String::new(),
            block_file: String::new(),
            control_file: String::new(),
            values_dir: String::new(),
            spare: 0,
            stop: Stop::Ends,
            late_file: String::new(),
        }
    }
}

enum Work {
    Exists(Vec<Key>),
    Get(Vec<TierPage>),
    Put(Vec<TierPage>),
    Delete(Vec<Key>),
}

impl Work {
    /// The keys, in order of the pages.
    fn keys(&self) -> Vec<&Key> {
        match self {
            Self::Exists(keys) | Self::Delete(keys) => keys.iter().collect(),
            Self::Get(pages) | Self::Put(pages) => pages.iter().map(|page| &page.key).collect(),
        }
    }
}

struct Batch {
    due: Instant,
    tag: Tag,
    work: Work,
    faults: Vec<Option<Fault>>,
}

#[derive(Default)]
struct State {
    regions: BTreeMap<u32, Memory>,
    waiting: VecDeque<Batch>,
    hanging: Vec<Batch>,
    completions: VecDeque<TierCompletion>,
    drawn: u64,
}

/// The tier in memory, with configured faults.
pub struct FaultyTier {
    inner: MemoryTier,
    orders: Orders,
    text: Text,
    /// Faults of single keys, named by the files of `values_dir`.
    shelf: BTreeMap<Key, Fault>,
    state: Mutex<State>,
}

/// Opens an instance.
///
/// # Errors
/// `CONFIG` for an unknown fault or a wrong file of values, `TIMEOUT` for a late file, or an error of the tier in memory.
pub fn open(opening: &Opening) -> Result<FaultyTier> {
    let wrong = |text: String| Error::new(ErrorCode::CONFIG, text);
    let text: Text = toml::from_str(&opening.config).map_err(|e| wrong(e.to_string()))?;
    let orders = Orders::of(&text)?;
    if !text.late_file.is_empty() && std::fs::remove_file(&text.late_file).is_ok() {
        return Err(Error::new(ErrorCode::TIMEOUT, "the storage does not answer yet"));
    }
    let inner = host_plugin_memory::open(&Opening { name: opening.name.clone(), config: String::new() })?;
    let shelf =
        if text.values_dir.is_empty() { BTreeMap::new() } else { shelf::fill(&inner, &text.values_dir)? };
    Ok(FaultyTier { inner, orders, text, shelf, state: Mutex::default() })
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    tier: open,
}

/// Does not return.
fn never() -> ! {
    loop {
        std::thread::park();
    }
}

/// A number that two others determine and that looks random (SplitMix64's finalizer).
fn mixed(seed: u64, number: u64) -> u64 {
    let mut value = seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9), (27, 0x94d0_49bb_1331_11eb)] {
        value = (value ^ (value >> shift)).wrapping_mul(factor);
    }
    value ^ (value >> 31)
}

fn applies(work: &Work, fault: Fault) -> bool {
    match work {
        Work::Exists(_) => matches!(fault, Fault::Forget | Fault::Lie | Fault::HangExists),
        Work::Get(_) => {
            !fault.is_of_calls() && !matches!(fault, Fault::Refuse | Fault::HangExists | Fault::HangPut)
        }
        Work::Put(_) => matches!(fault, Fault::Refuse | Fault::HangPut),
        Work::Delete(_) => false,
    }
}

impl FaultyTier {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The orders of the control file, while it is there and can be read.
    fn told(&self) -> Option<Orders> {
        if self.text.control_file.is_empty() {
            return None;
        }
        let text: Text = toml::from_str(&std::fs::read_to_string(&self.text.control_file).ok()?).ok()?;
        Orders::of(&text).ok()
    }

    /// Never returns when the orders say that such calls block.
    fn block_if_told(&self, fault: Fault) {
        let blocks = || self.text.block_file.is_empty() || Path::new(&self.text.block_file).exists();
        let told = self.told();
        if told.as_ref().unwrap_or(&self.orders).faults.contains(&fault) && blocks() {
            never();
        }
    }

    /// Panics when the orders say so for such calls.
    fn panic_if_told(&self, fault: Fault) {
        let told = self.told();
        let panics = told.as_ref().unwrap_or(&self.orders).faults.contains(&fault);
        assert!(!panics, "told to {fault:?}");
    }

    fn queue(&self, tag: Tag, work: Work) -> i32 {
        let told = self.told();
        let orders = told.as_ref().unwrap_or(&self.orders);
        let count = match &work {
            Work::Exists(keys) | Work::Delete(keys) => keys.len(),
            Work::Get(pages) | Work::Put(pages) => pages.len(),
        };
        let limits = self.inner.limits();
        let mut state = self.state();
        if state.waiting.len() + state.hanging.len() >= limits.max_batches as usize {
            return ErrorCode::WOULD_BLOCK.0;
        }
        let able: Vec<Fault> = orders.faults.iter().copied().filter(|fault| applies(&work, *fault)).collect();
        let mut draw = || {
            state.drawn += 1;
            let number = mixed(self.text.seed, state.drawn);
            let hit = state.drawn > self.text.spare && number.is_multiple_of(orders.every.max(1));
            let which = able.get((number >> 32) as usize % able.len().max(1));
            which.copied().filter(|_| hit)
        };
        let mut faults: Vec<Option<Fault>> = (0..count).map(|_| draw()).collect();
        for (fault, key) in faults.iter_mut().zip(work.keys()) {
            *fault = fault.or(self.shelf.get(key).copied().filter(|of| applies(&work, *of)));
        }
        let hangs = |fault: &Option<Fault>| {
            matches!(fault, Some(Fault::HangExists | Fault::HangGet | Fault::HangPut))
        };
        let due = Instant::now() + orders.delay;
        let hung = faults.iter().any(hangs);
        let batch = Batch { due, tag, work, faults };
        if hung {
            state.hanging.push(batch);
        } else {
            state.waiting.push_back(batch);
        }
        0
    }

    /// Carries out the batches that are due.
    fn carry_out(&self, state: &mut State) {
        let now = Instant::now();
        let held = !self.text.hold_file.is_empty() && Path::new(&self.text.hold_file).exists();
        let is_due = |batch: &Batch| batch.due <= now && !(held && matches!(batch.work, Work::Get(_)));
        while state.waiting.front().is_some_and(is_due) {
            let Some(batch) = state.waiting.pop_front() else { return };
            let answer = match &batch.work {
                Work::Exists(keys) => self.inner.exists(batch.tag, keys),
                Work::Get(pages) => self.inner.get(batch.tag, pages),
                Work::Put(pages) => {
                    // Pages of the batch without a fault are stored.
                    let kept: Vec<TierPage> = pages
                        .iter()
                        .zip(&batch.faults)
                        .filter_map(|(page, fault)| fault.is_none().then_some(*page))
                        .collect();
                    if kept.is_empty() { 0 } else { self.inner.put(batch.tag, &kept) }
                }
                Work::Delete(keys) => self.inner.delete(batch.tag, keys),
            };
            let mut ended = [TierCompletion::default(); 256];
            let count = if answer == 0 { self.inner.poll(&mut ended) } else { 0 };
            let mut ended = ended.into_iter().take(usize::try_from(count).unwrap_or(0));
            for (page, fault) in (0..).zip(&batch.faults) {
                let failed =
                    |code: ErrorCode| TierCompletion { tag: batch.tag, page, status: code.0, bytes: 0 };
                let done = match (&batch.work, fault) {
                    (Work::Put(_), Some(_)) => failed(ErrorCode::NO_RESOURCE),
                    _ => ended
                        .next()
                        .map_or(failed(ErrorCode::INTERNAL), |done| TierCompletion { page, ..done }),
                };
                state.completions.push_back(match fault {
                    Some(fault) => damaged(&state.regions, &batch, done, *fault),
                    None => done,
                });
            }
        }
    }
}

/// Damages the value of a victim, and returns its changed completion.
fn damaged(
    regions: &BTreeMap<u32, Memory>,
    batch: &Batch,
    done: TierCompletion,
    fault: Fault,
) -> TierCompletion {
    match (&batch.work, fault) {
        (Work::Exists(_), Fault::Lie) => return TierCompletion { status: FOUND, ..done },
        (_, Fault::Forget | Fault::Lie) => return TierCompletion { status: MISSING, bytes: 0, ..done },
        (Work::Get(_), _) if done.status == FOUND => {}
        _ => return done,
    }
    let Work::Get(pages) = &batch.work else { return done };
    let page = pages[done.page as usize];
    let Some(region) = regions.get(&page.region.0) else { return done };
    let length = page.length as usize;
    // SAFETY: the tier in memory has found the range inside the region. The host leaves the range alone until it gets the
    // completion.
    let value =
        unsafe { std::slice::from_raw_parts_mut((region.address.0 + page.offset) as *mut u8, length) };
    match fault {
        Fault::Flip => value[length / 2] ^= 1,
        Fault::Truncate => value[length / 2..].fill(0),
        Fault::Foreign => {
            let other = pages.iter().find(|other| other.key != page.key && other.region == page.region);
            match other {
                // SAFETY: as above. Another page of the batch is another range.
                Some(other) => value.copy_from_slice(unsafe {
                    std::slice::from_raw_parts((region.address.0 + other.offset) as *const u8, length)
                }),
                None => value.fill(0),
            }
        }
        Fault::Fail => {
            value.fill(0xee);
            log!(Level::WARN, "page {} cannot be read: the disk does not answer", page.key);
            return TierCompletion { status: ErrorCode::IO.0, bytes: 0, ..done };
        }
        _ => {}
    }
    done
}

impl StorageTier for FaultyTier {
    fn limits(&self) -> TierLimits {
        self.inner.limits()
    }
    fn register(&self, memory: &Memory) -> Result<RegionId> {
        let region = self.inner.register(memory)?;
        self.state().regions.insert(region.0, *memory);
        Ok(region)
    }
    fn deregister(&self, region: RegionId) -> Result<()> {
        self.inner.deregister(region)?;
        self.state().regions.remove(&region.0);
        Ok(())
    }
    fn exists(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.panic_if_told(Fault::PanicExists);
        self.queue(tag, Work::Exists(keys.to_vec()))
    }
    fn get(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        self.block_if_told(Fault::BlockGet);
        self.panic_if_told(Fault::PanicGet);
        self.queue(tag, Work::Get(pages.to_vec()))
    }
    fn put(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        self.block_if_told(Fault::BlockPut);
        self.panic_if_told(Fault::PanicPut);
        self.queue(tag, Work::Put(pages.to_vec()))
    }
    fn delete(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.queue(tag, Work::Delete(keys.to_vec()))
    }
    fn poll(&self, completions: &mut [TierCompletion]) -> i32 {
        self.panic_if_told(Fault::PanicPoll);
        let mut state = self.state();
        if !state.hanging.is_empty() && !self.text.control_file.is_empty() && self.told().is_none() {
            let go_on = std::mem::take(&mut state.hanging);
            state.waiting.extend(go_on);
        }
        self.carry_out(&mut state);
        let count = completions.len().min(state.completions.len());
        completions.iter_mut().zip(state.completions.drain(..count)).for_each(|(slot, done)| *slot = done);
        i32::try_from(count).unwrap_or(i32::MAX)
    }
    fn cancel(&self, _tag: Tag) -> i32 {
        0
    }
    fn settled(&self, tag: Tag) -> i32 {
        let state = self.state();
        let of = |batch: &Batch| batch.tag == tag;
        i32::from(!state.waiting.iter().any(of) && !state.hanging.iter().any(of))
    }
    fn scan(&self, cursor: u64, keys: &mut [Key]) -> Result<Scanned> {
        self.inner.scan(cursor, keys)
    }
    fn usage(&self) -> Result<TierUsage> {
        self.inner.usage()
    }
    fn event_fd(&self) -> i32 {
        -1
    }
    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        match self.text.stop {
            Stop::Ends => self.inner.shutdown(deadline_ms),
            Stop::Fails => Err(Error::new(ErrorCode::TIMEOUT, "something is in flight for ever")),
            Stop::Hangs => never(),
        }
    }
}
