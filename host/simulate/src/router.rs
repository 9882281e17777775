//! The router: it chooses the workers for each request.
//!
//! Costs, accounts and the rule over them are the core's ([`Accounts`], [`choose`]). They get each worker's cache events
//! at once. This module keeps the list of workers.

pub(crate) mod names;

use host_core::radix::{CacheEvent, PageHash};
use host_core::routing::{
    Accounts, BlockKey, Chain, Choice, Preference, Reported, Sight, WorkerFacts, WorkerSlot, choose,
};
use host_core::{Instance, Room, Time};

use crate::cluster::{Policy, Role};
use names::Names;

/// All workers of a simulation have one KV identity.
const IDENTITY: PageHash = PageHash([0; 32]);

struct Worker {
    slot: WorkerSlot,
    role: host_core::Role,
    pages: u32,
    /// Names its pages. `None` for a worker without a cache, and where routes do not depend on caches.
    names: Option<Names>,
    /// The number of cache changes that it has reported.
    told: u64,
    /// Requests in its queue, as it last reported.
    queued: u32,
    /// The number of the route by which it was last chosen.
    last_pick: u64,
}

/// A request that is to be placed.
pub(crate) struct Wanted {
    /// Identifies the request in the accounts.
    pub room: Room,
    /// The keys of its prompt's whole pages.
    pub keys: Vec<BlockKey>,
    /// Tokens of its prompt.
    pub tokens: u64,
    /// Workers that took part in a failed try. They are chosen only if there is no other.
    pub avoid: Vec<usize>,
}

pub(crate) struct Router {
    policy: Policy,
    page_tokens: u32,
    accounts: Accounts<Time>,
    workers: Vec<Worker>,
    /// Places of the workers of each role: prefill, decode, aggregated.
    places: [Vec<usize>; 3],
    picks: u64,
}

impl Router {
    pub(crate) fn new(policy: Policy, page_tokens: u32) -> Self {
        let (accounts, workers, places) = (Accounts::default(), Vec::new(), <[Vec<usize>; 3]>::default());
        Self { policy, page_tokens, accounts, workers, places, picks: 0 }
    }

    /// Adds a worker at the next place, with a cache of so many pages.
    pub(crate) fn add(&mut self, role: Role, pages: u32, cached: bool) {
        let (role, list) = match role {
            Role::Prefill => (host_core::Role::Prefill, 0),
            Role::Decode => (host_core::Role::Decode, 1),
            Role::Aggregated => (host_core::Role::Aggregated, 2),
        };
        self.places[list].push(self.workers.len());
        self.workers.push(Worker {
            slot: self.accounts.add_worker(pages),
            role,
            pages,
            names: (cached && self.looks()).then(|| Names::new(pages, self.page_tokens)),
            told: 0,
            queued: 0,
            last_pick: 0,
        });
    }

    /// Records that a new process has taken the place of a worker, with an empty cache.
    pub(crate) fn replaced(&mut self, place: usize) {
        let worker = &mut self.workers[place];
        self.accounts.remove_worker(worker.slot);
        worker.slot = self.accounts.add_worker(worker.pages);
        worker.told = 0;
        if let Some(names) = &mut worker.names {
            *names = Names::new(worker.pages, self.page_tokens);
        }
    }

    /// Whether routes depend on what workers have cached.
    pub(crate) fn looks(&self) -> bool {
        self.policy == Policy::Prefix
    }

    /// Records how many requests wait in a worker's queue.
    pub(crate) fn hear(&mut self, place: usize, queued: usize) {
        self.workers[place].queued = u32::try_from(queued).unwrap_or(u32::MAX);
    }

    /// Records changes of a worker's cache.
    pub(crate) fn cache_changed(&mut self, place: usize, changes: &[CacheEvent]) {
        let worker = &mut self.workers[place];
        let Some(names) = &mut worker.names else { return };
        for event in changes.iter().filter_map(|change| names.told(change)) {
            worker.told += 1;
            self.accounts.hear(worker.slot, worker.told, std::slice::from_ref(&event));
        }
    }

    /// Chooses workers by their places, and writes the request to their accounts.
    pub(crate) fn route(&mut self, now: Time, wanted: Wanted) -> Choice<usize> {
        let chain = [Chain { identity: IDENTITY, keys: wanted.keys }];
        let sight = self.looks().then(|| self.accounts.look(wanted.tokens, &chain, now));
        self.picks += 1;
        let candidates = |places: &Vec<usize>| -> Vec<(Preference, usize)> {
            let preference =
                |place: &usize| self.preference(*place, wanted.room, &wanted.avoid, sight.as_ref());
            places.iter().map(|place| (preference(place), *place)).collect()
        };
        let [prefill, decode, alone] = [0, 1, 2].map(|list| candidates(&self.places[list]));
        let Some(choice) = choose(&prefill, &decode, &alone, |_, _| true) else {
            unreachable!("a checked cluster has a worker that answers")
        };
        for place in choice.prefill.into_iter().chain([choice.answers]) {
            self.workers[place].last_pick = self.picks;
            if let Some(sight) = &sight {
                let place = self.place(place);
                self.accounts.give(wanted.room, &place, sight);
            }
        }
        choice
    }

    fn preference(&self, place: usize, room: Room, avoid: &[usize], sight: Option<&Sight<'_>>) -> Preference {
        let policy = match self.policy {
            Policy::Prefix => host_core::routing::Policy::Prefix,
            Policy::RoundRobin => host_core::routing::Policy::RoundRobin,
        };
        let reported = Reported { last_pick: self.workers[place].last_pick, ..Reported::default() };
        let cost = sight.map(|sight| self.accounts.cost(&self.place(place), sight).tokens);
        let turn = policy.turn(&reported, 0, room, Instance(place as u64));
        let avoided = u32::from(avoid.contains(&place));
        Preference { unable: 0, avoided, load: policy.load(cost, &reported), turn }
    }

    fn place(&self, place: usize) -> WorkerFacts {
        let worker = &self.workers[place];
        WorkerFacts {
            slot: worker.slot,
            role: worker.role,
            cache: worker.names.is_some().then_some(IDENTITY),
            elsewhere: 0,
            queued: worker.queued,
            page_tokens: self.page_tokens,
            stays: false,
        }
    }

    /// Records that a prompt was computed.
    pub(crate) fn computed(&mut self, room: Room) {
        self.accounts.computed(room);
    }

    /// Records that a request has left its workers.
    pub(crate) fn ended(&mut self, now: Time, room: Room) {
        self.accounts.ended(room, now);
    }
}

/// The start of every chain of page names, because all requests of a simulation have one namespace.
pub(crate) fn chain_seed() -> u64 {
    names::seed(&IDENTITY.namespace(&host_core::radix::NamespaceKey::default()))
}
