//! The storage role: pages in Mooncake Store, a pool of memory on many machines, of which each worker may lend a piece.
//! This module has the calls of the host's threads. The hot calls only touch a queue.
//!
//! - The host's memory is registered once. Values go between it and the pool without a copy in between.
//! - Threads of the tier make all calls into Mooncake: one group for questions, one for reads, one for writes
//!   ([`groups`]). A call that hangs holds up its thread and its pages. Pages that wait behind it end with `TIMEOUT`
//!   after `store_deadline_ms`, so that no call waits for a peer that is frozen.
//! - The answer that a key exists is a hint: its owner may be gone since. A get that fails is an error of that page alone.
//! - A key never gets another value: Mooncake answers a put of a key that is there with success and writes nothing.
//! - While the master is away no call is made ([`link`]).
//! - Mooncake has no checksums. Values have to carry their own, so the host seals them.

mod capi;
mod client;
mod config;
mod find;
mod groups;
mod keys;
mod link;
mod master;
mod memory;
mod metrics;
mod python;
mod queue;
mod usage;

use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{
    Error, ErrorCode, Key, Level, Memory, Opening, RegionId, Result, Scanned, StorageTier, Tag,
    TierCompletion, TierLimits, TierPage, TierUsage, log,
};
use host_transfer_kit::{Event, locked};

use client::Library;
use config::Config;
use groups::Shared;
use link::{Link, UNSETTLED};
use metrics::Metrics;
use queue::{GROUPS, Queue, Work, named};

/// As many keys as one call takes.
const MAX_PAGES: u32 = client::CALL_KEYS as u32;
const MAX_BATCHES: u32 = 64;
/// Longest value. Mooncake's own limit is that of an allocation in a segment.
const MAX_VALUE: u64 = 1 << 30;
/// How long opening may take, with the start of a Python. Mooncake tries for 88 s if the master does not answer.
const SETUP: Duration = Duration::from_secs(30);
/// How long an instance that was dropped without a shutdown waits for its end. Mooncake takes 1 to 2 s, and longer on a busy machine.
const END: Duration = Duration::from_secs(20);
/// How many times in `store_deadline_ms` the tier looks for work that waits for too long.
const LOOKS: u32 = 8;

/// An instance of the tier. See the module.
pub struct MooncakeTier {
    shared: Arc<Shared>,
    closed: AtomicBool,
    broken: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Address of the master's metrics, and how long the master may take to answer.
    metrics: (String, Duration),
}

/// Finds and loads the configured library, without starting anything of it.
type Find = Box<dyn FnOnce() -> Result<Box<dyn Library>> + Send>;

/// Opens an instance: finds and loads Mooncake Store, and starts its client.
///
/// # Errors
/// `CONFIG` for a wrong configuration, `UNSUPPORTED` without a Mooncake Store, `IO` without a master, `TIMEOUT` when
/// the master does not answer.
pub fn open(opening: &Opening) -> Result<MooncakeTier> {
    let shared = crate::config::Config::parse(&opening.config)?;
    let config = Config::parse(&opening.config)?;
    let library = config.store_library.clone();
    let find = move || find::load(&shared, library.as_deref());
    MooncakeTier::start(&config, Box::new(find), UNSETTLED)
}

/// Says whether a Mooncake Store would be found with this configuration. Nothing of it is loaded, and no master is called.
///
/// # Errors
/// As [`open`], without `IO` and `TIMEOUT`.
pub fn check(text: &str) -> Result<()> {
    let shared = crate::config::Config::parse(text)?;
    find::check(&shared, Config::parse(text)?.store_library.as_deref())
}

impl MooncakeTier {
    fn start(config: &Config, find: Find, unsettled: Duration) -> Result<Self> {
        let metrics = Metrics::new()?;
        let threads = [1, config.read_threads as usize, config.write_threads as usize];
        let shared = Arc::new(Shared {
            queue: Queue::new(MAX_BATCHES, MAX_PAGES, threads),
            link: Link::new(config.making(), metrics),
            regions: memory::Regions::default(),
            metrics,
            held: Mutex::default(),
            keys: keys::Keys::default(),
            event: Event::new()?,
            unsettled,
            read_only: config.read_only,
        });
        let tier = Self {
            shared: shared.clone(),
            closed: AtomicBool::new(false),
            broken: Arc::default(),
            threads: Mutex::default(),
            metrics: (config.metrics_address(), Duration::from_millis(config.master_timeout_ms)),
        };
        let (opened, open) = sync_channel(1);
        let own = shared.clone();
        tier.spawn("mooncake-link", move || {
            let library = match find().and_then(|library| {
                own.link.open(&*library, &own.regions)?;
                Ok(library)
            }) {
                Ok(library) => library,
                Err(error) => {
                    let _unheard = opened.try_send(Err(error)).is_err();
                    return;
                }
            };
            let _unheard = opened.try_send(Ok(library.describe())).is_err();
            own.link.keep(&*library, &own.regions, || own.release_held());
        })?;
        // An error drops `tier`, which stops the thread as soon as Mooncake returns to it.
        let what = open.recv_timeout(SETUP).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                let text = format!(
                    "Mooncake Store was not set up within {SETUP:?}, though a process listens at {}: is that a mooncake_master?",
                    config.master_server_address
                );
                Error::new(ErrorCode::TIMEOUT, text)
            }
            RecvTimeoutError::Disconnected => Error::new(ErrorCode::PANICKED, "the tier's thread panicked at its start"),
        })??;
        for (group, threads) in GROUPS.into_iter().zip(threads) {
            for thread in 0..threads {
                let own = shared.clone();
                tier.spawn(["mooncake-ask", "mooncake-read", "mooncake-write"][group as usize], move || {
                    own.serve(group, thread);
                })?;
            }
        }
        let patience = Duration::from_millis(config.store_deadline_ms);
        tier.spawn("mooncake-watch", move || {
            while !shared.link.is_stopping() {
                std::thread::park_timeout(patience / LOOKS);
                shared.watch(patience);
            }
        })?;
        log!(
            Level::INFO,
            "Mooncake Store is {what}, with the master at {}; Mooncake listens on all interfaces and has no access control",
            config.master_server_address
        );
        Ok(tier)
    }

    fn spawn(&self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let (broken, shared) = (self.broken.clone(), self.shared.clone());
        let run = move || {
            if let Err(payload) = catch_unwind(AssertUnwindSafe(body)) {
                // Its drop may panic, and no frame above us catches that.
                std::mem::forget(payload);
                broken.store(true, Ordering::SeqCst);
                shared.event.signal();
            }
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
        let thread = thread.map_err(|e| Error::new(ErrorCode::IO, format!("cannot start a thread: {e}")))?;
        locked(&self.threads).push(thread);
        Ok(())
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
            code => Err(Error::new(code, "one of the tier's threads panicked")),
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

    fn stop(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.shared.queue.stop();
        self.shared.link.stop();
        locked(&self.threads).iter().for_each(|thread| thread.thread().unpark());
    }
}

impl StorageTier for MooncakeTier {
    fn limits(&self) -> TierLimits {
        TierLimits {
            max_pages: MAX_PAGES,
            max_batches: MAX_BATCHES,
            max_value: MAX_VALUE,
            alignment: 1,
            reserved: [0; 4],
        }
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        self.ready()?;
        let mut regions = self.shared.regions.still();
        let span = regions.check(memory)?;
        if let Some(Err(why)) = self.shared.link.tell(|client| client.register(span)) {
            let text = format!("Mooncake takes no {} bytes at {:#x}: {why}", span.length, span.address);
            return Err(Error::new(ErrorCode::IO, text));
        }
        Ok(regions.add(span))
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.ready()?;
        self.shared.regions.remove(region, |span| {
            if let Some(Err(why)) = self.shared.link.tell(|client| client.unregister(span)) {
                // Nothing touches this memory any more, in spite of the error.
                log!(
                    Level::WARN,
                    "Mooncake does not let go of {} bytes at {:#x}: {why}",
                    span.length,
                    span.address
                );
            }
        })
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
            0 if self.shared.queue.cancel(tag) => {
                self.shared.event.signal();
                0
            }
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

    fn scan(&self, _cursor: u64, _keys: &mut [Key]) -> Result<Scanned> {
        self.ready()?;
        let text = "Mooncake Store cannot list its keys; host tier stat says how many there are";
        Err(Error::new(ErrorCode::UNSUPPORTED, text))
    }

    fn usage(&self) -> Result<TierUsage> {
        self.ready()?;
        let (address, timeout) = &self.metrics;
        usage::ask(address, *timeout).map_err(|why| {
            let text = format!(
                "Mooncake Store does not tell a client what it holds, and its master shows no metrics at {address}: {why}; say \
                 in master_metrics_address where they are (--metrics_port of mooncake_master)"
            );
            Error::new(ErrorCode::IO, text)
        })
    }

    fn event_fd(&self) -> i32 {
        self.shared.event.as_raw_fd()
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.stop();
        if self.ended_within(Duration::from_millis(deadline_ms.min(600_000))) {
            return Ok(());
        }
        if self.shared.link.is_quiet() && locked(&self.shared.held).is_empty() {
            log!(
                Level::INFO,
                "Mooncake Store's client takes longer than {deadline_ms} ms to end, and touches nothing of ours"
            );
            return Ok(());
        }
        let text = format!("Mooncake did not come back from its calls within {deadline_ms} ms");
        Err(Error::new(ErrorCode::TIMEOUT, text))
    }
}

impl MooncakeTier {
    /// Waits for the end of all threads. False when some have not ended within `patience`.
    fn ended_within(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut threads = locked(&self.threads);
        while threads.iter().any(|thread| !thread.is_finished()) {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        for thread in threads.drain(..) {
            // The thread has ended. Its panics were caught inside.
            let _caught = thread.join().is_err();
        }
        true
    }
}

impl Drop for MooncakeTier {
    fn drop(&mut self) {
        self.stop();
        // The process may crash at its exit while Mooncake's own threads still run. So this waits for the tier's threads,
        // which close the client. Threads that hang for longer than `END` are left: they own their part of all that they share.
        let _hangs = !self.ended_within(END);
    }
}

#[cfg(test)]
mod tests;
