//! The tier role: pages in files, moved by NIXL's storage plugins. What the host's threads call; the hot calls only touch
//! a queue.

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
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{
    Error, ErrorCode, Key, Level, Memory, MemoryKind, Opening, RegionId, Result, Scanned, StorageTier, Tag,
    TierCompletion, TierLimits, TierPage, TierUsage, log,
};
use rustix::event::{EventfdFlags, eventfd};

use crate::config::Config;
use crate::library::{find_library, strings};
use crate::queue::locked;
use crate::regions::MAX_REGIONS;
use crate::shared::{clear, random, signal};
use queue::{Queue, Work, named};
use run::{Maker, Runner, Shared};
use scans::Scans;
use store::Store;
use touching::Touching;

const MAX_PAGES: u32 = 256;
const MAX_BATCHES: u32 = 64;
/// What unbuffered access wants addresses and lengths to be multiples of.
const BLOCK: u64 = 4096;

/// An instance of the tier. See the module.
pub struct NixlTier {
    shared: Arc<Shared>,
    scans: Scans,
    last_region: AtomicU32,
    closed: AtomicBool,
    broken: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A configuration's directory.
fn directory(config: &Config) -> Result<&Path> {
    config.storage.directory.as_deref().ok_or_else(|| {
        let text = "set directory in [plugin.nixl.storage] to the folder for the pages";
        Error::new(ErrorCode::CONFIG, text)
    })
}

/// Says whether [`NixlTier::open`] would accept this configuration here. Without a directory nobody wants the tier of this
/// plugin, and nothing is wrong.
///
/// # Errors
/// As opening, without `IO`.
pub fn check(config: &str) -> Result<()> {
    let config = Config::parse(config)?;
    match config.storage.directory {
        Some(_) => find_library(&config, &config.storage.backend).map(drop),
        None => Ok(()),
    }
}

impl NixlTier {
    /// Finds NIXL, and starts an instance.
    ///
    /// # Errors
    /// `CONFIG` for a wrong configuration, `UNSUPPORTED` without a NIXL that has the storage plugin, `IO` when the
    /// directory cannot be used or NIXL refuses.
    pub fn open(opening: &Opening) -> Result<Self> {
        let config = Config::parse(&opening.config)?;
        let folder = directory(&config)?;
        let library = Arc::new(find_library(&config, &config.storage.backend)?);
        log!(Level::INFO, "NIXL is {}", library.path().display());
        let unique: String = random()?.iter().map(|byte| format!("{byte:02x}")).collect();
        let cannot = if config.read_only { "has no pages to read" } else { "cannot hold pages" };
        let io = |e| Error::new(ErrorCode::IO, format!("{} {cannot}: {e}", folder.display()));
        let maker = Maker {
            library,
            backend: CString::new(config.storage.backend.as_str()).unwrap_or_default(),
            parameters: strings(config.storage.parameters.clone())?,
            name: CString::new(format!("tier-{unique}")).unwrap_or_default(),
        };
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let direct = config.storage.direct;
        let shared = Arc::new(Shared {
            queue: Queue::new(MAX_BATCHES, MAX_PAGES),
            store: Store::open(folder, direct, config.read_only, unique).map_err(io)?,
            regions: RwLock::default(),
            touching: Touching::default(),
            event: event.map_err(|e| Error::new(ErrorCode::IO, format!("cannot create an eventfd: {e}")))?,
            direct,
        });
        let broken = Arc::new(AtomicBool::new(false));
        let (started, start) = sync_channel(1);
        let thread = spawn(shared.clone(), maker, broken.clone(), started)?;
        let died = |_| Error::new(ErrorCode::PANICKED, "the tier's thread panicked at its start");
        start.recv().map_err(died)??;
        Ok(Self {
            shared,
            scans: Scans::default(),
            last_region: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            broken,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// 0, or why no call is taken.
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

fn spawn(
    shared: Arc<Shared>,
    maker: Maker,
    broken: Arc<AtomicBool>,
    started: SyncSender<Result<()>>,
) -> Result<JoinHandle<()>> {
    let run = move || {
        let event = shared.clone();
        let body = || {
            let refused = |refusal: crate::capi::Refusal| {
                let text = format!("NIXL's storage plugin cannot be used: {refusal}");
                Error::new(ErrorCode::IO, text)
            };
            match Runner::new(shared, maker).map_err(refused) {
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
        if let Err(payload) = catch_unwind(AssertUnwindSafe(body)) {
            // Its drop may panic, and nobody is above us to catch that.
            std::mem::forget(payload);
            broken.store(true, Ordering::SeqCst);
            signal(&event.event);
        }
    };
    let thread = std::thread::Builder::new().name("nixl-tier".to_owned()).spawn(run);
    thread.map_err(|e| Error::new(ErrorCode::IO, format!("cannot start a thread: {e}")))
}

impl StorageTier for NixlTier {
    fn limits(&self) -> TierLimits {
        TierLimits {
            max_pages: MAX_PAGES,
            max_batches: MAX_BATCHES,
            max_value: 1 << 30,
            alignment: if self.shared.direct { BLOCK } else { 1 },
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
        if memory.address == 0 || memory.length == 0 || !inside {
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
        // Whoever touched memory before has let go of it, and whoever comes after finds no region.
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
            clear(&self.shared.event);
            if self.shared.queue.has_done() {
                signal(&self.shared.event);
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
        self.scans.step(&self.shared.store, cursor, keys)
    }

    fn usage(&self) -> Result<TierUsage> {
        self.ready()?;
        let io = |e| Error::new(ErrorCode::IO, format!("the directory cannot be read: {e}"));
        let (values, bytes) = self.shared.store.usage().map_err(io)?;
        Ok(TierUsage { values, bytes, capacity: 0, reserved: [0; 5] })
    }

    fn event_fd(&self) -> i32 {
        self.shared.event.as_raw_fd()
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.closed.store(true, Ordering::SeqCst);
        self.shared.queue.stop();
        let deadline = Instant::now() + Duration::from_millis(deadline_ms.min(600_000));
        let mut thread = locked(&self.thread);
        while thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if Instant::now() >= deadline {
                let text = format!("the tier's thread did not end within {deadline_ms} ms");
                return Err(Error::new(ErrorCode::TIMEOUT, text));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(thread) = thread.take() {
            // It has ended; what it panicked with was caught inside.
            let _caught = thread.join().is_err();
        }
        Ok(())
    }
}

impl Drop for NixlTier {
    fn drop(&mut self) {
        self.shared.queue.stop();
        if let Some(thread) = locked(&self.thread).take() {
            let _caught = thread.join().is_err();
        }
    }
}
