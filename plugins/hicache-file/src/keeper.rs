//! The thread that looks after the directory: it loads what is there, learns what others did, makes, seals and evicts
//! segments.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use host_plugin_api::{ErrorCode, Level, log};

use crate::backing::{DirectoryLock, Found, length, try_lock, write_at};
use crate::config::Fsync;
use crate::format::{Name, RECORD, position, seal};
use crate::queue::locked;
use crate::segment::{Records, Segment, read_records};
use crate::store::{Store, code_of, is_full};
use crate::writer::OpenSegment;

/// How often pages that wait are looked at again, at least.
const TICK: Duration = Duration::from_millis(100);
/// How often the use of segments is written down.
const TOUCH: Duration = Duration::from_secs(5);
/// How long puts are refused before a segment is asked for again.
const REFUSAL: Duration = Duration::from_secs(1);
/// How often the directory is listed even if nothing says that it changed.
const LIST: Duration = Duration::from_secs(5);
/// A change of the directory's time that is younger may hide another: file systems count in ticks.
const COARSE: Duration = Duration::from_secs(2);
/// Pages that are added to the index under one lock.
const CHUNK: usize = 1024;

/// What is known of a segment's files.
struct Known {
    segment: Option<Arc<Segment>>,
    /// The record to read next; none when there will be no more.
    next: Option<u32>,
}

/// See the module.
pub struct Keeper<'a> {
    store: &'a Store,
    known: HashMap<Name, Known>,
    listed: Option<((i64, u64), Instant)>,
    refreshed: Instant,
    touched: Instant,
    /// What the gauges say of this instance: pages, bytes, segments.
    shown: [u64; 3],
    /// The last trouble that was logged, so that it is logged once.
    trouble: Option<String>,
    started: Instant,
}

/// Bytes that a pair of files counts for: an index never grows beyond one record per block and two more.
fn footprint(data: u64, index: u64) -> u64 {
    data + index.max(data / 64 + 2 * RECORD as u64)
}

/// Runs until `stop`, then seals what is open.
pub fn run(store: &Store, stop: &AtomicBool) {
    let now = Instant::now();
    let mut keeper = Keeper {
        store,
        known: HashMap::new(),
        listed: None,
        refreshed: now,
        touched: now,
        shown: [0; 3],
        trouble: None,
        started: now,
    };
    keeper.refresh(true);
    keeper.stop_waiting();
    keeper.fit();
    while !stop.load(Ordering::SeqCst) {
        keeper.attend();
        if keeper.refreshed.elapsed() >= store.config.refresh() {
            keeper.refresh(false);
        }
        if keeper.touched.elapsed() >= TOUCH {
            keeper.touch();
        }
        keeper.show();
        store.wait_for_call(TICK.min(store.config.refresh()));
    }
    store.writer.retire();
    keeper.seal();
    keeper.touch();
    keeper.shown_is([0; 3]);
}

impl Keeper<'_> {
    /// What others wait for.
    fn attend(&mut self) {
        self.seal();
        if self.store.writer.is_wanted() {
            let made = self.make();
            self.store.writer.supply(made);
        }
        self.store.queue.unpark();
    }

    /// Logs trouble the first time, and again when it was gone in between.
    fn report(&mut self, trouble: Option<String>) {
        if trouble != self.trouble
            && let Some(text) = &trouble
        {
            log!(Level::WARN, "{text}");
        }
        self.trouble = trouble;
    }

    fn show(&mut self) {
        let index = locked(&self.store.index);
        let now = [index.len() as u64, index.bytes(), index.segments().count() as u64];
        drop(index);
        self.shown_is(now);
    }

    fn shown_is(&mut self, now: [u64; 3]) {
        let metrics = &self.store.metrics;
        for ((gauge, shown), now) in
            [metrics.pages, metrics.bytes, metrics.segments].into_iter().zip(&mut self.shown).zip(now)
        {
            if now >= *shown {
                gauge.add(now - *shown)
            } else {
                gauge.sub(*shown - now)
            }
            *shown = now;
        }
    }

    fn touch(&mut self) {
        self.touched = Instant::now();
        if self.store.directory.read_only {
            return;
        }
        let used: Vec<_> = locked(&self.store.index).segments().filter(|s| s.take_used()).cloned().collect();
        for segment in used {
            // A segment that another process evicted just now cannot be touched, and need not be.
            let _gone = self.store.directory.touch(segment.name);
        }
    }

    /// Looks at what is in the directory.
    fn refresh(&mut self, first: bool) {
        self.refreshed = Instant::now();
        let store = self.store;
        if !store.directory.is_there() {
            let text = format!(
                "{} is gone or was replaced: nothing is stored any more, put it back and restart",
                store.directory.path().display()
            );
            self.report(Some(text));
            store.writer.retire();
            self.listed = None;
        }
        let changes = store.directory.changes().ok();
        let fresh = |(seen, at): &((i64, u64), Instant)| Some(*seen) == changes && at.elapsed() < LIST;
        if !self.listed.as_ref().is_some_and(fresh) {
            match store.directory.list() {
                Ok(found) => {
                    // Before, since what is half made asks for another look.
                    let age = |(seconds, _): &(i64, u64)| {
                        let changed = SystemTime::UNIX_EPOCH + Duration::from_secs((*seconds).max(0) as u64);
                        SystemTime::now().duration_since(changed).unwrap_or_default()
                    };
                    let settled = changes.filter(|changes| age(changes) > COARSE);
                    self.listed = settled.map(|changes| (changes, Instant::now()));
                    self.compare(&found, first);
                }
                Err(e) => self.report(Some(format!("cannot list {}: {e}", store.directory.path().display()))),
            }
        }
        let open = self.known.iter().filter(|(_, known)| known.next.is_some() && known.segment.is_some());
        let open: Vec<Name> = open.map(|(name, _)| *name).collect();
        for name in open {
            if let Err(e) = self.follow(name) {
                log!(Level::DEBUG, "cannot follow {}: {e}", name.index());
            }
        }
    }

    /// Loads what is new, forgets what is gone.
    fn compare(&mut self, found: &[Found], first: bool) {
        let mut names: Vec<Name> = found.iter().filter(|f| f.is_index).map(|f| f.name).collect();
        names.sort_unstable_by(|a, b| b.cmp(a));
        let there: std::collections::HashSet<Name> = names.iter().copied().collect();
        let gone: Vec<Name> = self.known.keys().filter(|name| !there.contains(name)).copied().collect();
        for name in gone {
            if let Some(Known { segment: Some(segment), .. }) = self.known.remove(&name) {
                self.store.forget(&segment);
            }
        }
        for name in names {
            if first && self.started.elapsed() >= self.store.config.load_wait() {
                self.stop_waiting();
            }
            if self.store.queue.is_closed() {
                return;
            }
            self.attend();
            if !self.known.contains_key(&name) && self.store.writer.knows(name).is_none() {
                self.load(name);
            }
        }
        let lonely: Vec<Name> =
            found.iter().filter(|f| !f.is_index && !there.contains(&f.name)).map(|f| f.name).collect();
        if !lonely.is_empty() && !self.store.directory.read_only {
            self.remove_lonely(&lonely);
        }
    }

    fn stop_waiting(&self) {
        let mut index = locked(&self.store.index);
        if std::mem::take(&mut index.loading) {
            drop(index);
            self.store.queue.unpark();
        }
    }

    /// Data whose index is gone, if that is still so when nobody is making or removing segments.
    fn remove_lonely(&self, names: &[Name]) {
        let Ok(_lock) = self.store.directory.lock() else { return };
        for name in names {
            if self.store.directory.size(Found { name: *name, is_index: true }).is_none() {
                self.store.directory.remove(*name);
            }
        }
    }

    /// A segment that was not there before.
    fn load(&mut self, name: Name) {
        let store = self.store;
        let read = store.directory.index(name, false).and_then(|index| self.read(&index, name, 0));
        match read {
            Ok(records) => {
                let segment = locked(&store.index).add(|id| Segment::new(id, name, None));
                self.known.insert(name, Known { segment: Some(segment), next: Some(0) });
                self.take(name, records);
            }
            // Being made or evicted by another process between the listing and now, or left by one that was killed then.
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof) => {
                self.listed = None;
                self.remove_unfinished(name);
            }
            Err(e) => {
                store.metrics.corrupt.add(1);
                let path = store.directory.path().display();
                log!(Level::WARN, "a segment in {path} is not served: {e}");
                self.known.insert(name, Known { segment: None, next: None });
            }
        }
    }

    /// A segment without a header or without data, if nobody is making it now.
    fn remove_unfinished(&self, name: Name) {
        let directory = &self.store.directory;
        if !directory.read_only
            && let Ok(_lock) = directory.lock()
            && let Ok(index) = directory.index(name, false)
            && try_lock(&index)
            && (length(&index).is_ok_and(|length| length < RECORD as u64)
                || directory.size(Found { name, is_index: false }).is_none())
        {
            directory.remove(name);
        }
    }

    fn read(&self, index: &OwnedFd, name: Name, first: u32) -> io::Result<Records> {
        let data = self.store.directory.size(Found { name, is_index: false });
        let (data, _) = data.ok_or(io::ErrorKind::NotFound)?;
        read_records(index, name, first, data)
    }

    /// Adds what was read to the index.
    fn take(&mut self, name: Name, records: Records) {
        let Some(Known { segment: Some(segment), next }) = self.known.get_mut(&name) else { return };
        for chunk in records.values.chunks(CHUNK) {
            let mut index = locked(&self.store.index);
            for (number, value) in chunk {
                index.insert(segment.id, *number, *value);
            }
        }
        if records.damaged > 0 {
            self.store.metrics.corrupt.add(records.damaged as u64);
            let path = self.store.directory.path().display();
            log!(Level::WARN, "{} records of {path}/{} are damaged", records.damaged, name.index());
        }
        *next = Some(records.next);
        if records.sealed {
            *next = None;
            segment.set_sealed();
        }
    }

    /// Looks for more in a segment without a seal, and seals it if its writer is gone.
    fn follow(&mut self, name: Name) -> io::Result<()> {
        let Some(Known { next: Some(next), .. }) = self.known.get(&name) else { return Ok(()) };
        let next = *next;
        let index = self.store.directory.index(name, !self.store.directory.read_only)?;
        if length(&index)? >= position(next) + RECORD as u64 {
            let records = self.read(&index, name, next)?;
            self.take(name, records);
        }
        if !self.store.directory.read_only && self.known.get(&name).is_some_and(|known| known.next.is_some())
        {
            self.adopt(name, &index)?;
        }
        Ok(())
    }

    /// Seals a segment whose writer is gone.
    fn adopt(&mut self, name: Name, index: &OwnedFd) -> io::Result<()> {
        if !try_lock(index) {
            return Ok(());
        }
        // Nobody makes a segment now, so that what is not locked has no writer; and what was written before is read.
        let _lock = self.store.directory.lock()?;
        let records = self.read(index, name, 0)?;
        if records.sealed {
            return Ok(());
        }
        if records.values.is_empty() {
            self.store.directory.remove(name);
            if let Some(Known { segment: Some(segment), .. }) = self.known.remove(&name) {
                self.store.forget(&segment);
            }
            return Ok(());
        }
        let data = self.store.directory.data_to_cut(name)?;
        rustix::fs::ftruncate(&data, records.end)?;
        write_at(index, &seal(name, records.next), position(records.next))?;
        if self.store.config.fsync != Fsync::Never {
            rustix::fs::fdatasync(&data)?;
            rustix::fs::fdatasync(index)?;
        }
        log!(
            Level::INFO,
            "sealed {} for a process that is gone: {} pages",
            name.index(),
            records.values.len()
        );
        self.take(name, Records { sealed: true, damaged: 0, ..records });
        Ok(())
    }

    fn seal(&mut self) {
        let store = self.store;
        store.writer.seal(store.config.fsync, |open: &OpenSegment, sealed| {
            let name = open.segment.name;
            match sealed {
                Ok(true) => open.segment.set_sealed(),
                Ok(false) => {
                    store.directory.remove(name);
                    store.forget(&open.segment);
                    return;
                }
                // It is served as it is, and adopted by whoever comes next.
                Err(e) => log!(Level::WARN, "cannot seal {}: {e}", name.index()),
            }
            self.known.insert(name, Known { segment: Some(open.segment.clone()), next: None });
        });
    }

    /// After opening with a smaller limit than before.
    fn fit(&mut self) {
        if !self.store.directory.read_only
            && let Ok(lock) = self.store.directory.lock()
            && let Err((_, text)) = self.make_room(0, &lock)
        {
            self.report(Some(text));
        }
    }

    /// Makes a segment, and room for it.
    fn make(&mut self) -> Result<Arc<OpenSegment>, (ErrorCode, Instant)> {
        match self.try_make() {
            Ok(open) => {
                self.report(None);
                Ok(open)
            }
            Err((code, text)) => {
                let path = self.store.directory.path().display();
                let text = format!("puts to {path} are refused, and tried again every second: {text}");
                self.report(Some(text));
                Err((code, Instant::now() + REFUSAL))
            }
        }
    }

    fn try_make(&mut self) -> Result<Arc<OpenSegment>, (ErrorCode, String)> {
        let store = self.store;
        if !store.directory.is_there() {
            return Err((ErrorCode::IO, "the directory is gone or was replaced".to_owned()));
        }
        let failed = |e: &io::Error| (code_of(e), e.to_string());
        let lock = store.directory.lock().map_err(|e| failed(&e))?;
        let size = store.config.segment();
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| failed(&e.into()))?;
        let birth = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let name = Name { birth: birth.as_micros() as u64, random: u64::from_ne_bytes(random) };
        self.make_room(footprint(size, 0), &lock)?;
        let made = loop {
            match store.directory.make(name, size, &lock) {
                // The file system says less than it keeps: what is old goes, one by one.
                Err(e) if is_full(&e) && self.evict_oldest(&lock) => {}
                made => break made,
            }
        };
        let (index, data) = made.map_err(|e| failed(&e))?;
        if store.config.fsync == Fsync::Always {
            store.directory.sync().map_err(|e| failed(&e))?;
        }
        let data = Arc::new(data);
        let segment = locked(&store.index).add(|id| Segment::new(id, name, Some(data.clone())));
        Ok(OpenSegment::new(segment, data, index, size))
    }

    /// Sizes of all segments, the one first that was used longest ago, and their sum.
    fn sizes(&self) -> io::Result<(Vec<(Name, u64)>, u64)> {
        let mut all: HashMap<Name, (u64, u64, (i64, u64))> = HashMap::new();
        for found in self.store.directory.list()? {
            let Some((bytes, time)) = self.store.directory.size(found) else { continue };
            let entry = all.entry(found.name).or_default();
            if found.is_index { entry.0 = bytes } else { (entry.1, entry.2) = (bytes, time) }
        }
        let mut sizes: Vec<_> = all.into_iter().collect();
        sizes.sort_unstable_by_key(|(name, (_, _, time))| (*time, *name));
        let sizes: Vec<_> =
            sizes.into_iter().map(|(name, (index, data, _))| (name, footprint(data, index))).collect();
        let sum = sizes.iter().map(|(_, bytes)| bytes).sum();
        Ok((sizes, sum))
    }

    /// Evicts until so many bytes more are within the limits.
    fn make_room(&mut self, bytes: u64, lock: &DirectoryLock) -> Result<(), (ErrorCode, String)> {
        // What was read since the last look counts.
        self.touch();
        let failed = |e: io::Error| (code_of(&e), e.to_string());
        let (sizes, mut sum) = self.sizes().map_err(failed)?;
        let mut sizes = sizes.into_iter();
        let config = &self.store.config;
        loop {
            let free = self.store.directory.free().map_err(failed)?;
            let short = if sum + bytes > config.size_limit() {
                format!("size_limit_mib = {} is reached", config.size_limit_mib)
            } else if free < config.free_floor() + bytes {
                format!("{} MiB are free, free_floor_mib is {}", free >> 20, config.free_floor_mib)
            } else {
                return Ok(());
            };
            let Some((name, size)) = sizes.find(|(name, _)| self.evict(*name, lock)) else {
                return Err((ErrorCode::NO_RESOURCE, format!("{short}, and nothing is left to evict")));
            };
            sum -= size;
            log!(Level::DEBUG, "evicted {}: {short}", name.index());
        }
    }

    fn evict_oldest(&mut self, lock: &DirectoryLock) -> bool {
        self.sizes().is_ok_and(|(sizes, _)| sizes.into_iter().any(|(name, _)| self.evict(name, lock)))
    }

    /// Removes a segment, unless somebody writes it.
    fn evict(&mut self, name: Name, _lock: &DirectoryLock) -> bool {
        let store = self.store;
        if store.writer.knows(name).is_some() {
            return false;
        }
        match store.directory.index(name, false) {
            Ok(index) if !try_lock(&index) => return false,
            _ => {}
        }
        if !store.directory.remove(name) {
            return false;
        }
        let pages = match self.known.remove(&name) {
            Some(Known { segment: Some(segment), .. }) => store.forget(&segment),
            _ => 0,
        };
        store.metrics.segments_evicted.add(1);
        store.metrics.pages_evicted.add(pages as u64);
        true
    }
}
