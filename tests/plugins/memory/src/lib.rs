//! A storage tier that keeps values in this process's memory.
//!
//! Batches are carried out inside the call that starts them, which keeps the example short. A real tier queues them,
//! lets a thread or the network finish them, and reports each page from `poll`.
//!
//! To make it yours: put your storage into `State::get`, `State::put` and `State::delete`. As soon as they take longer than a
//! copy, let `batch` only queue the pages, in memory that was allocated when the tier opened, and let a thread push the
//! completions.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{
    Error, ErrorCode, Key, Memory, MemoryKind, Opening, RegionId, Result, Scanned, StorageTier, Tag,
    TierCompletion, TierLimits, TierPage, TierUsage,
};

const MAX_PAGES: usize = 256;
const MAX_BATCHES: usize = 64;
const MAX_VALUE: usize = 64 << 10;
const MAX_REGIONS: usize = 1024;
/// Number of values that fit. All their memory is allocated when the tier opens, because puts must not allocate.
const SLOTS: usize = 512;

/// A storage tier in memory.
pub struct MemoryTier {
    state: Mutex<State>,
}

struct State {
    closed: bool,
    next: u32,
    regions: BTreeMap<u32, Memory>,
    /// Slot and length of each key's value.
    index: HashMap<Key, (usize, usize)>,
    /// Keys by slot, so that a scan has an order that survives puts and deletes.
    keys: Vec<Option<Key>>,
    free: Vec<usize>,
    values: Vec<u8>,
    completions: VecDeque<TierCompletion>,
}

/// Opens an instance. `opening.config` is the user's `[plugin.NAME]` table as TOML. This tier has no keys. To add some, declare
/// each in plugin.toml, which lets the host check them, and read the text with the crate `toml`.
///
/// # Errors
/// Never.
pub fn open(_opening: &Opening) -> Result<MemoryTier> {
    let state = State {
        closed: false,
        next: 1,
        regions: BTreeMap::new(),
        index: HashMap::with_capacity(SLOTS * 2),
        keys: vec![None; SLOTS],
        free: (0..SLOTS).rev().collect(),
        values: vec![0; SLOTS * MAX_VALUE],
        completions: VecDeque::with_capacity(MAX_PAGES * MAX_BATCHES),
    };
    Ok(MemoryTier { state: Mutex::new(state) })
}

// The plugin's entry: writes plugin.toml into the file and exports the factory.
host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    tier: open,
}

impl State {
    /// The address of a page, if the page lies inside its region.
    fn place(&self, page: &TierPage) -> Option<*mut u8> {
        let region = self.regions.get(&page.region.0)?;
        let end = page.offset.checked_add(u64::from(page.length))?;
        let fits = page.length > 0 && page.length as usize <= MAX_VALUE && end <= region.length;
        fits.then(|| region.address.pointer().wrapping_add(page.offset as usize))
    }

    fn get(&self, page: &TierPage) -> (i32, u64) {
        let Some(place) = self.place(page) else { return (ErrorCode::INVALID_ARGUMENT.0, 0) };
        match self.index.get(&page.key) {
            None => (MISSING, 0),
            Some((_, length)) if *length != page.length as usize => (ErrorCode::INVALID_ARGUMENT.0, 0),
            Some((slot, length)) => {
                let value = &self.values[slot * MAX_VALUE..][..*length];
                // SAFETY: the range lies in registered memory, which the host keeps mapped and leaves alone until the
                // page's completion.
                unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), place, *length) };
                (FOUND, *length as u64)
            }
        }
    }

    fn put(&mut self, page: &TierPage) -> (i32, u64) {
        let Some(place) = self.place(page) else { return (ErrorCode::INVALID_ARGUMENT.0, 0) };
        if let Some((_, length)) = self.index.get(&page.key) {
            return (STORED, *length as u64);
        }
        let Some(slot) = self.free.pop() else { return (ErrorCode::NO_RESOURCE.0, 0) };
        let length = page.length as usize;
        let value = &mut self.values[slot * MAX_VALUE..][..length];
        // SAFETY: as in `get`.
        unsafe { std::ptr::copy_nonoverlapping(place, value.as_mut_ptr(), length) };
        self.index.insert(page.key, (slot, length));
        self.keys[slot] = Some(page.key);
        (STORED, length as u64)
    }

    fn delete(&mut self, key: &Key) -> (i32, u64) {
        let Some((slot, length)) = self.index.remove(key) else { return (MISSING, 0) };
        self.keys[slot] = None;
        self.free.push(slot);
        (FOUND, length as u64)
    }
}

impl MemoryTier {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_state(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.state();
        if state.closed {
            Err(Error::new(ErrorCode::CLOSED, "the instance was shut down"))
        } else {
            Ok(state)
        }
    }

    /// Carries out each item of a batch and queues its completion, or refuses the batch.
    fn batch<T>(&self, tag: Tag, items: &[T], mut each: impl FnMut(&mut State, &T) -> (i32, u64)) -> i32 {
        let mut state = self.state();
        if state.closed {
            return ErrorCode::CLOSED.0;
        }
        if items.is_empty() || items.len() > MAX_PAGES {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        if state.completions.len() + items.len() > MAX_PAGES * MAX_BATCHES {
            return ErrorCode::WOULD_BLOCK.0;
        }
        for (page, item) in items.iter().enumerate() {
            let (status, bytes) = each(&mut state, item);
            state.completions.push_back(TierCompletion { tag, page: page as u32, status, bytes });
        }
        0
    }
}

impl StorageTier for MemoryTier {
    fn limits(&self) -> TierLimits {
        TierLimits {
            max_pages: MAX_PAGES as u32,
            max_batches: MAX_BATCHES as u32,
            max_value: MAX_VALUE as u64,
            alignment: 1,
            reserved: [0; 4],
        }
    }
    fn register(&self, memory: &Memory) -> Result<RegionId> {
        if memory.kind != MemoryKind::DRAM {
            return Err(Error::new(ErrorCode::UNSUPPORTED, "only host memory can be registered"));
        }
        if memory.address.0 == 0 || memory.length == 0 || memory.address.checked_add(memory.length).is_none()
        {
            let text = "the memory is empty or leaves the address space";
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        let mut state = self.open_state()?;
        if state.regions.len() >= MAX_REGIONS {
            return Err(Error::new(ErrorCode::NO_RESOURCE, format!("{MAX_REGIONS} regions are registered")));
        }
        let id = state.next;
        state.next += 1;
        state.regions.insert(id, *memory);
        Ok(RegionId(id))
    }
    fn deregister(&self, region: RegionId) -> Result<()> {
        let unknown = || Error::new(ErrorCode::INVALID_ARGUMENT, "no such region");
        self.open_state()?.regions.remove(&region.0).map(drop).ok_or_else(unknown)
    }
    fn exists(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.batch(tag, keys, |state, key| match state.index.get(key) {
            Some((_, length)) => (FOUND, *length as u64),
            None => (MISSING, 0),
        })
    }
    fn get(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        self.batch(tag, pages, |state, page| state.get(page))
    }
    fn put(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        self.batch(tag, pages, State::put)
    }
    fn delete(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.batch(tag, keys, State::delete)
    }
    fn poll(&self, completions: &mut [TierCompletion]) -> i32 {
        let mut state = self.state();
        if state.closed {
            return ErrorCode::CLOSED.0;
        }
        let count = completions.len().min(state.completions.len());
        for (slot, done) in completions.iter_mut().zip(state.completions.drain(..count)) {
            *slot = done;
        }
        count as i32
    }
    fn cancel(&self, _tag: Tag) -> i32 {
        // Everything has ended by the time the batch is accepted.
        if self.state().closed { ErrorCode::CLOSED.0 } else { ErrorCode::INVALID_ARGUMENT.0 }
    }
    fn settled(&self, _tag: Tag) -> i32 {
        if self.state().closed { ErrorCode::CLOSED.0 } else { 1 }
    }
    fn scan(&self, cursor: u64, keys: &mut [Key]) -> Result<Scanned> {
        let state = self.open_state()?;
        // The cursor is the next slot to look at.
        let mut slot = usize::try_from(cursor).unwrap_or(usize::MAX);
        if slot > SLOTS {
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, "no scan gave out this cursor"));
        }
        let mut count = 0;
        while slot < SLOTS && count < keys.len() {
            if let Some(key) = state.keys[slot] {
                keys[count] = key;
                count += 1;
            }
            slot += 1;
        }
        let cursor = if slot < SLOTS { slot as u64 } else { 0 };
        Ok(Scanned { keys: count as u32, reserved: 0, cursor })
    }
    fn usage(&self) -> Result<TierUsage> {
        let state = self.open_state()?;
        let bytes = state.index.values().map(|(_, length)| *length as u64).sum();
        let capacity = (SLOTS * MAX_VALUE) as u64;
        Ok(TierUsage { values: state.index.len() as u64, bytes, capacity, reserved: [0; 5] })
    }
    fn event_fd(&self) -> i32 {
        // There is nothing to wait for: a batch ends in the call that starts it. A tier with threads gives the host an eventfd.
        -1
    }
    fn shutdown(&self, _deadline_ms: u64) -> Result<()> {
        self.state().closed = true;
        Ok(())
    }
}
