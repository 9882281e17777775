//! The pages in the workers' caches, as far as the router knows them, and the work of requests under way.
//!
//! One index holds the pages of all workers, prefill and decode alike, because the names of pages are the same on both.
//! Two accounts hold the work, one for computing prompts and one for answers, because the cost of a request differs
//! between both.

use std::collections::VecDeque;
use std::ops::Add;
use std::time::Duration;

use super::{
    Applied, BlockKey, Cost, KvEvent, Placement, PrefixIndex, Prompt, Sessions, SnapshotPart, Weights,
    WorkerSlot,
};
use crate::ids::{Instance, Room};
use crate::radix::PageHash;
use crate::scheduler::Role;

/// After a request has ended, its pages count as on their way for this long: the worker's events need a moment.
const SETTLE: Duration = Duration::from_secs(1);
/// Tokens for which each request in a decode worker's queue counts, beside its work on the account. It waits because
/// the worker has no pages for it, and the next request would wait, too.
const QUEUED: f64 = 1024.0;

/// The names of a prompt's whole pages on workers of one identity.
#[derive(Clone, Debug)]
pub struct Chain {
    /// Digest of the workers' KV identity.
    pub identity: PageHash,
    /// The names, in order.
    pub keys: Vec<BlockKey>,
}

/// Counters since start, and present sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Different pages that some worker has.
    pub pages: usize,
    /// Sessions whose workers are remembered.
    pub sessions: usize,
    /// Events applied.
    pub events: u64,
    /// Times that events were missing.
    pub gaps: u64,
    /// Snapshots taken whole.
    pub snapshots: u64,
}

/// The facts about a worker that the accounts need.
#[derive(Clone, Copy, Debug)]
pub struct WorkerFacts {
    /// Its slot in the index.
    pub slot: WorkerSlot,
    /// The worker's role.
    pub role: Role,
    /// The identity of its cache, or `None` when it has none that can be followed.
    pub cache: Option<PageHash>,
    /// Requests that other routers have on it.
    pub elsewhere: u32,
    /// Requests in its queue.
    pub queued: u32,
    /// Tokens in its pages.
    pub page_tokens: u32,
    /// Whether the worker served the last request of the session.
    pub stays: bool,
}

/// The tokens of a prompt that each worker has.
#[derive(Debug, Default)]
pub struct Sight<'a> {
    tokens: u64,
    chains: Vec<(&'a Chain, Vec<u32>)>,
}

/// The index and the accounts of one router (see the module). `T` is a point in time of the router's clock.
#[derive(Debug)]
pub struct Accounts<T> {
    index: PrefixIndex,
    prompts: Placement,
    answers: Placement,
    /// Which workers served which session.
    sessions: Sessions,
    /// Ended requests that still count as bringing pages, oldest first.
    settling: VecDeque<(T, Room)>,
    counts: CacheCounts,
}

impl<T: Copy + Ord + Add<Duration, Output = T>> Default for Accounts<T> {
    fn default() -> Self {
        Self {
            index: PrefixIndex::default(),
            prompts: Placement::new(Weights::PROMPTS),
            answers: Placement::new(Weights::ANSWERS),
            sessions: Sessions::default(),
            settling: VecDeque::new(),
            counts: CacheCounts::default(),
        }
    }
}

impl<T: Copy + Ord + Add<Duration, Output = T>> Accounts<T> {
    /// Adds a worker with so many pages.
    pub fn add_worker(&mut self, pages: u32) -> WorkerSlot {
        self.index.add_worker(u64::from(pages))
    }

    /// Removes a worker, with its pages and its work.
    pub fn remove_worker(&mut self, slot: WorkerSlot) {
        self.index.remove_worker(slot);
        self.prompts.remove_worker(slot);
        self.answers.remove_worker(slot);
    }

    /// The number of the event after which the router must follow a worker.
    pub fn resume(&mut self, slot: WorkerSlot) -> u64 {
        self.index.resume(slot).unwrap_or(0)
    }

    /// Forgets the pages of a worker that cannot be reached.
    pub fn forget(&mut self, slot: WorkerSlot) {
        self.index.forget(slot);
    }

    /// Pages that a worker is known to have.
    #[must_use]
    pub fn pages(&self, slot: WorkerSlot) -> u64 {
        self.index.blocks(slot)
    }

    /// The counters and present sizes.
    #[must_use]
    pub fn counts(&self) -> CacheCounts {
        CacheCounts { pages: self.index.len(), sessions: self.sessions.len(), ..self.counts }
    }

    /// Takes in events of a worker, the first of which has this number.
    pub fn hear(&mut self, slot: WorkerSlot, first: u64, events: &[KvEvent]) -> Applied {
        let mut heard = Applied::Yes;
        for (before, event) in (0..).zip(events) {
            heard = self.index.apply(slot, first.saturating_add(before), event);
            self.counts.events += u64::from(heard == Applied::Yes);
            if !matches!(heard, Applied::Yes | Applied::Repeat) {
                break;
            }
        }
        self.counts.gaps += u64::from(heard == Applied::Gap);
        heard
    }

    /// Takes in a part of a worker's snapshot.
    pub fn hear_part(&mut self, slot: WorkerSlot, part: &SnapshotPart) -> Applied {
        let heard = self.index.take(slot, part);
        self.counts.snapshots += u64::from(heard == Applied::Yes && part.last);
        self.counts.gaps += u64::from(heard == Applied::Gap);
        heard
    }

    /// Looks a prompt up in all caches.
    pub fn look<'a>(&mut self, tokens: u64, chains: &'a [Chain], now: T) -> Sight<'a> {
        self.settle(now);
        let chains = chains.iter().map(|chain| (chain, self.index.matches(&chain.keys))).collect();
        Sight { tokens, chains }
    }

    /// The cost of a request at a worker.
    #[must_use]
    pub fn cost(&self, place: &WorkerFacts, sight: &Sight<'_>) -> Cost {
        let (prompt, held) = seen(place, sight);
        let (account, queued) = match place.role {
            Role::Decode => (&self.answers, f64::from(place.queued) * QUEUED),
            Role::Prefill | Role::Aggregated => (&self.prompts, 0.0),
        };
        let elsewhere = f64::from(place.elsewhere) * account.typical() + queued;
        account.cost(place.slot, &prompt, held, elsewhere, place.stays)
    }

    /// Writes a request to a worker's account. Returns the tokens of its prompt that the worker is expected to have.
    pub fn give(&mut self, room: Room, place: &WorkerFacts, sight: &Sight<'_>) -> u64 {
        let cost = self.cost(place, sight);
        let (prompt, _) = seen(place, sight);
        match place.role {
            Role::Decode => self.answers.give(room, place.slot, &prompt, &cost),
            Role::Prefill | Role::Aggregated => self.prompts.give(room, place.slot, &prompt, &cost),
        }
        u64::from(cost.blocks) * u64::from(place.page_tokens)
    }

    /// Takes note that a request's prompt was computed.
    pub fn computed(&mut self, room: Room) {
        self.prompts.done(room);
    }

    /// Takes note that a request's answer is complete.
    pub fn answered(&mut self, room: Room) {
        self.prompts.done(room);
        self.answers.done(room);
    }

    /// Takes note that a request's answer has no worker.
    pub fn not_answered(&mut self, room: Room) {
        self.answers.end(room);
    }

    /// Takes note that a request has left its workers, with or without success.
    pub fn ended(&mut self, room: Room, now: T) {
        self.answered(room);
        // Here too, because `look` is not called where routes are chosen without the caches.
        self.settle(now);
        self.settling.push_back((now + SETTLE, room));
    }

    /// Takes requests off the accounts, once the workers' events have had time to name their pages.
    fn settle(&mut self, now: T) {
        while let Some((_, room)) = self.settling.pop_front_if(|(at, _)| *at <= now) {
            self.prompts.end(room);
            self.answers.end(room);
        }
    }

    /// Ended requests that are still on the accounts.
    #[must_use]
    pub fn settling(&self) -> usize {
        self.settling.len()
    }

    /// Whether a worker served the last request of a session.
    #[must_use]
    pub fn was_at(&self, session: u64, worker: Instance) -> bool {
        self.sessions.was_at(session, worker)
    }

    /// Notes which workers serve a session.
    pub fn remember(&mut self, session: u64, prefill: Option<Instance>, decode: Instance) {
        self.sessions.remember(session, prefill, decode);
    }
}

fn seen<'a>(place: &WorkerFacts, sight: &Sight<'a>) -> (Prompt<'a>, u32) {
    let chain = sight.chains.iter().find(|(chain, _)| Some(chain.identity) == place.cache);
    let held = chain.and_then(|(_, held)| held.get(usize::from(place.slot.0)).copied());
    let blocks = chain.map_or(&[][..], |(chain, _)| &chain.keys);
    let prompt = Prompt { blocks, tokens: sight.tokens, block_tokens: u64::from(place.page_tokens) };
    (prompt, held.unwrap_or(0))
}
