//! Batches between the threads of the host and of the tier: slots, and room for every completion, allocated once.
//!
//! `tests/shuttle` compiles this file, and what it needs, with shuttle's locks. That is why its modules are named by their paths.

#[path = "queue/batch.rs"]
mod batch;
#[path = "queue/state.rs"]
mod state;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Key, Memory, RegionId, Result, Tag, TierCompletion, TierPage};

pub use batch::{Claimed, Ended, Kind};
use parking_lot::{Condvar, Mutex, MutexGuard};
use state::State;

use crate::metrics::Metrics;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::waker::{Waker, clear, new_event, signal};

/// Bytes that one claim takes at most, unless one page is longer. They go to disk as one write. With 1 MiB, waking up costs a
/// quarter of all processor time.
pub const CLAIM_BYTES: u64 = 4 << 20;
/// The same for a batch that is the only one: all threads share it, and check some pages while others are still being read.
const LONE_BYTES: u64 = 1 << 20;
/// Pages that one claim takes at most.
const CLAIM_PAGES: usize = 256;
/// How long a region's last pages may take to end.
const DEREGISTER_PATIENCE: Duration = Duration::from_secs(30);

/// The slots of batches and their completions. Its lock is held for microseconds, never across a read or write of a file.
pub struct Queue {
    state: Mutex<State>,
    work: Condvar,
    released: Condvar,
    /// One per thread that waits for its own descriptor. Empty when threads wait for `work`.
    wakers: Vec<Waker>,
    /// Readable while completions wait.
    event: OwnedFd,
    /// Regions that were deregistered since the start.
    regions_gone: AtomicU64,
    max_pages: usize,
    max_value: u64,
    metrics: Metrics,
}

impl Queue {
    pub fn new(
        max_batches: u32,
        max_pages: u32,
        max_value: u64,
        wakers: usize,
        metrics: Metrics,
    ) -> Result<Self> {
        Ok(Self {
            state: Mutex::new(State::new(max_batches, max_pages)),
            work: Condvar::new(),
            released: Condvar::new(),
            wakers: (0..wakers).map(|_| Waker::new()).collect::<Result<_>>()?,
            event: new_event()?,
            regions_gone: AtomicU64::new(0),
            max_pages: max_pages as usize,
            max_value,
            metrics,
        })
    }

    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    pub fn waker(&self, thread: usize) -> Option<&Waker> {
        self.wakers.get(thread)
    }

    fn wake(&self, many: bool) {
        match self.wakers.as_slice() {
            [] if many => drop(self.work.notify_all()),
            [] => drop(self.work.notify_one()),
            wakers => wakers.iter().for_each(Waker::wake),
        }
    }

    /// Accepts a batch. **Hot.**
    pub fn push(&self, kind: Kind, tag: Tag, count: usize, pages: impl Iterator<Item = TierPage>) -> i32 {
        let mut state = self.state.lock();
        if state.closed {
            return ErrorCode::CLOSED.0;
        }
        if count == 0 || count > self.max_pages {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        let Some(slot) = state.free.pop() else {
            self.metrics.would_block.add(1);
            return ErrorCode::WOULD_BLOCK.0;
        };
        let of = &mut state.slots[slot as usize];
        of.pages.clear();
        of.pages.extend(pages);
        of.kind = kind;
        of.tag = tag;
        of.next = 0;
        of.unfinished = count as u32;
        of.unpolled = count as u32;
        of.cancelled = false;
        state.lines[kind.line()].batches.push_back(slot);
        drop(state);
        self.metrics.pages_waiting.add(count as u64);
        self.wake(count > 1);
        0
    }

    /// As [`push`](Self::push), of keys.
    pub fn push_keys(&self, kind: Kind, tag: Tag, keys: &[Key]) -> i32 {
        self.push(kind, tag, keys.len(), keys.iter().map(|key| TierPage { key: *key, ..TierPage::default() }))
    }

    /// Takes pages to work on into `claim`: only gets, only puts, or only pages without data. False when there are
    /// none. `data` says whether gets and puts are wanted.
    pub fn claim(&self, data: bool, claim: &mut Vec<Claimed>) -> bool {
        let mut state = self.state.lock();
        self.claim_locked(&mut state, data, claim)
    }

    /// As [`claim`](Self::claim), but waits for pages. False when the queue was closed.
    pub fn wait_claim(&self, claim: &mut Vec<Claimed>) -> bool {
        let mut state = self.state.lock();
        loop {
            if self.claim_locked(&mut state, true, claim) {
                return true;
            }
            if state.closed {
                return false;
            }
            self.work.wait(&mut state);
        }
    }

    fn claim_locked(&self, state: &mut State, data: bool, claim: &mut Vec<Claimed>) -> bool {
        claim.clear();
        if state.closed {
            return false;
        }
        // Restores go before stores, but every fifth claim looks at the puts first.
        let order: &[usize] = match (data, state.gets < 4) {
            (false, _) => &[0],
            (true, true) => &[0, 1, 2],
            (true, false) => &[0, 2, 1],
        };
        let mut refused = false;
        for &line in order {
            let is_lone = state.slots.len() - state.free.len() <= 1;
            let most = if is_lone { LONE_BYTES } else { CLAIM_BYTES };
            let mut bytes = 0;
            while claim.len() < CLAIM_PAGES
                && let Some((slot, page)) = state.next_page(line, claim.is_empty(), most - bytes)
            {
                let of = &state.slots[slot as usize];
                let (kind, what) = (of.kind, of.pages[page as usize]);
                let mut claimed = Claimed { kind, slot, page, what, span: None };
                if line > 0 {
                    claimed.span = state.regions.claim(&what, self.max_value);
                    if claimed.span.is_none() {
                        state.finish(slot, page, ErrorCode::INVALID_ARGUMENT.0, 0);
                        self.metrics.pages_waiting.sub(1);
                        if kind == Kind::Put {
                            self.metrics.refused(ErrorCode::INVALID_ARGUMENT);
                        }
                        refused = true;
                        continue;
                    }
                    bytes = most.min(bytes + u64::from(what.length));
                }
                claim.push(claimed);
            }
            if !claim.is_empty() {
                state.gets = if line == 1 { state.gets + 1 } else { 0 };
                break;
            }
        }
        if refused {
            signal(&self.event);
        }
        !claim.is_empty()
    }

    /// Gives a page back for later. [`unpark`](Self::unpark) makes it available again.
    pub fn park(&self, page: &Claimed) {
        let mut state = self.state.lock();
        if page.span.is_some() {
            state.regions.release(page.what.region.0);
            self.released.notify_all();
        }
        if state.slots[page.slot as usize].cancelled || state.closed {
            state.finish(page.slot, page.page, ErrorCode::CANCELLED.0, 0);
            self.metrics.pages_waiting.sub(1);
            if page.kind == Kind::Put {
                self.metrics.refused(ErrorCode::CANCELLED);
            }
            signal(&self.event);
        } else {
            state.parked.push_back((page.slot, page.page));
        }
    }

    /// Makes pages that were given back available to claims again.
    pub fn unpark(&self) {
        let mut state = self.state.lock();
        if state.parked.is_empty() {
            return;
        }
        while let Some((slot, page)) = state.parked.pop_front() {
            let line = state.slots[slot as usize].kind.line();
            state.lines[line].again.push_back((slot, page));
        }
        drop(state);
        self.wake(true);
    }

    /// Ends these pages, of which none touches memory any more.
    pub fn finish(&self, ended: &[Ended]) {
        if ended.is_empty() {
            return;
        }
        self.metrics.pages_waiting.sub(ended.len() as u64);
        let mut state = self.state.lock();
        let quiet = state.done.is_empty();
        let mut released = false;
        for Ended { page, status, bytes } in ended {
            if page.span.is_some() {
                state.regions.release(page.what.region.0);
                released = true;
            }
            state.finish(page.slot, page.page, *status, *bytes);
        }
        if quiet {
            signal(&self.event);
        }
        drop(state);
        if released {
            self.released.notify_all();
        }
    }

    /// Moves completions out. **Hot.**
    pub fn poll(&self, completions: &mut [TierCompletion]) -> i32 {
        let mut state = self.state.lock();
        if state.closed {
            return ErrorCode::CLOSED.0;
        }
        let mut taken = 0;
        while taken < completions.len()
            && let Some((slot, completion)) = state.done.pop_front()
        {
            completions[taken] = completion;
            taken += 1;
            let of = &mut state.slots[slot as usize];
            of.unpolled -= 1;
            if of.unpolled == 0 {
                state.free.push(slot);
            }
        }
        if taken > 0 && state.done.is_empty() {
            clear(&self.event);
        }
        taken as i32
    }

    /// Ends the pages of the batch that no thread has claimed.
    pub fn cancel(&self, tag: Tag) -> i32 {
        let mut state = self.state.lock();
        if state.closed {
            return ErrorCode::CLOSED.0;
        }
        let mut answer = ErrorCode::INVALID_ARGUMENT.0;
        let State { slots, lines, parked, done, .. } = &mut *state;
        for (number, slot) in slots.iter_mut().enumerate() {
            if slot.unfinished == 0 || slot.tag != tag {
                continue;
            }
            answer = 0;
            slot.cancelled = true;
            let (number, kind) = (number as u32, slot.kind);
            let mut end = |page: u32| {
                slot.unfinished -= 1;
                let completion = TierCompletion { tag, page, status: ErrorCode::CANCELLED.0, bytes: 0 };
                done.push_back((number, completion));
                self.metrics.pages_waiting.sub(1);
                if kind == Kind::Put {
                    self.metrics.refused(ErrorCode::CANCELLED);
                }
            };
            (slot.next..slot.pages.len() as u32).for_each(&mut end);
            slot.next = slot.pages.len() as u32;
            let line = &mut lines[kind.line()];
            line.batches.retain(|batch| *batch != number);
            for waiting in [&mut line.again, &mut *parked] {
                waiting.retain(|(of, page)| {
                    let ends = *of == number;
                    if ends {
                        end(*page);
                    }
                    !ends
                });
            }
        }
        if !done.is_empty() {
            signal(&self.event);
        }
        answer
    }

    /// Whether nothing of the batch touches memory. **Hot.**
    pub fn settled(&self, tag: Tag) -> i32 {
        let state = self.state.lock();
        if state.closed {
            return ErrorCode::CLOSED.0;
        }
        i32::from(!state.slots.iter().any(|slot| slot.unfinished > 0 && slot.tag == tag))
    }

    pub fn register(&self, memory: &Memory) -> Result<RegionId> {
        let mut state = self.open_state()?;
        state.regions.register(memory)
    }

    pub fn deregister(&self, region: RegionId) -> Result<()> {
        let mut state = self.open_state()?;
        state.regions.close(region)?;
        let deadline = Instant::now() + DEREGISTER_PATIENCE;
        while !state.regions.remove(region) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let text = "reads or writes of the region have not ended in 30 s: the storage hangs";
                return Err(Error::new(ErrorCode::TIMEOUT, text));
            }
            let _timed_out = self.released.wait_for(&mut state, left);
        }
        drop(state);
        self.regions_gone.fetch_add(1, Ordering::SeqCst);
        // Wakes threads that have the region pinned, so that they unpin it.
        self.wake(true);
        Ok(())
    }

    pub fn regions_gone(&self) -> u64 {
        self.regions_gone.load(Ordering::SeqCst)
    }

    pub fn has_region(&self, region: u32) -> bool {
        self.state.lock().regions.has(region)
    }

    fn open_state(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.state.lock();
        if state.closed {
            Err(Error::new(ErrorCode::CLOSED, "the instance was shut down"))
        } else {
            Ok(state)
        }
    }

    pub fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// Answers every later call with `CLOSED`, and lets the threads end after their current work.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let left: u32 = state.slots.iter().map(|slot| slot.pages.len() as u32 - slot.next).sum();
        let waiting = left as usize + state.parked.len();
        let waiting = waiting + state.lines.iter().map(|line| line.again.len()).sum::<usize>();
        for slot in &mut state.slots {
            slot.next = slot.pages.len() as u32;
        }
        state.parked.clear();
        state.lines.iter_mut().for_each(|line| line.again.clear());
        drop(state);
        self.metrics.pages_waiting.sub(waiting as u64);
        self.wakers.iter().for_each(|waker| signal(&waker.fd));
        self.work.notify_all();
    }
}
