//! The keeper, the thread that looks after the directory. It loads segments, follows the changes of other processes,
//! and makes and evicts segments. It has its own segments sealed, and seals those of processes that are gone.

mod sealing;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use host_plugin_api::{Level, log};

use crate::backing::{SegmentFile, length, try_lock, write_at};
use crate::config::Fsync;
use crate::format::{BLOCK, Name, RECORD, position, seal};
use crate::sealer::{self, Sealer};
use crate::segment::{Records, Segment, read_records};
use crate::store::Store;

/// The longest time between two looks at pages that wait.
const TICK: Duration = Duration::from_millis(100);
/// How often the use of segments is written to the directory.
const TOUCH: Duration = Duration::from_secs(5);
/// How often the directory is listed even if nothing says that it changed.
const LIST: Duration = Duration::from_secs(5);
/// A change of the directory's time that is younger may hide a second change: file systems count time in ticks.
const COARSE: Duration = Duration::from_secs(2);
/// How many index files the system is asked to read ahead.
const AHEAD: usize = 4;
/// How long puts wait for a segment before the first of them are refused.
///
/// They wait when nothing can be evicted now but space comes soon: from segments of this process that are not sealed
/// yet, and from evicted segments whose space is not free yet.
const PATIENCE: Duration = Duration::from_millis(300);
/// Pages that are added to the index under one lock.
const CHUNK: usize = 1024;

/// What is known of a segment's files.
pub(crate) enum Known {
    /// The files are no segment of this version.
    Unreadable,
    /// A writer may append to it. With the number of the record to read next.
    Open(Arc<Segment>, u32),
    Sealed(Arc<Segment>),
}

impl Known {
    pub fn segment(&self) -> Option<&Arc<Segment>> {
        match self {
            Self::Unreadable => None,
            Self::Open(segment, _) | Self::Sealed(segment) => Some(segment),
        }
    }
}

/// The state of the keeper thread.
pub struct Keeper<'a> {
    pub(crate) store: &'a Store,
    pub(crate) sealer: Sealer,
    pub(crate) known: HashMap<Name, Known>,
    listed: Option<((i64, u64), Instant)>,
    refreshed: Instant,
    touched: Instant,
    /// Until when the keeper waits for the space of evicted segments, instead of evicting more.
    pub(crate) awaited: Option<Instant>,
    /// [`PATIENCE`], unless a test has another.
    pub(crate) patience: Duration,
    /// The part of this instance in the gauges: pages, bytes, segments.
    shown: [u64; 3],
    /// The last trouble that was reported. It is logged once.
    trouble: Option<String>,
    started: Instant,
}

/// Runs until `stop`, then seals the open segments.
pub fn run(store: &Store, sealer: Sealer, stop: &AtomicBool) {
    let mut keeper = Keeper::new(store, sealer);
    keeper.refresh(true);
    keeper.stop_waiting();
    store.index.lock().complete = true;
    store.queue.unpark();
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
    keeper.seal_all();
    keeper.touch();
    keeper.shown_is([0; 3]);
}

impl<'a> Keeper<'a> {
    pub(crate) fn new(store: &'a Store, sealer: Sealer) -> Self {
        let now = Instant::now();
        Self {
            store,
            sealer,
            known: HashMap::new(),
            listed: None,
            refreshed: now,
            touched: now,
            awaited: None,
            patience: PATIENCE,
            shown: [0; 3],
            trouble: None,
            started: now,
        }
    }
}

impl Keeper<'_> {
    /// Does the work that other threads wait for.
    fn attend(&mut self) {
        self.seal();
        let writer = &self.store.writer;
        if writer.is_wanted() {
            if self.sealer.under_way < sealer::MOST {
                let made = self.make();
                writer.supply(made);
            } else if !writer.has_any() && self.store.index.lock().complete {
                // Leaves waiting pages parked: they would only ask for a segment again, and no page waits for anything
                // else. The keeper comes back here when a segment is sealed.
                return;
            }
        }
        self.store.queue.unpark();
    }

    /// Logs a trouble the first time, and again when it comes back after it was gone.
    pub(crate) fn report(&mut self, trouble: Option<String>) {
        if trouble != self.trouble
            && let Some(text) = &trouble
        {
            log!(Level::WARN, "{text}");
        }
        self.trouble = trouble;
    }

    /// Whether the trouble that was reported last still exists.
    pub(crate) fn is_refusing(&self) -> bool {
        self.trouble.is_some()
    }

    fn show(&mut self) {
        let index = self.store.index.lock();
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

    pub(crate) fn touch(&mut self) {
        self.touched = Instant::now();
        if self.store.directory.read_only {
            return;
        }
        let used: Vec<_> = self.store.index.lock().segments().filter(|s| s.take_used()).cloned().collect();
        for segment in used {
            // A segment that another process evicted just now cannot be touched, and need not be.
            let _gone = self.store.directory.touch(segment.name);
        }
    }

    /// Whether the path no longer leads to the directory. If so, reports it, always with the same text.
    pub(crate) fn is_astray(&mut self) -> bool {
        let why = self.store.directory.astray();
        if let Some(why) = &why {
            let path = self.store.directory.path().display();
            self.report(Some(format!("nothing is stored in {path} until it is back: {why}")));
        }
        why.is_some()
    }

    /// Looks at what is in the directory.
    fn refresh(&mut self, first: bool) {
        self.refreshed = Instant::now();
        let store = self.store;
        let astray = self.is_astray();
        if astray {
            store.writer.retire();
            self.listed = None;
        }
        let changes = store.directory.changes().ok();
        let fresh = |(seen, at): &((i64, u64), Instant)| Some(*seen) == changes && at.elapsed() < LIST;
        if !self.listed.as_ref().is_some_and(fresh) {
            match store.directory.list() {
                Ok(found) => {
                    // Set before `compare`, which clears it when a half-made segment needs another look.
                    let age = |(seconds, _): &(i64, u64)| {
                        let changed = SystemTime::UNIX_EPOCH + Duration::from_secs((*seconds).max(0) as u64);
                        SystemTime::now().duration_since(changed).unwrap_or_default()
                    };
                    let settled = changes.filter(|changes| age(changes) > COARSE);
                    self.listed = settled.map(|changes| (changes, Instant::now()));
                    self.compare(&found, first);
                }
                // `is_astray` has reported its reason. A second reason would alternate with the first in the log.
                Err(_) if astray => {}
                Err(e) => self.report(Some(format!("cannot list {}: {e}", store.directory.path().display()))),
            }
        }
        let open = self.known.iter().filter(|(_, known)| matches!(known, Known::Open(..)));
        let open: Vec<Name> = open.map(|(name, _)| *name).collect();
        if first {
            // All segments are loaded. Calls that wait for that need not wait for the device as well.
            self.stop_waiting();
        }
        for name in open {
            self.attend();
            if let Err(e) = self.follow(name) {
                log!(Level::DEBUG, "cannot follow {}: {e}", name.index());
            }
        }
    }

    /// Loads new segments and forgets those that are gone.
    fn compare(&mut self, found: &[SegmentFile], first: bool) {
        let mut names: Vec<Name> = found.iter().filter(|f| f.is_index).map(|f| f.name).collect();
        names.sort_unstable_by(|a, b| b.cmp(a));
        let there: std::collections::HashSet<Name> = names.iter().copied().collect();
        let gone: Vec<Name> = self.known.keys().filter(|name| !there.contains(name)).copied().collect();
        for name in gone {
            self.forget(name);
        }
        if first {
            let pages = names.iter().map(|name| self.most_pages(*name)).fold(0, u64::saturating_add);
            // The files of others may have holes, and together they may be more than this directory is meant to hold.
            let most = self.store.config.size_limit() / BLOCK;
            self.store.index.lock().reserve(pages.min(most) as usize);
        }
        for (at, name) in names.iter().copied().enumerate() {
            if first && let Some(soon) = names.get(at + AHEAD) {
                self.store.directory.prefetch(*soon);
            }
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

    /// The pages that a segment can have by the lengths of its files: each takes a record and a block at least.
    fn most_pages(&self, name: Name) -> u64 {
        let size = |is_index| self.store.directory.size(SegmentFile { name, is_index }).unwrap_or_default().0;
        (size(true) / RECORD as u64).min(size(false) / BLOCK)
    }

    /// Forgets a segment whose files are gone. Returns how many pages went with it.
    pub(crate) fn forget(&mut self, name: Name) -> usize {
        let known = self.known.remove(&name);
        known.as_ref().and_then(Known::segment).map_or(0, |segment| self.store.forget(segment))
    }

    fn stop_waiting(&self) {
        let mut index = self.store.index.lock();
        if std::mem::take(&mut index.loading) {
            drop(index);
            self.store.queue.unpark();
        }
    }

    /// Loads a segment that was not there before.
    fn load(&mut self, name: Name) {
        let store = self.store;
        let read = store.directory.index(name, false).and_then(|index| self.read(&index, name, 0));
        match read {
            Ok(records) => {
                let segment = store.index.lock().add(|id| Segment::new(id, name, None));
                self.known.insert(name, Known::Open(segment, 0));
                self.take(name, records);
            }
            // Another process makes or evicts the segment just now, or was killed while it did so.
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof) => {
                self.listed = None;
                self.remove_unfinished(name);
            }
            Err(e) => {
                store.metrics.corrupt.add(1);
                let path = store.directory.path().display();
                log!(Level::WARN, "a segment in {path} is not served: {e}");
                self.known.insert(name, Known::Unreadable);
            }
        }
    }

    fn read(&self, index: &OwnedFd, name: Name, first: u32) -> io::Result<Records> {
        let data = self.store.directory.size(SegmentFile { name, is_index: false });
        let (data, _) = data.ok_or(io::ErrorKind::NotFound)?;
        read_records(index, name, first, data)
    }

    /// Adds records that were read to the index.
    fn take(&mut self, name: Name, records: Records) {
        let Some(known) = self.known.get_mut(&name) else { return };
        let Known::Open(segment, next) = known else { return };
        for chunk in records.values.chunks(CHUNK) {
            let mut index = self.store.index.lock();
            for (number, value) in chunk {
                index.insert(segment.id, *number, *value);
            }
        }
        if records.damaged > 0 {
            self.store.metrics.corrupt.add(records.damaged as u64);
            let path = self.store.directory.path().display();
            log!(Level::WARN, "{} records of {path}/{} are damaged", records.damaged, name.index());
        }
        *next = records.next;
        if records.sealed {
            self.store.sealed(segment);
            *known = Known::Sealed(segment.clone());
        }
    }

    /// Reads new records of a segment without a seal, and seals the segment if its writer is gone.
    fn follow(&mut self, name: Name) -> io::Result<()> {
        let Some(Known::Open(_, next)) = self.known.get(&name) else { return Ok(()) };
        let next = *next;
        let index = self.store.directory.index(name, !self.store.directory.read_only)?;
        if length(&index)? >= position(next) + RECORD as u64 {
            let records = self.read(&index, name, next)?;
            self.take(name, records);
        }
        match self.known.get(&name) {
            Some(Known::Open(_, next)) if !self.store.directory.read_only => self.adopt(name, &index, *next),
            _ => Ok(()),
        }
    }

    /// Seals a segment whose writer is gone. The records before `next` were read earlier.
    fn adopt(&mut self, name: Name, index: &OwnedFd, next: u32) -> io::Result<()> {
        if !try_lock(index) {
            return Ok(());
        }
        // While this lock is held no process makes a segment, so an unlocked segment has no writer. All that its writer
        // wrote can be read now.
        let lock = self.store.directory.lock()?;
        let mut records = self.read(index, name, 0)?;
        if records.sealed {
            // Its writer has sealed it since the last look.
            drop(lock);
            let records = self.read(index, name, next)?;
            self.take(name, records);
            return Ok(());
        }
        if records.values.is_empty() {
            self.store.directory.remove(name);
            self.forget(name);
            return Ok(());
        }
        // From here on the index file's own lock keeps other processes away. They need not wait for the device.
        drop(lock);
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
        // Keeps only new records: those that were known before may have been deleted since.
        records.values.retain(|(number, _)| *number >= next);
        self.take(name, Records { sealed: true, damaged: 0, ..records });
        Ok(())
    }
}

#[cfg(test)]
mod tests;
