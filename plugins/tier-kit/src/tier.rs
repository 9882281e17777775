//! The tier around a store: the host's calls, and the threads that call the store.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{
    Error, ErrorCode, Key, Level, Memory, RegionId, Result, Scanned, StorageTier, Tag, TierCompletion,
    TierLimits, TierPage, TierUsage, WAKES, host, log,
};

use crate::cursors::Cursors;
use crate::queue::{Job, Kind, Queue};
use crate::regions::{PageBytes, Regions};
use crate::store::{Limits, Store};

/// How long deregistering waits for calls of the store, in seconds.
pub const FENCE_SECONDS: u64 = 30;

/// How often a hot call tries the lock before it sleeps: a thread of the kit holds the lock for an instant.
const TRIES: u32 = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Open,
    /// The store panicked.
    Panicked,
    Closed,
}

impl Stage {
    /// 0, or the code that every call is answered with.
    fn code(self) -> i32 {
        match self {
            Self::Open => 0,
            Self::Panicked => ErrorCode::PANICKED.0,
            Self::Closed => ErrorCode::CLOSED.0,
        }
    }

    fn check(self) -> Result<()> {
        match self {
            Self::Open => Ok(()),
            Self::Panicked => {
                Err(Error::new(ErrorCode::PANICKED, "the store panicked earlier: open the tier anew"))
            }
            Self::Closed => Err(Error::new(ErrorCode::CLOSED, "the instance was shut down")),
        }
    }
}

struct State {
    stage: Stage,
    queue: Queue,
    regions: Regions,
    /// Threads that have not ended.
    running: u32,
}

struct Shared<S> {
    store: S,
    limits: Limits,
    /// Held for microseconds, and never while the store is called.
    state: Mutex<State>,
    work: Condvar,
    /// A call of the store or a thread ended.
    ended: Condvar,
}

/// A storage tier around a [`Store`]. See the [crate](crate).
pub struct Tier<S: Store> {
    shared: Arc<Shared<S>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    cursors: Mutex<Cursors>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: Store> Tier<S> {
    /// Takes the queue's memory and starts the threads.
    ///
    /// # Errors
    /// `CONFIG` for invalid limits, `NO_RESOURCE` when a thread cannot be started.
    pub fn start(store: S, limits: Limits) -> Result<Self> {
        limits.check()?;
        let state =
            State { stage: Stage::Open, queue: Queue::new(&limits), regions: Regions::default(), running: 0 };
        let (work, ended) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { store, limits, state: Mutex::new(state), work, ended });
        // Dropping it ends the threads that were started.
        let tier = Self { shared, threads: Mutex::default(), cursors: Mutex::default() };
        for _ in 0..limits.threads {
            let shared = tier.shared.clone();
            locked(&shared.state).running += 1;
            let started = Builder::new().name("tier".to_owned()).spawn(move || shared.run());
            match started {
                Ok(thread) => locked(&tier.threads).push(thread),
                Err(error) => {
                    locked(&tier.shared.state).running -= 1;
                    let text = format!("a thread of the tier cannot be started: {error}");
                    return Err(Error::new(ErrorCode::NO_RESOURCE, text));
                }
            }
        }
        Ok(tier)
    }

    /// The store, for an author's tests.
    pub fn store(&self) -> &S {
        &self.shared.store
    }

    /// The state, for hot calls.
    fn hot(&self) -> MutexGuard<'_, State> {
        for _ in 0..TRIES {
            match self.shared.state.try_lock() {
                Ok(state) => return state,
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        locked(&self.shared.state)
    }

    fn submit(&self, kind: Kind, tag: Tag, pages: impl ExactSizeIterator<Item = TierPage>) -> i32 {
        let is_one = pages.len() == 1;
        let mut state = self.hot();
        let code = match state.stage {
            Stage::Open => state.queue.submit(kind, tag, pages),
            other => other.code(),
        };
        drop(state);
        if code == 0 && is_one {
            self.shared.work.notify_one();
        } else if code == 0 {
            self.shared.work.notify_all();
        }
        code
    }

    fn close(&self) {
        locked(&self.shared.state).stage = Stage::Closed;
        self.shared.work.notify_all();
    }

    fn join(&self) {
        for thread in std::mem::take(&mut *locked(&self.threads)) {
            // Panics of the store were caught, so the thread's result says nothing.
            drop(thread.join());
        }
    }
}

impl<S: Store> Drop for Tier<S> {
    /// Waits for calls of the store that outlived their shutdown.
    fn drop(&mut self) {
        self.close();
        self.join();
    }
}

impl<S: Store> Shared<S> {
    fn run(&self) {
        let mut state = locked(&self.state);
        while state.stage == Stage::Open {
            let Some(job) = state.queue.take() else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let mut place = None;
            if job.kind.has_bytes() {
                place = state.regions.take(&job.page, &self.limits);
            }
            let (mut status, mut bytes) = (ErrorCode::INVALID_ARGUMENT.0, 0);
            if place.is_some() || !job.kind.has_bytes() {
                drop(state);
                (status, bytes) = self.guarded(&job, place.as_mut());
                state = locked(&self.state);
            }
            if let Some(place) = place {
                state.regions.give_back(&place);
                self.ended.notify_all();
            }
            let mut wakes = state.queue.finish(&job, status, bytes);
            if status == ErrorCode::PANICKED.0 && state.stage == Stage::Open {
                state.stage = Stage::Panicked;
                wakes = true;
                self.work.notify_all();
            }
            if wakes {
                drop(state);
                host().wake();
                state = locked(&self.state);
            }
        }
        state.running -= 1;
        self.ended.notify_all();
    }

    /// Calls the store, and turns the result into a status.
    fn guarded(&self, job: &Job, place: Option<&mut PageBytes>) -> (i32, u64) {
        // After a panic the store is never called again, so nothing sees what it left half done.
        match catch_unwind(AssertUnwindSafe(|| self.call(job, place))) {
            Ok(Ok(ended)) => ended,
            Ok(Err(error)) => {
                if ![ErrorCode::NO_RESOURCE, ErrorCode::INVALID_ARGUMENT].contains(&error.code) {
                    log!(Level::WARN, "a value could not be kept, read or removed: {error}");
                }
                // The error's code must be negative, and must not be `PANICKED`, which only a panic may give.
                let is_code = error.code.0 < 0 && error.code != ErrorCode::PANICKED;
                (if is_code { error.code.0 } else { ErrorCode::INTERNAL.0 }, 0)
            }
            Err(_panic) => {
                log!(Level::ERROR, "the store panicked; the tier takes no more calls");
                (ErrorCode::PANICKED.0, 0)
            }
        }
    }

    fn call(&self, job: &Job, place: Option<&mut PageBytes>) -> Result<(i32, u64)> {
        let key = &job.page.key;
        let length = u64::from(job.page.length);
        let known = |found: Option<u64>| found.map_or((MISSING, 0), |bytes| (FOUND, bytes));
        match (job.kind, place) {
            (Kind::Get, Some(place)) => {
                // SAFETY: the page is of a get, and has no completion before this call returned.
                let found = self.store.get(key, unsafe { place.bytes_mut() })?;
                Ok(if found { (FOUND, length) } else { (MISSING, 0) })
            }
            (Kind::Put, Some(place)) => {
                // SAFETY: the page is of a put, and has no completion before this call returned.
                self.store.put(key, unsafe { place.bytes() })?;
                Ok((STORED, length))
            }
            (Kind::Exists, _) => self.store.exists(key).map(known),
            (Kind::Delete, _) => self.store.delete(key).map(known),
            (Kind::Get | Kind::Put, None) => Ok((ErrorCode::INVALID_ARGUMENT.0, 0)),
        }
    }

    /// Waits until a deadline. False when `is_over` did not hold by then.
    fn wait(&self, patience: Duration, mut is_over: impl FnMut(&mut State) -> bool) -> bool {
        let begun = Instant::now();
        let mut state = locked(&self.state);
        loop {
            if is_over(&mut state) {
                return true;
            }
            let left = patience.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return false;
            }
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn only_key(key: &Key) -> TierPage {
    TierPage { key: *key, ..TierPage::default() }
}

impl<S: Store> StorageTier for Tier<S> {
    fn limits(&self) -> TierLimits {
        self.shared.limits.of_tier()
    }
    fn register(&self, memory: &Memory) -> Result<RegionId> {
        let mut state = locked(&self.shared.state);
        state.stage.check()?;
        state.regions.add(memory)
    }
    fn deregister(&self, region: RegionId) -> Result<()> {
        {
            let mut state = locked(&self.shared.state);
            // Memory can be deregistered after a panic, too.
            if state.stage == Stage::Closed {
                return state.stage.check();
            }
            if !state.regions.end(region) {
                let text = format!("no region has the id {}", region.0);
                return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
            }
        }
        let patience = Duration::from_secs(FENCE_SECONDS);
        if self.shared.wait(patience, |state| state.regions.remove_unused(region)) {
            return Ok(());
        }
        let text = format!("after {FENCE_SECONDS} seconds the store still uses region {}", region.0);
        Err(Error::new(ErrorCode::TIMEOUT, text))
    }
    fn exists(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.submit(Kind::Exists, tag, keys.iter().map(only_key))
    }
    fn get(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        self.submit(Kind::Get, tag, pages.iter().copied())
    }
    fn put(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        self.submit(Kind::Put, tag, pages.iter().copied())
    }
    fn delete(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.submit(Kind::Delete, tag, keys.iter().map(only_key))
    }
    fn poll(&self, completions: &mut [TierCompletion]) -> i32 {
        let mut state = self.hot();
        match state.stage {
            Stage::Open => state.queue.poll(completions),
            other => other.code(),
        }
    }
    fn cancel(&self, tag: Tag) -> i32 {
        let mut state = self.hot();
        if state.stage != Stage::Open {
            return state.stage.code();
        }
        let Some(wakes) = state.queue.cancel(tag) else { return ErrorCode::INVALID_ARGUMENT.0 };
        drop(state);
        if wakes {
            host().wake();
        }
        0
    }
    fn settled(&self, tag: Tag) -> i32 {
        let state = self.hot();
        match state.stage {
            Stage::Open => i32::from(state.queue.is_settled(tag)),
            other => other.code(),
        }
    }
    fn scan(&self, cursor: u64, keys: &mut [Key]) -> Result<Scanned> {
        locked(&self.shared.state).stage.check()?;
        let after = locked(&self.cursors).key(cursor)?;
        let count = self.shared.store.scan(after.as_ref(), keys)?.min(keys.len());
        let is_last = count < keys.len();
        let last = keys[..count].last().copied().or(after);
        let cursor = if is_last { 0 } else { locked(&self.cursors).behind(last) };
        Ok(Scanned { keys: u32::try_from(count).unwrap_or(u32::MAX), reserved: 0, cursor })
    }
    fn usage(&self) -> Result<TierUsage> {
        locked(&self.shared.state).stage.check()?;
        self.shared.store.usage()
    }
    fn event_fd(&self) -> i32 {
        WAKES
    }
    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.close();
        if !self.shared.wait(Duration::from_millis(deadline_ms), |state| state.running == 0) {
            let text = format!("after {deadline_ms} ms a call of the store still runs");
            return Err(Error::new(ErrorCode::TIMEOUT, text));
        }
        self.join();
        Ok(())
    }
}
