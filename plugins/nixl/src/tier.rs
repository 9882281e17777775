//! The tier role: pages in files or objects, moved by NIXL's storage plugins. This module has the calls of the host's
//! threads. The hot calls only touch a queue.

mod front;
mod objects;
mod queue;
mod run;
mod scans;
mod store;
mod touching;

use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{
    Error, ErrorCode, Key, Level, Memory, MemoryKind, Opening, RegionId, Result, Scanned, StorageTier, Tag,
    TierCompletion, TierLimits, TierPage, TierUsage, log,
};
use host_transfer_kit::{MAX_REGIONS, locked, random};

use crate::capi::Library;
use crate::config::Config;
use crate::library::{find_library, strings};
use front::Front;
use objects::Objects;
use queue::{Work, named};
use run::{Maker, Runner, Shared};
use scans::Scans;
use store::Store;

const MAX_PAGES: u32 = 256;
const MAX_BATCHES: u32 = 64;
/// Unbuffered access needs addresses and lengths that are multiples of this.
const BLOCK: u64 = 4096;

/// How long an instance of objects that was dropped without a shutdown waits for its end.
///
/// Work that NIXL does after that is left behind.
const END: Duration = Duration::from_secs(5);

/// Where the pages are kept.
enum Kept {
    Files(Arc<Shared>, Scans),
    Objects(Objects),
}

/// An instance of the tier. See the module.
pub struct NixlTier {
    shared: Arc<Front>,
    kept: Kept,
    last_region: AtomicU32,
    closed: AtomicBool,
    broken: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The state that a thread's panic changes.
pub struct Guarded {
    pub front: Arc<Front>,
    broken: Arc<AtomicBool>,
}

/// The configured directory.
fn directory(config: &Config) -> Result<&Path> {
    config.storage.directory.as_deref().ok_or_else(|| {
        let text = "set directory in [plugin.nixl.storage] to the folder for the pages";
        Error::new(ErrorCode::CONFIG, text)
    })
}

/// Says whether [`NixlTier::open`] would accept this configuration here. Without a directory the tier of this
/// plugin is not used, and nothing is wrong.
///
/// # Errors
/// As opening, without `IO`.
pub fn check(config: &str) -> Result<()> {
    let config = Config::parse(config)?;
    if config.storage.keeps_objects() {
        return objects::check(&config);
    }
    match config.storage.directory {
        Some(_) => find_library(&config, &config.storage.backend).map(drop),
        None => Ok(()),
    }
}

impl NixlTier {
    /// Finds NIXL, and starts an instance.
    ///
    /// # Errors
    /// `CONFIG` for a wrong configuration, `UNSUPPORTED` without a NIXL that has the storage plugin, `IO` when the directory
    /// or the bucket cannot be used or NIXL refuses.
    pub fn open(opening: &Opening) -> Result<Self> {
        let config = Config::parse(&opening.config)?;
        if config.storage.keeps_objects() {
            objects::check(&config)?;
        } else {
            directory(&config)?;
        }
        let library = Arc::new(find_library(&config, &config.storage.backend)?);
        log!(Level::INFO, "NIXL is {}", library.path().display());
        let unique: String = random()?.iter().map(|byte| format!("{byte:02x}")).collect();
        let front = Arc::new(Front::new(MAX_BATCHES, MAX_PAGES)?);
        let guarded = Guarded { front: front.clone(), broken: Arc::new(AtomicBool::new(false)) };
        let (kept, threads) = if config.storage.keeps_objects() {
            let (objects, threads) = objects::open(&config, library, &unique, &guarded)?;
            log!(Level::INFO, "pages are objects in {}", objects.place);
            (Kept::Objects(objects), threads)
        } else {
            let (shared, thread) = files(&config, library, unique, &guarded)?;
            (Kept::Files(shared, Scans::default()), vec![thread])
        };
        Ok(Self {
            shared: front,
            kept,
            last_region: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            broken: guarded.broken,
            threads: Mutex::new(threads),
        })
    }

    /// Asks all threads to end.
    fn stop(&self) {
        self.shared.queue.stop();
        if let Kept::Objects(objects) = &self.kept {
            objects.stop();
        }
    }

    /// Waits for the end of all threads. False when some have not ended before the deadline.
    fn have_ended(&self, deadline: Instant) -> bool {
        let mut threads = locked(&self.threads);
        while threads.iter().any(|thread| !thread.is_finished()) {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // The threads have ended. Their panics were caught inside.
        threads.drain(..).for_each(|thread| drop(thread.join()));
        true
    }

    /// 0, or the code with which calls are refused.
    fn state(&self) -> i32 {
        match () {
            () if self.closed.load(Ordering::SeqCst) => ErrorCode::CLOSED.0,
            () if self.broken.load(Ordering::SeqCst) => ErrorCode::PANICKED.0,
            () => 0,
        }
    }

    fn ready(&self) -> Result<()> {
        match ErrorCode(self.state()) {
            ErrorCode(0) => Ok(()),
            ErrorCode::CLOSED => Err(Error::new(ErrorCode::CLOSED, "the instance was shut down")),
            code => Err(Error::new(code, "the tier's thread panicked")),
        }
    }

    fn batch(&self, tag: Tag, work: Work, pages: impl ExactSizeIterator<Item = TierPage>) -> i32 {
        match self.state() {
            0 if pages.len() == 0 || pages.len() > MAX_PAGES as usize => ErrorCode::INVALID_ARGUMENT.0,
            0 if self.shared.queue.push(tag, work, pages) => 0,
            0 => ErrorCode::WOULD_BLOCK.0,
            state => state,
        }
    }
}

/// Opens a directory of files, and starts its thread.
fn files(
    config: &Config,
    library: Arc<Library>,
    unique: String,
    guarded: &Guarded,
) -> Result<(Arc<Shared>, JoinHandle<()>)> {
    let folder = directory(config)?;
    let cannot = if config.read_only { "has no pages to read" } else { "cannot hold pages" };
    let io = |e| Error::new(ErrorCode::IO, format!("{} {cannot}: {e}", folder.display()));
    let maker = Maker {
        library,
        backend: CString::new(config.storage.backend.as_str()).unwrap_or_default(),
        parameters: strings(config.storage.parameters.clone())?,
        name: CString::new(format!("tier-{unique}")).unwrap_or_default(),
    };
    let direct = config.storage.direct;
    let store = Store::open(folder, direct, config.read_only, unique).map_err(io)?;
    let store = store.keeping_free(config.storage.free_floor());
    let shared = Arc::new(Shared { front: guarded.front.clone(), store, direct });
    let (started, start) = sync_channel(1);
    let own = shared.clone();
    let body = move || {
        let refused = |refusal: crate::capi::Refusal| {
            let text = format!("NIXL's storage plugin cannot be used: {refusal}");
            Error::new(ErrorCode::IO, text)
        };
        match Runner::new(own, maker).map_err(refused) {
            Ok(runner) => {
                if started.try_send(Ok(())).is_ok() {
                    runner.run();
                }
            }
            Err(error) => {
                let _gone = started.try_send(Err(error)).is_err();
            }
        }
    };
    let thread = start_thread("nixl-tier", guarded, body)?;
    let died = |_| Error::new(ErrorCode::PANICKED, "the tier's thread panicked at its start");
    start.recv().map_err(died)??;
    Ok((shared, thread))
}

/// Starts a thread whose panic ends the instance and nothing else.
fn start_thread(
    name: &str,
    guarded: &Guarded,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let Guarded { front, broken } = guarded;
    let (front, broken) = (front.clone(), broken.clone());
    let run = move || {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(body)) {
            // Its drop may panic, and no frame above us catches that.
            std::mem::forget(payload);
            broken.store(true, Ordering::SeqCst);
            front.event.signal();
        }
    };
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    thread.map_err(|e| Error::new(ErrorCode::IO, format!("cannot start a thread: {e}")))
}

impl StorageTier for NixlTier {
    fn limits(&self) -> TierLimits {
        let (max_value, direct) = match &self.kept {
            Kept::Files(files, _) => (1 << 30, files.direct),
            Kept::Objects(_) => (objects::MAX_VALUE, false),
        };
        TierLimits {
            max_pages: MAX_PAGES,
            max_batches: MAX_BATCHES,
            max_value,
            alignment: if direct { BLOCK } else { 1 },
            reserved: [0; 4],
        }
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        self.ready()?;
        if memory.kind != MemoryKind::DRAM {
            let text = format!("memory of kind {} cannot be registered, only host memory", memory.kind.0);
            return Err(Error::new(ErrorCode::UNSUPPORTED, text));
        }
        let inside = memory.address.checked_add(memory.length).is_some();
        if memory.address.0 == 0 || memory.length == 0 || !inside {
            let text = format!("{} bytes at {:#x} are no memory", memory.length, memory.address);
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        let mut regions = self.shared.regions.write().unwrap_or_else(PoisonError::into_inner);
        if regions.len() >= MAX_REGIONS {
            let text = format!("{MAX_REGIONS} regions are registered, deregister one first");
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        }
        let id = self.last_region.fetch_add(1, Ordering::SeqCst) + 1;
        regions.insert(id, *memory);
        Ok(RegionId(id))
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.ready()?;
        let unknown = || Error::new(ErrorCode::INVALID_ARGUMENT, format!("no region {}", region.0));
        let mut regions = self.shared.regions.write().unwrap_or_else(PoisonError::into_inner);
        regions.remove(&region.0).ok_or_else(unknown)?;
        drop(regions);
        // Waits for turns that began before. Later turns find no region.
        self.shared.touching.wait();
        Ok(())
    }

    fn exists(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.batch(tag, Work::Exists, keys.iter().map(named))
    }

    fn get(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        self.batch(tag, Work::Get, pages.iter().copied())
    }

    fn put(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        self.batch(tag, Work::Put, pages.iter().copied())
    }

    fn delete(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.batch(tag, Work::Delete, keys.iter().map(named))
    }

    fn poll(&self, completions: &mut [TierCompletion]) -> i32 {
        let state = self.state();
        if state != 0 {
            return state;
        }
        let taken = self.shared.queue.take(completions);
        // Level-triggered: cleared once nothing waits, set again when something came meanwhile.
        if !self.shared.queue.has_done() {
            self.shared.event.clear();
            if self.shared.queue.has_done() {
                self.shared.event.signal();
            }
        }
        taken as i32
    }

    fn cancel(&self, tag: Tag) -> i32 {
        match self.state() {
            0 if self.shared.queue.cancel(tag) => 0,
            0 => ErrorCode::INVALID_ARGUMENT.0,
            state => state,
        }
    }

    fn settled(&self, tag: Tag) -> i32 {
        match self.state() {
            0 => i32::from(self.shared.queue.is_settled(tag)),
            state => state,
        }
    }

    fn scan(&self, cursor: u64, keys: &mut [Key]) -> Result<Scanned> {
        self.ready()?;
        match &self.kept {
            Kept::Files(files, scans) => scans.step(&files.store, cursor, keys),
            Kept::Objects(objects) => Err(objects.cannot_list()),
        }
    }

    fn usage(&self) -> Result<TierUsage> {
        self.ready()?;
        let files = match &self.kept {
            Kept::Files(files, _) => files,
            Kept::Objects(objects) => return Err(objects.cannot_list()),
        };
        let io = |e| Error::new(ErrorCode::IO, format!("the directory cannot be read: {e}"));
        let (values, bytes) = files.store.usage().map_err(io)?;
        Ok(TierUsage { values, bytes, capacity: 0, reserved: [0; 5] })
    }

    fn event_fd(&self) -> i32 {
        self.shared.event.as_raw_fd()
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.closed.store(true, Ordering::SeqCst);
        self.stop();
        if !self.have_ended(Instant::now() + Duration::from_millis(deadline_ms.min(600_000))) {
            let text = format!("the tier's threads did not end within {deadline_ms} ms");
            return Err(Error::new(ErrorCode::TIMEOUT, text));
        }
        Ok(())
    }
}

impl Drop for NixlTier {
    fn drop(&mut self) {
        self.stop();
        // Threads of objects touch only buffers of their own, and may wait for a server that does not answer.
        if matches!(self.kept, Kept::Objects(_)) && !self.have_ended(Instant::now() + END) {
            return;
        }
        locked(&self.threads).drain(..).for_each(|thread| drop(thread.join()));
    }
}
