//! A fake for tests: the tier in memory with an event descriptor, and with one defect that the conformance kit must find.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use host_plugin_api::tier::{FOUND, MISSING};
use host_plugin_api::{
    Error, ErrorCode, Key, Memory, MemoryKind, Opening, RegionId, Result, Scanned, StorageTier, Tag,
    TierCompletion, TierLimits, TierPage, TierUsage,
};
use host_plugin_memory::MemoryTier;
use rustix::event::{EventfdFlags, eventfd};

/// Delay of a get that a later poll carries out.
const LATE: Duration = Duration::from_millis(20);

/// The tier in memory with one defect.
pub struct BrokenTier {
    inner: MemoryTier,
    defect: String,
    event: OwnedFd,
    /// The thread that opened it.
    opener: ThreadId,
    regions: Mutex<HashMap<u32, Memory>>,
    /// Batches accepted since the last poll.
    unpolled: AtomicU64,
    full: AtomicBool,
    /// The key that was put last.
    put: Mutex<Option<Key>>,
    /// Tag of the batch that was cancelled last. One defect hides its completions.
    cancelled: AtomicU64,
    /// Gets that a later poll carries out, each with its time.
    late: Mutex<Vec<(Instant, Tag, Vec<TierPage>)>>,
    /// Number of calls of `limits`, for answers that alternate.
    asked: AtomicU64,
    /// Lengths of values by key.
    lengths: Mutex<HashMap<Key, u32>>,
}

/// Opens an instance.
///
/// # Errors
/// When the system has no descriptor left.
pub fn open(opening: &Opening) -> Result<BrokenTier> {
    let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
    let event = eventfd(0, flags).map_err(|error| Error::new(ErrorCode::IO, error.to_string()))?;
    Ok(BrokenTier {
        inner: host_plugin_memory::open(opening)?,
        defect: host_plugin_mark::defect(),
        event,
        opener: std::thread::current().id(),
        regions: Mutex::default(),
        unpolled: AtomicU64::new(0),
        full: AtomicBool::new(false),
        put: Mutex::default(),
        cancelled: AtomicU64::new(u64::MAX),
        late: Mutex::default(),
        asked: AtomicU64::new(0),
        lengths: Mutex::default(),
    })
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    tier: open,
}

impl BrokenTier {
    fn is(&self, defect: &str) -> bool {
        self.defect == defect
    }

    /// Notes the result of a call that starts a batch, and signals the event descriptor.
    fn started(&self, code: i32) -> i32 {
        if code == ErrorCode::WOULD_BLOCK.0 {
            self.full.store(true, Ordering::Relaxed);
        } else if code == 0 {
            self.unpolled.fetch_add(1, Ordering::Relaxed);
            if !self.is("event-fd-silent") {
                // A full counter is readable as well, so a failure is ignored.
                let _full = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
            }
        }
        code
    }

    /// Whether gets are carried out late, by polls.
    fn defers(&self) -> bool {
        ["settled-always", "deregister-nothing"].contains(&self.defect.as_str())
    }

    /// Carries out the late gets that are due.
    fn catch_up(&self) {
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        late.retain(|(due, tag, pages)| *due > now || self.started(self.inner.get(*tag, pages)) != 0);
    }

    /// The place of a page in the host's memory, and the bytes from there to the end of its region.
    fn place(&self, page: &TierPage) -> Option<(*mut u8, u64)> {
        let regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let region = regions.get(&page.region.0)?;
        let room = region.length.checked_sub(page.offset)?;
        Some(((region.address.0 + page.offset) as *mut u8, room))
    }

    /// Writes behind the pages of a get, or into missing ones, as the defect says.
    fn spoil(&self, pages: &[TierPage]) {
        let lengths = self.lengths.lock().unwrap_or_else(PoisonError::into_inner);
        for page in pages {
            let Some((start, room)) = self.place(page) else { continue };
            let is_there = lengths.contains_key(&page.key);
            let length = u64::from(page.length);
            if self.is("writes-past-page") && is_there && room >= length + 64 {
                // SAFETY: the bytes are in a registered region, if the test that uses this keeps to it.
                unsafe { start.add(page.length as usize).write_bytes(0, 64) };
            }
            if self.is("fills-missing") && !is_there && room >= length {
                // SAFETY: as above.
                unsafe { start.write_bytes(0, page.length as usize) };
            }
        }
    }

    /// The pages as the inner tier is asked for them: at most as long as the stored values.
    fn shortened(&self, pages: &[TierPage]) -> Vec<TierPage> {
        let lengths = self.lengths.lock().unwrap_or_else(PoisonError::into_inner);
        let short = |page: &TierPage| {
            let stored = lengths.get(&page.key).copied().unwrap_or(page.length);
            TierPage { length: page.length.min(stored), ..*page }
        };
        pages.iter().map(short).collect()
    }

    fn stays_full(&self) -> bool {
        self.is("never-recovers") && self.full.load(Ordering::Relaxed)
    }

    /// Changes a byte of the page in the host's memory.
    fn flip(&self, page: &TierPage) {
        let regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(region) = regions.get(&page.region.0) else { return };
        // SAFETY: the byte is in a registered region, if the test that uses this keeps to it.
        unsafe { *((region.address.0 + page.offset) as *mut u8) ^= 1 };
    }
}

impl StorageTier for BrokenTier {
    fn limits(&self) -> TierLimits {
        let limits = self.inner.limits();
        match self.defect.as_str() {
            "limits-pages" => TierLimits { max_pages: limits.max_pages * 2, ..limits },
            "limits-value" => TierLimits { max_value: limits.max_value * 2, ..limits },
            "limits-change" => {
                let asked = self.asked.fetch_add(1, Ordering::Relaxed);
                TierLimits { max_batches: limits.max_batches - u32::from(asked % 2 == 1), ..limits }
            }
            _ => limits,
        }
    }
    fn register(&self, memory: &Memory) -> Result<RegionId> {
        if self.is("registers-anything") && memory.kind != MemoryKind::DRAM {
            return Ok(RegionId(u32::MAX));
        }
        let region = self.inner.register(memory)?;
        self.regions.lock().unwrap_or_else(PoisonError::into_inner).insert(region.0, *memory);
        Ok(region)
    }
    fn deregister(&self, region: RegionId) -> Result<()> {
        match self.defect.as_str() {
            "deregister-nothing" => Ok(()),
            "deregisters-anything" => {
                drop(self.inner.deregister(region));
                Ok(())
            }
            _ => self.inner.deregister(region),
        }
    }
    fn exists(&self, tag: Tag, keys: &[Key]) -> i32 {
        if self.stays_full() {
            return ErrorCode::WOULD_BLOCK.0;
        }
        if self.is("answers-when-closed") && self.inner.usage().is_err() {
            return 0;
        }
        if self.is("loses-batches-of-threads") && std::thread::current().id() != self.opener {
            return 0;
        }
        self.started(self.inner.exists(tag, keys))
    }
    fn get(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        if self.is("allocates-on-get") {
            drop(std::hint::black_box(pages.to_vec()));
        }
        if self.defers() && !pages.is_empty() {
            let due = Instant::now() + LATE;
            self.late.lock().unwrap_or_else(PoisonError::into_inner).push((due, tag, pages.to_vec()));
            return 0;
        }
        let code = if self.is("found-short") {
            self.inner.get(tag, &self.shortened(pages))
        } else {
            self.inner.get(tag, pages)
        };
        self.spoil(pages);
        let put = *self.put.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(page) = pages.last().filter(|page| self.is("corrupts-value") && put == Some(page.key))
            && code == 0
            && pages.len() > 1
        {
            self.flip(page);
        }
        self.started(code)
    }
    fn put(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        assert!(
            !(self.is("panics") && pages.is_empty()),
            "index out of bounds: there is always a first page"
        );
        *self.put.lock().unwrap_or_else(PoisonError::into_inner) = pages.last().map(|page| page.key);
        if ["found-short", "writes-past-page", "fills-missing"].contains(&self.defect.as_str()) {
            let mut lengths = self.lengths.lock().unwrap_or_else(PoisonError::into_inner);
            lengths.extend(pages.iter().map(|page| (page.key, page.length)));
        }
        self.started(self.inner.put(tag, pages))
    }
    fn delete(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.started(self.inner.delete(tag, keys))
    }
    fn poll(&self, completions: &mut [TierCompletion]) -> i32 {
        self.catch_up();
        let waiting = self.unpolled.swap(0, Ordering::Relaxed);
        let count = match usize::try_from(self.inner.poll(completions)) {
            Ok(count) => count,
            Err(_code) => return self.inner.poll(completions),
        };
        if count == 0 && self.is("blocks-in-poll") {
            std::thread::sleep(Duration::from_millis(1));
        }
        if count < completions.len() && !self.is("event-fd-stuck") {
            let mut counter = [0; 8];
            let _empty = rustix::io::read(&self.event, &mut counter);
        }
        for done in &mut completions[..count] {
            if self.is("finds-what-is-not-there") && done.status == MISSING {
                done.status = FOUND;
            }
            if self.is("counts-wrong") && done.bytes > 0 {
                done.bytes -= 1;
            }
            if self.is("accepts-out-of-bounds") && done.status == ErrorCode::INVALID_ARGUMENT.0 {
                done.status = FOUND;
            }
        }
        // When several batches were in flight, the third page of the first batch is the victim. Tags from 100 on are excluded:
        // the case about threads uses them, and has to find its own defect.
        let victim = (waiting >= 6 && count > 3 && completions[2].tag.0 < 100).then_some(2);
        let cancelled = self.cancelled.load(Ordering::Relaxed);
        match victim {
            Some(victim) if self.is("loses-completion") => {
                completions.copy_within(victim + 1..count, victim);
                count as i32 - 1
            }
            Some(victim) if self.is("repeats-completion") => {
                completions[victim] = completions[victim - 1];
                count as i32
            }
            _ if self.is("forgets-cancelled")
                && completions[..count].iter().any(|done| done.tag.0 == cancelled) =>
            {
                0
            }
            _ => count as i32,
        }
    }
    fn cancel(&self, tag: Tag) -> i32 {
        self.cancelled.store(tag.0, Ordering::Relaxed);
        let code = self.inner.cancel(tag);
        if self.is("cancels-anything") && code == ErrorCode::INVALID_ARGUMENT.0 { 0 } else { code }
    }
    fn settled(&self, tag: Tag) -> i32 {
        if self.is("settled-never") {
            return 0;
        }
        let answer = self.inner.settled(tag);
        if self.is("settled-when-closed") { answer.max(1) } else { answer }
    }
    fn scan(&self, cursor: u64, keys: &mut [Key]) -> Result<Scanned> {
        let mut scanned = self.inner.scan(cursor, keys)?;
        if self.is("scan-repeats") && scanned.keys > 1 {
            keys[1] = keys[0];
        }
        if self.is("scan-never-ends") {
            scanned = Scanned { keys: 0, cursor: 1, ..scanned };
        }
        Ok(scanned)
    }
    fn usage(&self) -> Result<TierUsage> {
        let usage = self.inner.usage()?;
        Ok(if self.is("usage-nothing") { TierUsage { bytes: 0, ..usage } } else { usage })
    }
    fn event_fd(&self) -> i32 {
        self.event.as_raw_fd()
    }
    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.inner.shutdown(deadline_ms)
    }
}
