//! The tier as the host sees it.

use std::io;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{
    Error, ErrorCode, Key, Level, Memory, Opening, RegionId, Result, Scanned, StorageTier, Tag,
    TierCompletion, TierLimits, TierPage, TierUsage, log,
};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::config::{Config, Io};
use crate::index::Index;
use crate::keeper;
use crate::pinned::PIECE;
use crate::queue::Kind;
use crate::sealer;
use crate::store::Store;
use crate::uring::{self, Ring};
use crate::work;

/// Number of threads when the configuration gives none: with rings, and without.
const THREADS: (usize, usize) = (2, 16);
/// How long an instance that is dropped without a shutdown waits for its threads.
const DROP_PATIENCE: u64 = 5000;
/// See [`FileTier::load_patience`].
const LOAD_PATIENCE: Duration = Duration::from_secs(60);

/// Threads that have not ended.
#[derive(Default)]
struct Running {
    count: Mutex<usize>,
    ended: Condvar,
}

impl Running {
    /// Waits until no more than `left` run. False at the deadline.
    fn wait(&self, left: usize, deadline: Instant) -> bool {
        let most = deadline.saturating_duration_since(Instant::now());
        let mut count = self.count.lock();
        let _timed_out = self.ended.wait_while_for(&mut count, |count| *count > left, most);
        *count <= left
    }
}

/// A storage tier in a directory. See the crate.
pub struct FileTier {
    store: Arc<Store>,
    stop_keeper: Arc<AtomicBool>,
    running: Arc<Running>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// How long a call about all stored pages waits for the index.
    load_patience: Duration,
}

impl FileTier {
    pub(crate) fn open(opening: &Opening) -> Result<Self> {
        let config = Config::parse(&opening.config)?;
        let rings = rings(&config)?;
        let threads = if config.threads == 0 { THREADS.1 } else { config.threads };
        let store = Arc::new(Store::new(config, rings.len())?);
        let tier = Self {
            store: store.clone(),
            stop_keeper: Arc::new(AtomicBool::new(false)),
            running: Arc::new(Running::default()),
            threads: Mutex::new(Vec::new()),
            load_patience: LOAD_PATIENCE,
        };
        let how = if rings.is_empty() {
            format!("{threads} threads")
        } else {
            format!("io_uring on {} threads", rings.len())
        };
        let direct = if store.directory.is_direct() { "past" } else { "through" };
        log!(
            Level::INFO,
            "{}: pages in {}, with {how}, {direct} the page cache",
            opening.name,
            store.directory.path().display()
        );
        let stop = tier.stop_keeper.clone();
        let (sealer, work) = sealer::new();
        tier.spawn("tier-sealer", move |store| {
            work.run(store, |open| open.seal(store.config.fsync));
            Ok(())
        })?;
        tier.spawn("tier-keeper", move |store| {
            keeper::run(store, sealer, &stop);
            Ok(())
        })?;
        if rings.is_empty() {
            for _ in 0..threads {
                tier.spawn("tier-io", |store| {
                    work::thread(store);
                    Ok(())
                })?;
            }
        }
        for (number, ring) in rings.into_iter().enumerate() {
            tier.spawn("tier-ring", move |store| uring::thread(store, ring, number))?;
        }
        Ok(tier)
    }

    fn spawn(&self, name: &str, run: impl FnOnce(&Store) -> io::Result<()> + Send + 'static) -> Result<()> {
        let (store, running) = (self.store.clone(), self.running.clone());
        *running.count.lock() += 1;
        let counted = running.clone();
        let body = move || {
            let ended = catch_unwind(AssertUnwindSafe(|| run(&store)));
            if !matches!(ended, Ok(Ok(()))) {
                if let Ok(Err(e)) = ended {
                    log!(Level::ERROR, "a thread of the tier ended: {e}");
                }
                store.set_broken();
            }
            drop(store);
            *running.count.lock() -= 1;
            running.ended.notify_all();
        };
        let started = std::thread::Builder::new().name(name.to_owned()).spawn(body);
        let handle = started.map_err(|e| {
            *counted.count.lock() -= 1;
            Error::new(ErrorCode::IO, format!("cannot start a thread: {e}"))
        })?;
        self.threads.lock().push(handle);
        Ok(())
    }

    /// Replaces `CLOSED` with `PANICKED` when the instance is broken.
    fn code(&self, code: i32) -> i32 {
        let closed = code == ErrorCode::CLOSED.0 && self.store.is_broken();
        if closed { ErrorCode::PANICKED.0 } else { code }
    }

    fn check_open(&self) -> Result<()> {
        if self.store.is_broken() {
            return Err(Error::new(ErrorCode::PANICKED, "a thread of the tier ended, see the log"));
        }
        if self.store.queue.is_closed() {
            return Err(Error::new(ErrorCode::CLOSED, "the instance was shut down"));
        }
        Ok(())
    }

    /// Waits until the index has all that was stored at opening: a part of it cannot say what is stored.
    fn whole_index(&self) -> Result<MutexGuard<'_, Index>> {
        let deadline = Instant::now() + self.load_patience;
        loop {
            self.check_open()?;
            let index = self.store.index.lock();
            if index.complete {
                return Ok(index);
            }
            let known = index.len();
            drop(index);
            if Instant::now() >= deadline {
                let text = format!("the index is still being read, {known} pages are known: ask again later");
                return Err(Error::new(ErrorCode::TIMEOUT, text));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn pages(&self, kind: Kind, tag: Tag, pages: &[TierPage]) -> i32 {
        self.code(self.store.queue.push(kind, tag, pages.len(), pages.iter().copied()))
    }
}

/// Makes the rings for the threads. Empty when the threads work without rings.
fn rings(config: &Config) -> Result<Vec<Ring>> {
    if config.io == Io::Threads {
        return Ok(Vec::new());
    }
    let count = if config.threads == 0 { THREADS.0 } else { config.threads };
    let pieces = (config.pinned_mib << 20) / PIECE / count as u64;
    let pieces = usize::try_from(pieces).unwrap_or(usize::MAX);
    let rings: io::Result<Vec<Ring>> = (0..count).map(|_| Ring::new(config.queue_depth, pieces)).collect();
    rings.or_else(|e| {
        if config.io == Io::Auto {
            log!(Level::INFO, "no io_uring, threads read and write instead: {e}");
            return Ok(Vec::new());
        }
        let text = format!("no io_uring here, set io = \"threads\" or \"auto\": {e}");
        Err(Error::new(ErrorCode::IO, text))
    })
}

impl StorageTier for FileTier {
    fn limits(&self) -> TierLimits {
        let config = &self.store.config;
        TierLimits {
            max_pages: config.max_pages,
            max_batches: config.max_batches,
            max_value: config.max_value(),
            // Any alignment works. Multiples of 4096 bytes need no copy.
            alignment: 1,
            reserved: [0; 4],
        }
    }
    fn register(&self, memory: &Memory) -> Result<RegionId> {
        self.store.queue.register(memory)
    }
    fn deregister(&self, region: RegionId) -> Result<()> {
        self.store.queue.deregister(region)
    }
    fn exists(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.code(self.store.queue.push_keys(Kind::Exists, tag, keys))
    }
    fn get(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        self.pages(Kind::Get, tag, pages)
    }
    fn put(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        self.pages(Kind::Put, tag, pages)
    }
    fn delete(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.code(self.store.queue.push_keys(Kind::Delete, tag, keys))
    }
    fn poll(&self, completions: &mut [TierCompletion]) -> i32 {
        self.code(self.store.queue.poll(completions))
    }
    fn cancel(&self, tag: Tag) -> i32 {
        self.code(self.store.queue.cancel(tag))
    }
    fn settled(&self, tag: Tag) -> i32 {
        self.code(self.store.queue.settled(tag))
    }
    fn scan(&self, cursor: u64, keys: &mut [Key]) -> Result<Scanned> {
        let (segment, number) = ((cursor >> 32) as u32, cursor as u32);
        let index = self.whole_index()?;
        if !index.knows_place(segment, number) {
            let text = "no scan gave out this cursor, 0 starts one";
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        let (count, next) = index.scan(segment, number, keys);
        let cursor = next.map_or(0, |(segment, number)| u64::from(segment) << 32 | u64::from(number));
        Ok(Scanned { keys: count as u32, reserved: 0, cursor })
    }
    fn usage(&self) -> Result<TierUsage> {
        let index = self.whole_index()?;
        let capacity = self.store.config.size_limit();
        Ok(TierUsage { values: index.len() as u64, bytes: index.bytes(), capacity, reserved: [0; 5] })
    }
    fn event_fd(&self) -> i32 {
        self.store.queue.event().as_raw_fd()
    }
    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        let deadline = Instant::now() + Duration::from_millis(deadline_ms.min(1 << 40));
        self.store.queue.close();
        let late =
            || Error::new(ErrorCode::TIMEOUT, "a read, a write or a sync has not ended, the storage hangs");
        // The keeper has the last segments sealed when no thread writes any more, so keeper and sealer end last.
        let quiet = self.running.wait(2, deadline);
        self.stop_keeper.store(true, Ordering::SeqCst);
        self.store.call_keeper();
        if !quiet || !self.running.wait(0, deadline) {
            return Err(late());
        }
        for thread in self.threads.lock().drain(..) {
            // Panics of threads are caught inside.
            let _caught = thread.join();
        }
        if self.store.abandoned.load(Ordering::SeqCst) {
            let text = "a thread ended while the system read or wrote, and the end of that will not be seen: leave the memory";
            return Err(Error::new(ErrorCode::TIMEOUT, text));
        }
        Ok(())
    }
}

impl Drop for FileTier {
    fn drop(&mut self) {
        if let Err(e) = self.shutdown(DROP_PATIENCE) {
            log!(Level::ERROR, "a tier was dropped, and its threads go on: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(dir: &std::path::Path) -> FileTier {
        let config = format!("dir = {dir:?}\nfree_floor_mib = 0\nsegment_mib = 1\nsize_limit_mib = 8");
        FileTier::open(&Opening { name: "test".into(), config }).unwrap()
    }

    #[test]
    fn what_is_stored_is_told_when_all_of_it_is_known_and_not_before() {
        let dir = tempfile::tempdir().unwrap();
        let mut tier = opened(dir.path());
        assert_eq!(tier.usage().unwrap().values, 0, "the empty directory is read");
        tier.load_patience = Duration::ZERO;
        tier.store.index.lock().complete = false;
        let mut keys = [Key::default(); 4];
        assert_eq!(tier.usage().unwrap_err().code, ErrorCode::TIMEOUT);
        assert_eq!(tier.scan(0, &mut keys).unwrap_err().code, ErrorCode::TIMEOUT);
        tier.load_patience = LOAD_PATIENCE;
        std::thread::scope(|scope| {
            let calls = [
                scope.spawn(|| tier.usage().unwrap().values),
                scope.spawn(|| u64::from(tier.scan(0, &mut [Key::default(); 4]).unwrap().keys)),
            ];
            for number in 0..3 {
                let mut index = tier.store.index.lock();
                let name = crate::format::Name { birth: number, random: number };
                let segment = index.add(|id| crate::segment::Segment::new(id, name, None));
                let key = Key([number as u8; 32]);
                index.insert(segment.id, 0, crate::format::Value { key, checksum: 0, block: 0, length: 1 });
                index.complete = number == 2;
            }
            assert_eq!(calls.map(|call| call.join().unwrap()), [3, 3]);
        });
        // A call also ends when the instance closes before that.
        tier.store.index.lock().complete = false;
        std::thread::scope(|scope| {
            let call = scope.spawn(|| tier.usage().unwrap_err().code);
            tier.store.queue.close();
            assert_eq!(call.join().unwrap(), ErrorCode::CLOSED);
        });
    }

    #[test]
    fn a_shutdown_that_leaves_the_kernel_at_work_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let tier = opened(dir.path());
        tier.store.abandoned.store(true, Ordering::SeqCst);
        assert_eq!(tier.shutdown(10_000).unwrap_err().code, ErrorCode::TIMEOUT);
    }
}
