//! The keeper's work under the directory's lock: it makes segments, evicts old ones to have room, and removes remains
//! of segments after a crash.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use host_plugin_api::{ErrorCode, Level, log};

use crate::backing::{DirectoryLock, SegmentFile, length, try_lock};
use crate::config::Fsync;
use crate::format::{Name, RECORD};
use crate::keeper::Keeper;
use crate::segment::Segment;
use crate::store::{code_of, is_full};
use crate::writer::OpenSegment;

/// How long puts are refused before the next try to get a segment.
const REFUSAL: Duration = Duration::from_secs(1);
/// The same while the keeper waits for the space of evicted segments. Other processes give it back as soon as they look.
const SOON: Duration = Duration::from_millis(100);
/// How long the keeper waits for the space of evicted segments. Unlinked files take their space until the last process
/// that has them open closes them. Other processes do so when they look at the directory the next time.
const SETTLING: Duration = Duration::from_secs(5);
/// Time between two tries while puts wait for a segment.
const STEP: Duration = Duration::from_millis(10);
/// Most segments of a directory, however small.
const MOST_SEGMENTS: usize = 32_768;

/// Bytes that a pair of files counts for: an index never grows beyond one record per block and two more.
fn footprint(data: u64, index: u64) -> u64 {
    data + index.max(data / 64 + 2 * RECORD as u64)
}

/// The time since the first call of this function with `start`.
fn waited(start: &mut Option<Instant>) -> Duration {
    match start {
        Some(start) => start.elapsed(),
        None => {
            *start = Some(Instant::now());
            Duration::ZERO
        }
    }
}

impl Keeper<'_> {
    /// Evicts what is too much, after an opening with a smaller limit than before.
    pub fn fit(&mut self) {
        if !self.store.directory.read_only
            && let Ok(lock) = self.store.directory.lock()
            && let Err((_, text)) = self.make_room(0, &lock)
        {
            self.report(Some(text));
        }
    }

    /// Makes a segment, and room for it.
    pub fn make(&mut self) -> Result<Arc<OpenSegment>, (ErrorCode, Instant)> {
        if self.is_astray() {
            return Err((ErrorCode::IO, Instant::now() + REFUSAL));
        }
        // While puts are refused, later puts are refused without a wait.
        let patience = if self.is_refusing() { Duration::ZERO } else { self.patience };
        let mut start = None;
        loop {
            match self.try_make() {
                Ok(open) => {
                    self.report(None);
                    return Ok(open);
                }
                // Counted from the end of the first try, which may have taken long.
                Err((ErrorCode::NO_RESOURCE, _)) if waited(&mut start) < patience && self.comes_soon() => {}
                Err((code, text)) => {
                    let path = self.store.directory.path().display();
                    let text = format!("puts to {path} are refused, and tried again soon: {text}");
                    self.report(Some(text));
                    return Err((code, Instant::now() + if self.is_settling() { SOON } else { REFUSAL }));
                }
            }
        }
    }

    /// Waits for a seal, or a moment. Returns whether a segment may be made now that could not be made before.
    fn comes_soon(&mut self) -> bool {
        if self.seal() || self.await_sealed() {
            return true;
        }
        let soon = self.is_settling() || self.store.writer.has_full();
        if soon {
            self.store.wait_for_call(STEP);
        }
        soon
    }

    fn try_make(&mut self) -> Result<Arc<OpenSegment>, (ErrorCode, String)> {
        let store = self.store;
        let failed = |e: &io::Error| (code_of(e), e.to_string());
        let lock = store.directory.lock().map_err(|e| failed(&e))?;
        let size = store.config.segment();
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| failed(&e.into()))?;
        let birth = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let name = Name { birth: birth.as_micros() as u64, random: u64::from_ne_bytes(random) };
        self.make_room(footprint(size, 0), &lock)?;
        let mut evicted = 0;
        let made = loop {
            match store.directory.make(name, size, &lock) {
                // The file system has less space than it says. Evicts the oldest segments, one by one, as many as are needed.
                Err(e) if is_full(&e) && evicted < footprint(size, 0) && !self.is_settling() => {
                    match self.evict_oldest(&lock) {
                        Some(taken) => evicted += taken,
                        None => break Err(e),
                    }
                }
                made => break made,
            }
        };
        if made.is_err() && evicted > 0 {
            self.awaited = Some(Instant::now() + SETTLING);
        }
        let (index, data) = made.map_err(|e| failed(&e))?;
        if store.config.fsync == Fsync::Always {
            store.directory.sync().map_err(|e| failed(&e))?;
        }
        let data = Arc::new(data);
        let segment = store.index.lock().add(|id| Segment::new(id, name, Some(data.clone())));
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

    /// Evicts until `bytes` more bytes are within the limits.
    fn make_room(&mut self, bytes: u64, lock: &DirectoryLock) -> Result<(), (ErrorCode, String)> {
        // Reads since the last touch count as use.
        self.touch();
        let failed = |e: io::Error| (code_of(&e), e.to_string());
        let (sizes, mut sum) = self.sizes().map_err(failed)?;
        let mut sizes = sizes.into_iter();
        let config = &self.store.config;
        let (before, mut evicted) = (self.store.directory.free().map_err(failed)?, 0);
        loop {
            let free = self.store.directory.free().map_err(failed)?;
            let needed = config.free_floor() + bytes;
            let short = if sum + bytes > config.size_limit() {
                format!("size_limit_mib = {} is reached", config.size_limit_mib)
            } else if sizes.len() >= MOST_SEGMENTS {
                format!("{MOST_SEGMENTS} segments are there")
            } else if free < needed {
                let text =
                    format!("{} MiB are free, free_floor_mib is {}", free >> 20, config.free_floor_mib);
                if evicted > 0 && before + evicted >= needed {
                    self.awaited = Some(Instant::now() + SETTLING);
                }
                if self.is_settling() {
                    let text = format!("{text}, and the space of evicted segments is not free yet");
                    return Err((ErrorCode::NO_RESOURCE, text));
                }
                text
            } else {
                return Ok(());
            };
            let gone = sizes.find_map(|(name, size)| Some((name, size, self.evict(name, lock)?)));
            let Some((name, size, taken)) = gone else {
                return Err((ErrorCode::NO_RESOURCE, format!("{short}, and nothing is left to evict")));
            };
            sum -= size;
            evicted += taken;
            log!(Level::DEBUG, "evicted {}: {short}", name.index());
        }
    }

    /// Whether enough was evicted a moment ago, but its space is not free yet.
    fn is_settling(&self) -> bool {
        self.awaited.is_some_and(|until| Instant::now() < until)
    }

    fn evict_oldest(&mut self, lock: &DirectoryLock) -> Option<u64> {
        let (sizes, _) = self.sizes().ok()?;
        sizes.into_iter().find_map(|(name, _)| self.evict(name, lock))
    }

    /// Removes a segment, and returns the bytes that its files took.
    ///
    /// A segment stays when it has a writer, and when its lock cannot be tried.
    fn evict(&mut self, name: Name, _lock: &DirectoryLock) -> Option<u64> {
        let store = self.store;
        if store.writer.knows(name).is_some() {
            return None;
        }
        match store.directory.index(name, false) {
            Ok(index) if try_lock(&index) => {}
            // A crash between two unlinks left data without an index.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            _ => return None,
        }
        let taken = store.directory.taken(name);
        if !store.directory.remove(name) {
            return None;
        }
        let pages = self.forget(name);
        store.metrics.segments_evicted.add(1);
        store.metrics.pages_evicted.add(pages as u64);
        Some(taken)
    }

    /// Removes data whose index is gone, if that is still so while no segment is made or removed.
    pub fn remove_lonely(&self, names: &[Name]) {
        let Ok(_lock) = self.store.directory.lock() else { return };
        for name in names {
            if self.store.directory.size(SegmentFile { name: *name, is_index: true }).is_none() {
                self.store.directory.remove(*name);
            }
        }
    }

    /// Removes a segment without a header or without data, unless a process makes it just now.
    pub fn remove_unfinished(&self, name: Name) {
        let directory = &self.store.directory;
        if !directory.read_only
            && let Ok(_lock) = directory.lock()
            && let Ok(index) = directory.index(name, false)
            && try_lock(&index)
            && (length(&index).is_ok_and(|length| length < RECORD as u64)
                || directory.size(SegmentFile { name, is_index: false }).is_none())
        {
            directory.remove(name);
        }
    }
}
