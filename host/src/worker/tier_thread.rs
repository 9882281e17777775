//! The thread below the pool: copies between the ranks' pools and host memory, and the plugins that store pages.
//!
//! It carries [`TierAction`]s out for all ranks of the worker, so that a page has ended when it has on every rank and
//! nothing has to be agreed upon. Host memory lies page by page in the order head, layer, K/V, token, dimension,
//! whatever the pool's layout is. A storage tier holds one object per page and KV head of the model, so workers of any
//! number of ranks share objects; a head that several ranks hold is written by the first of them and read by all.
//!
//! Copies are made here, one after the other. Reads and writes are the plugins', many at a time.

mod host_memory;
mod objects;
mod seal;
mod store;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use host_core::Event;
use host_core::hierarchy::{Direction, PageEnd, TierAction, TierEvent};
use host_core::layout::KvShape;
use host_plugin_api::StorageTier;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::sync::mpsc;

use super::{Alive, Input};
use crate::executor::KvMemory;
use host_memory::HostMemory;
use store::Store;

/// Sleep while a plugin has no descriptor to wait on, or is full.
const SHORT_WAIT: Duration = Duration::from_millis(1);
/// Sleep otherwise; a lost wake-up costs this much.
const LONG_WAIT: Duration = Duration::from_millis(500);
/// Milliseconds that a plugin may take to stop.
const SHUTDOWN_MS: u64 = 3_000;

/// What lies below a worker's pool.
pub struct Below {
    /// The storage plugins' names and instances, in the order in which the core numbers them.
    pub tiers: Vec<(String, Arc<dyn StorageTier>)>,
}

/// Bytes that one page takes in the host memory of a rank with this shape, with storage below it or without.
#[must_use]
pub fn slot_bytes(shape: &KvShape, stored: bool) -> usize {
    shape.heads * host_memory::head_bytes(shape, stored.then_some(1))
}

/// Actions on their way. Holds at most what the core's limits let be under way.
pub(super) struct Inbox(Arc<InboxState>);

struct InboxState {
    commands: Mutex<VecDeque<Option<TierAction>>>,
    wake: OwnedFd,
}

impl Inbox {
    pub(super) fn push(&self, action: TierAction) {
        self.send(Some(action));
    }

    fn send(&self, command: Option<TierAction>) {
        self.0.commands.lock().unwrap_or_else(PoisonError::into_inner).push_back(command);
        // A full counter is a wake-up that is already there.
        let _full = rustix::io::write(&self.0.wake, &1u64.to_ne_bytes()).is_err();
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.send(None);
    }
}

pub(super) struct Start {
    /// First, so that this thread's end is told before those that follow from it.
    #[expect(dead_code, reason = "held for its drop")]
    pub alive: Alive,
    pub below: Below,
    /// Slots of host memory.
    pub slots: u32,
    /// The ranks' pools.
    pub pools: Vec<KvMemory>,
    /// KV heads of the model.
    pub kv_heads: usize,
    pub inputs: mpsc::Sender<Input>,
}

pub(super) fn start(start: Start) -> anyhow::Result<(Inbox, JoinHandle<()>)> {
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let inbox = Arc::new(InboxState { commands: Mutex::new(VecDeque::new()), wake });
    let alignment = start.below.tiers.iter().map(|(_, tier)| tier.limits().alignment).max();
    let alignment = alignment.map(usize::try_from).transpose()?;
    let memory = HostMemory::new(&start.pools, start.slots as usize, start.kv_heads, alignment)?;
    let stores: anyhow::Result<Vec<Store>> =
        start.below.tiers.iter().map(|(name, tier)| Store::open(name, tier.clone(), &memory)).collect();
    let stores = stores?;
    let state = inbox.clone();
    let thread = std::thread::Builder::new().name("tiers".into()).spawn(move || {
        Thread { start, memory, stores }.run(&state);
    })?;
    Ok((Inbox(inbox), thread))
}

struct Thread {
    start: Start,
    memory: HostMemory,
    stores: Vec<Store>,
}

impl Thread {
    fn run(mut self, inbox: &InboxState) {
        let mut events = Vec::new();
        loop {
            let commands =
                std::mem::take(&mut *inbox.commands.lock().unwrap_or_else(PoisonError::into_inner));
            let mut busy = !commands.is_empty();
            for command in commands {
                match command {
                    Some(action) => self.carry_out(action, &mut events),
                    None => return self.stop(),
                }
            }
            for store in &mut self.stores {
                busy |= store.turn(&self.memory, &mut events);
            }
            for event in events.drain(..) {
                if self.start.inputs.blocking_send(Input::Event(Event::Tier(event))).is_err() {
                    return self.stop();
                }
            }
            if !busy {
                self.sleep(inbox);
            }
        }
    }

    fn carry_out(&mut self, action: TierAction, events: &mut Vec<TierEvent>) {
        match action {
            TierAction::Copy { tag, direction, pages } => {
                let end = match self.memory.copy(direction == Direction::Load, &pages) {
                    Ok(()) => PageEnd::Done,
                    Err(error) => {
                        tracing::error!(%error, "pages could not be copied between the pool and host memory");
                        PageEnd::Failed
                    }
                };
                let pages = (0..).zip(&pages).map(|(place, _)| (place, end)).collect();
                events.push(TierEvent::Ended { tag, pages });
            }
            TierAction::Query { tag, tier, names } => match self.stores.get_mut(tier) {
                Some(store) => store.ask(tag, &names, &self.memory),
                None => events.push(TierEvent::Answered { tag, found: vec![false; names.len()] }),
            },
            TierAction::Read { tag, tier, pages } | TierAction::Write { tag, tier, pages }
                if tier >= self.stores.len() =>
            {
                let pages = (0..).zip(&pages).map(|(place, _)| (place, PageEnd::Failed)).collect();
                events.push(TierEvent::Ended { tag, pages });
            }
            TierAction::Read { tag, tier, pages } => self.stores[tier].read(tag, &pages, &self.memory),
            TierAction::Write { tag, tier, pages } => self.stores[tier].write(tag, &pages, &self.memory),
            TierAction::Cancel { tag, tier } => {
                if let Some(store) = self.stores.get_mut(tier) {
                    store.cancel(tag, events);
                }
            }
        }
    }

    fn sleep(&self, inbox: &InboxState) {
        let fds = self.stores.iter().filter_map(Store::event_fd);
        let mut waits: Vec<PollFd<'_>> = std::iter::once(inbox.wake.as_fd())
            .chain(fds)
            .map(|fd: BorrowedFd<'_>| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let short = self.stores.iter().any(Store::wants_polling);
        let wait = if short { SHORT_WAIT } else { LONG_WAIT };
        let timeout = rustix::fs::Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        // Whatever woke it up: the next turn looks at everything.
        let _interrupted = poll(&mut waits, Some(&timeout)).is_err();
        let mut count = [0; 8];
        let _empty = rustix::io::read(&inbox.wake, &mut count).is_err();
    }

    /// Ends the plugins. Memory that one of them may still touch stays mapped.
    fn stop(self) {
        let mut stopped = true;
        for store in &self.stores {
            stopped &= store.shutdown(SHUTDOWN_MS);
        }
        if !stopped {
            std::mem::forget(self.memory);
        }
    }
}
