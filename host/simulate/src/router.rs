//! The router: which workers a request goes to.
//!
//! What a worker would cost is the core's ([`Placement::cost`]), from caches that the core's index follows. The rule over these
//! costs is `host_front`'s: the least cost, equals in turn, prefill and decode worker each for itself, because every pair of a
//! cluster's workers may work together. Accounts are closed a second after a request's end.

use std::collections::VecDeque;
use std::time::Duration;

use host_core::radix::{CacheEvent, PageHash};
use host_core::routing::{BlockKey, EventLog, Placement, PrefixIndex, Prompt, Replay, Weights, WorkerSlot};
use host_core::{Room, Time};

use crate::cluster::{Policy, Role};

/// After a request has ended, its pages count as on their way for this long.
const SETTLE: Duration = Duration::from_secs(1);
/// What each request in a decode worker's queue counts for beside its place on the account.
const QUEUED: f64 = 1024.0;
/// Changes of about so many pages are remembered until they are applied, which happens at once.
const REMEMBERED: usize = 1 << 16;

struct Worker {
    role: Role,
    slot: WorkerSlot,
    /// Names its pages; none of a worker without a cache.
    log: Option<EventLog>,
    /// Requests in its queue, as it has last said.
    queued: usize,
    /// When it was last chosen.
    last_pick: u64,
}

/// A request that is to be placed.
pub(crate) struct Wanted<'a> {
    /// Names it on the accounts.
    pub room: Room,
    /// The keys of its prompt's whole pages.
    pub keys: &'a [BlockKey],
    /// Tokens of its prompt.
    pub tokens: u64,
}

/// A request's workers, by place.
pub(crate) struct Route {
    /// Computes the prompt, if another worker answers.
    pub prefill: Option<usize>,
    /// Answers.
    pub answers: usize,
}

pub(crate) struct Router {
    policy: Policy,
    page_tokens: u32,
    index: PrefixIndex,
    prompts: Placement,
    answers: Placement,
    workers: Vec<Worker>,
    settling: VecDeque<(Time, Room)>,
    picks: u64,
}

impl Router {
    pub(crate) fn new(policy: Policy, page_tokens: u32) -> Self {
        Self {
            policy,
            page_tokens,
            index: PrefixIndex::default(),
            prompts: Placement::new(Weights::PROMPTS),
            answers: Placement::new(Weights::ANSWERS),
            workers: Vec::new(),
            settling: VecDeque::new(),
            picks: 0,
        }
    }

    /// Adds a worker at the next place, with a cache of so many pages.
    pub(crate) fn add(&mut self, role: Role, pages: u32, cached: bool) {
        self.workers.push(Worker {
            role,
            slot: self.index.add_worker(u64::from(pages)),
            log: (cached && self.looks()).then(|| EventLog::new(pages, self.page_tokens, REMEMBERED)),
            queued: 0,
            last_pick: 0,
        });
    }

    /// Whether routes depend on what workers have cached.
    pub(crate) fn looks(&self) -> bool {
        self.policy == Policy::Prefix
    }

    /// A worker says how many requests wait in its queue.
    pub(crate) fn hear(&mut self, place: usize, queued: usize) {
        self.workers[place].queued = queued;
    }

    /// A worker's cache has changed.
    pub(crate) fn cache_changed(&mut self, place: usize, changes: &[CacheEvent]) {
        let worker = &mut self.workers[place];
        let Some(log) = &mut worker.log else { return };
        let mut followed = log.last();
        changes.iter().for_each(|change| log.record(change));
        while followed < log.last() {
            match log.after(followed) {
                Replay::Events(events) => {
                    for event in &events {
                        followed += 1;
                        self.index.apply(worker.slot, followed, event);
                    }
                }
                Replay::Forgotten => {
                    let snapshot = log.snapshot();
                    snapshot.parts().iter().for_each(|part| _ = self.index.take(worker.slot, part));
                    followed = snapshot.number;
                }
            }
        }
    }

    /// Chooses workers, and writes the request to their accounts.
    pub(crate) fn route(&mut self, now: Time, wanted: &Wanted<'_>) -> Route {
        self.settle(now);
        let held = if self.looks() { self.index.matches(wanted.keys) } else { Vec::new() };
        self.picks += 1;
        let pick = |router: &Self, role| router.cheapest(role, wanted, &held);
        let prefill = pick(self, Role::Prefill);
        let answers = pick(self, Role::Decode).or_else(|| pick(self, Role::Aggregated));
        let Some(answers) = answers else { unreachable!("a checked cluster has a worker that answers") };
        for place in prefill.into_iter().chain([answers]) {
            self.give(place, wanted, &held);
        }
        Route { prefill, answers }
    }

    fn cheapest(&self, role: Role, wanted: &Wanted<'_>, held: &[u32]) -> Option<usize> {
        let of_role = (0..).zip(&self.workers).filter(|(_, worker)| worker.role == role);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "tokens, rounded down")]
        let cost = |worker: &Worker| match self.policy {
            Policy::Prefix => self.cost(worker, wanted, held).tokens as u64,
            Policy::RoundRobin => 0,
        };
        of_role.min_by_key(|(_, worker)| (cost(worker), worker.last_pick)).map(|(place, _)| place)
    }

    fn prompt<'a>(&self, worker: &Worker, wanted: &Wanted<'a>) -> Prompt<'a> {
        let blocks = if worker.log.is_some() { wanted.keys } else { &[] };
        Prompt { blocks, tokens: wanted.tokens, block_tokens: u64::from(self.page_tokens) }
    }

    fn cost(&self, worker: &Worker, wanted: &Wanted<'_>, held: &[u32]) -> host_core::routing::Cost {
        let held = held.get(usize::from(worker.slot.0)).copied().unwrap_or(0);
        let (account, queued) = match worker.role {
            Role::Decode => (&self.answers, worker.queued as f64 * QUEUED),
            Role::Prefill | Role::Aggregated => (&self.prompts, 0.0),
        };
        account.cost(worker.slot, &self.prompt(worker, wanted), held, queued, false)
    }

    fn give(&mut self, place: usize, wanted: &Wanted<'_>, held: &[u32]) {
        self.workers[place].last_pick = self.picks;
        if !self.looks() {
            return;
        }
        let worker = &self.workers[place];
        let (slot, cost) = (worker.slot, self.cost(worker, wanted, held));
        let prompt = self.prompt(worker, wanted);
        match worker.role {
            Role::Decode => self.answers.give(wanted.room, slot, &prompt, &cost),
            Role::Prefill | Role::Aggregated => self.prompts.give(wanted.room, slot, &prompt, &cost),
        }
    }

    /// A prompt was computed.
    pub(crate) fn computed(&mut self, room: Room) {
        self.prompts.done(room);
    }

    /// A request has left its workers.
    pub(crate) fn ended(&mut self, now: Time, room: Room) {
        self.prompts.done(room);
        self.answers.done(room);
        self.settling.push_back((now.after(SETTLE), room));
    }

    fn settle(&mut self, now: Time) {
        while let Some((_, room)) = self.settling.pop_front_if(|(at, _)| *at <= now) {
            self.prompts.end(room);
            self.answers.end(room);
        }
    }
}

/// Where the chain of a worker's page names starts: all requests of a simulation are of one namespace.
pub(crate) fn chain_seed() -> PageHash {
    PageHash([0; 32]).namespace(&host_core::radix::NamespaceKey::default())
}
