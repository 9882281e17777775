//! The table of workers, and every decision about them. The caller passes the time, and no method waits.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use host_core::radix::PageHash;
use host_core::routing::{Accounts, CacheCounts, Chain, Policy, WorkerSlot};
use host_core::{Instance, Room};
use host_wire::clock::Instant;
use host_wire::endpoint::Credentials;
use host_wire::identity;
use host_wire::proto::{Load, WorkerInfo};
use host_wire::protocol::Version;

use super::{Accepted, Chosen, Role, admission, channel};

mod caching;
mod choice;
mod warming;

pub use caching::Following;
pub(super) use warming::NotNow;
use warming::Warmth;

/// The registry's limits and policy.
#[derive(Clone, Debug)]
pub struct Terms {
    /// The served model's name. A worker with another model is refused.
    pub model: String,
    /// A worker not heard of for this long is suspected: no new requests.
    pub worker_timeout: Duration,
    /// A worker not heard of for this long is lost: requests under way on it are given up.
    pub lost_after: Duration,
    /// Most workers, silent ones included.
    pub max_workers: usize,
    /// Whether a worker gets requests only after it has served a dummy request.
    pub warm_up: bool,
    /// How routes are chosen.
    pub policy: Policy,
    /// Any number, for [`Policy::Random`].
    pub seed: u64,
    /// The credentials with which workers are called.
    pub credentials: Credentials,
}

/// The needs of a request that its route has to meet.
#[derive(Clone, Copy, Debug)]
pub struct Need<'a> {
    /// The room of the try.
    pub room: Room,
    /// Prompt + answer, in tokens.
    pub tokens: u64,
    /// The prompt alone.
    pub prompt_tokens: u64,
    /// The names of the prompt's pages, see [`Registry::chains`](super::Registry::chains). Empty for a request that must not use
    /// cached pages.
    pub chains: &'a [Chain],
    /// A hash of the session's name.
    pub session: Option<u64>,
    /// What workers must be able to do.
    pub abilities: Abilities,
}

/// What a request needs that not all workers of a cluster can do, because they are of an older release or compute no model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// Every setting of [`Sampling`](host_wire::proto::Sampling), such as penalties.
    pub shaping: bool,
    /// A grammar.
    pub grammars: bool,
    /// Log probabilities of the prompt. They are found by the worker that computes prompts.
    pub scores: bool,
}

impl Abilities {
    /// Whether a worker has them.
    pub(super) fn are_had_by(self, worker: &Chosen) -> bool {
        (!self.shaping || worker.protocol.knows_shaping())
            && (!self.grammars || worker.grammars)
            && (!self.scores || worker.scores)
    }
}

/// The reason why no route was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoRoute {
    /// No worker can serve the request now. The text says what is missing. Waiting may help.
    NoWorker(String),
    /// Every usable route is too small. The largest holds this many tokens.
    TooLong(u32),
}

/// Whether a worker gets requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerState {
    /// The worker gets requests.
    Live,
    /// The worker gets none, for this reason.
    Suspected(String),
    /// The worker gets none: it ends when its requests have ended.
    Draining,
    /// The worker gets none yet: it has not served a dummy request, for this reason.
    Warming(String),
}

/// The state of the table.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Every worker, by name.
    pub workers: Vec<WorkerSnapshot>,
    /// At most [`MAX_REFUSALS`] pairs that may not work together, as sentences.
    pub refused_pairs: Vec<String>,
    /// Longest prompt + answer over all usable routes, absent when there is no route.
    pub max_tokens: Option<u32>,
    /// The reason why there is no route, if there is none.
    pub unusable: Option<String>,
    /// How routes are chosen.
    pub policy: Policy,
    /// Counts of the workers' caches, as far as they are known.
    pub cache: CacheCounts,
    /// Counts of the routes that this policy chose.
    pub decisions: Decisions,
}

/// Counts of routes since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decisions {
    /// All routes.
    pub all: u64,
    /// Routes to a worker that is expected to have some of the prompt cached.
    pub cached: u64,
    /// Routes to a decode worker that had served the session before.
    pub stayed: u64,
}

/// One worker in a [`Snapshot`].
#[derive(Clone, Debug)]
pub struct WorkerSnapshot {
    /// The description with which the worker registered.
    pub info: Arc<WorkerInfo>,
    /// The version of the control protocol that was agreed with the worker.
    pub protocol: Version,
    /// Its role.
    pub role: Role,
    /// Whether it gets requests.
    pub state: WorkerState,
    /// Its last heartbeat's load.
    pub load: Load,
    /// Requests of this router on the worker.
    pub in_flight: u32,
    /// Time since the worker was last heard of.
    pub silent: Duration,
    /// How far the router follows the worker's cache.
    pub following: Following,
    /// Pages that the worker is known to have cached.
    pub known_pages: u64,
}

/// Most refused pairs spelled out in one message.
pub const MAX_REFUSALS: usize = 8;

/// Most broken workers that are remembered, so that requests on other workers learn of them.
const MAX_BREAKS: usize = 64;
/// A silent worker is forgotten after this many times `lost_after`.
const FORGET: u32 = 30;

#[derive(Debug)]
struct Entry {
    chosen: Chosen,
    info: Arc<WorkerInfo>,
    role: Role,
    heard: Instant,
    broken: Option<String>,
    load: Load,
    in_flight: u32,
    /// Requests of other routers on the worker, at its last heartbeat and at the one before. One heartbeat alone may count
    /// requests of this router that ended while the heartbeat was on its way.
    elsewhere: [u32; 2],
    /// Requests in the worker's queue, at its last heartbeat and at the one before: many requests wait for a moment only.
    queued: [u32; 2],
    /// The number of the pick that last chose it.
    last_pick: u64,
    /// The worker's slot in the index and in the accounts.
    slot: WorkerSlot,
    identity: PageHash,
    following: Following,
    warmth: Warmth,
}

impl Entry {
    fn state(&self, timeout: Duration, now: Instant) -> WorkerState {
        let silent = now.saturating_duration_since(self.heard);
        if silent > timeout {
            WorkerState::Suspected(format!("not heard of for {:.1} s", silent.as_secs_f64()))
        } else if let Some(why) = &self.broken {
            WorkerState::Suspected(why.clone())
        } else if self.load.draining {
            WorkerState::Draining
        } else {
            match &self.warmth {
                Warmth::Warm => WorkerState::Live,
                Warmth::Cold => WorkerState::Warming("it has just come".to_owned()),
                Warmth::Warming(why) => WorkerState::Warming(why.clone()),
            }
        }
    }
}

/// A route's workers.
#[derive(Debug)]
pub(super) struct Picked {
    pub prefill: Option<Chosen>,
    pub decode: Chosen,
    /// Tokens of the prompt that a worker of the route is expected to have cached.
    pub expected: u64,
}

/// The reason why a worker is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Denied {
    /// Its description contradicts itself.
    #[error("{0}")]
    Wrong(String),
    /// Another worker with the same name is alive.
    #[error(
        "the name {name:?} belongs to the worker at {holder_address} (instance {holder}), which is alive; the worker at \
         {address} (instance {instance}) needs another: set --name"
    )]
    NameTaken { name: String, holder: Instance, holder_address: String, instance: Instance, address: String },
}

impl From<String> for Denied {
    fn from(why: String) -> Self {
        Denied::Wrong(why)
    }
}

/// The outcome of a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heard {
    pub known: bool,
    /// Whether the worker gets requests from now on, or gets none any more.
    pub is_change: bool,
    /// Whether the worker has not served a dummy request yet.
    pub is_warming: bool,
}

/// The table of workers, see the module.
#[derive(Debug)]
pub(super) struct WorkerTable {
    terms: Terms,
    workers: BTreeMap<Instance, Entry>,
    picks: u64,
    accounts: Accounts<Instant>,
    decisions: Decisions,
    /// At most [`MAX_BREAKS`] workers that broke, the latest first.
    breaks: VecDeque<(Instant, Instance)>,
}

impl WorkerTable {
    pub fn new(terms: Terms) -> Self {
        Self {
            terms,
            workers: BTreeMap::new(),
            picks: 0,
            accounts: Accounts::default(),
            decisions: Decisions::default(),
            breaks: VecDeque::new(),
        }
    }

    /// Adds a worker, or replaces the one with its instance. If no live worker has its name, also replaces the one with its name.
    pub fn register(&mut self, info: WorkerInfo, now: Instant) -> Result<Accepted, Denied> {
        let (role, protocol) = admission::check(&info, &self.terms.model)?;
        let forget = self.terms.lost_after.saturating_mul(FORGET);
        let instance = Instance(info.instance);
        // A process keeps its address. Instances are not secret: another process that names this one would get its requests.
        if let Some(known) = self.workers.get(&instance).filter(|known| known.info.address != info.address) {
            return Err(Denied::Wrong(format!(
                "instance {instance} is registered at {}, and a worker that runs does not change its address",
                known.info.address
            )));
        }
        let holder = self.workers.iter().find(|(other, entry)| {
            **other != instance
                && entry.info.name == info.name
                // Two processes cannot listen at one address, so the earlier one is gone.
                && entry.info.address != info.address
                && matches!(
                    entry.state(self.terms.worker_timeout, now),
                    WorkerState::Live | WorkerState::Warming(_)
                )
        });
        if let Some((holder, entry)) = holder {
            return Err(Denied::NameTaken {
                name: info.name,
                holder: *holder,
                holder_address: entry.info.address.clone(),
                instance,
                address: info.address,
            });
        }
        for (_, gone) in self.workers.extract_if(.., |other, entry| {
            // A draining worker stays beside its successor until its requests are finished.
            let replaced = *other != instance
                && entry.info.name == info.name
                && entry.state(self.terms.worker_timeout, now) != WorkerState::Draining;
            replaced || now.saturating_duration_since(entry.heard) > forget
        }) {
            self.accounts.remove_worker(gone.slot);
        }
        if self.workers.len() >= self.terms.max_workers && !self.workers.contains_key(&instance) {
            let limit = self.terms.max_workers;
            return Err(Denied::Wrong(format!("{limit} workers are registered, which is the limit")));
        }
        let chosen = Chosen {
            instance,
            name: info.name.clone(),
            address: info.address.clone(),
            max_tokens: info.max_tokens,
            page_tokens: info.identity.as_ref().map_or(1, |identity| identity.page_tokens),
            protocol,
            grammars: info.grammars,
            scores: info.scores,
            channel: channel(&info.address, &self.terms.credentials)?,
        };
        let refused = self.refusals(Some((&info, role)));
        let newcomer = if self.terms.warm_up { Warmth::Cold } else { Warmth::Warm };
        let known = self.workers.get(&instance);
        let slot = known.map(|known| known.slot);
        let slot = slot.unwrap_or_else(|| self.accounts.add_worker(info.pages));
        let entry = Entry {
            chosen,
            role,
            heard: now,
            broken: None,
            load: Load::default(),
            in_flight: known.map_or(0, |known| known.in_flight),
            elsewhere: [0; 2],
            queued: [0; 2],
            last_pick: known.map_or(0, |known| known.last_pick),
            slot,
            identity: info.identity.as_ref().map_or(PageHash([0; 32]), identity::digest),
            following: known.map(|known| known.following.clone()).unwrap_or_default(),
            warmth: known.map(|known| known.warmth.clone()).unwrap_or(newcomer),
            info: Arc::new(info),
        };
        self.workers.insert(instance, entry);
        Ok(Accepted { protocol, refused_pairs: refused.join("; ") })
    }

    pub fn heartbeat(&mut self, instance: Instance, load: Load, now: Instant) -> Heard {
        let Some(entry) = self.workers.get_mut(&instance) else {
            return Heard { known: false, is_change: false, is_warming: false };
        };
        let before = entry.state(self.terms.worker_timeout, now);
        entry.heard = now;
        entry.broken = None;
        entry.load = load;
        let reported = load.queued.saturating_add(load.running);
        entry.elsewhere = [reported.saturating_sub(entry.in_flight), entry.elsewhere[0]];
        entry.queued = [load.queued, entry.queued[0]];
        let state = entry.state(self.terms.worker_timeout, now);
        let is_warming = matches!(state, WorkerState::Warming(_));
        Heard { known: true, is_change: state != before, is_warming }
    }

    /// Forgets a worker that ends. False when it is not known.
    pub fn leave(&mut self, instance: Instance) -> bool {
        let left = self.workers.remove(&instance);
        if let Some(left) = &left {
            self.accounts.remove_worker(left.slot);
        }
        left.is_some()
    }

    /// Marks a worker as broken. Returns whether this is news.
    pub fn suspect(&mut self, instance: Instance, why: &str, now: Instant) -> bool {
        let Some(entry) = self.workers.get_mut(&instance) else { return false };
        let is_news = entry.broken.replace(why.to_owned()).is_none();
        if is_news {
            self.breaks.truncate(MAX_BREAKS - 1);
            self.breaks.push_front((now, instance));
        }
        is_news
    }

    /// Whether a worker other than `than` broke at `since` or later.
    pub fn another_broke(&self, since: Instant, than: &[Instance]) -> bool {
        let mut later = self.breaks.iter().take_while(|(when, _)| *when >= since);
        later.any(|(_, instance)| !than.contains(instance))
    }

    /// Notes that a request has left its workers.
    pub fn done(&mut self, room: Room, instances: &[Instance], now: Instant) {
        self.accounts.ended(room, now);
        instances.iter().for_each(|instance| self.has_one_less(*instance));
    }

    /// Notes that a worker does not answer a request that it was chosen for.
    pub fn left_out(&mut self, room: Room, instance: Instance) {
        self.accounts.not_answered(room);
        self.has_one_less(instance);
    }

    fn has_one_less(&mut self, instance: Instance) {
        if let Some(entry) = self.workers.get_mut(&instance) {
            entry.in_flight = entry.in_flight.saturating_sub(1);
        }
    }

    /// Returns the time to check again, or the reason why the worker is lost.
    pub fn lost(&self, instance: Instance, now: Instant) -> Result<Instant, String> {
        let Some(entry) = self.workers.get(&instance) else {
            return Err("the worker has left, or was replaced by a new instance".into());
        };
        let silent = now.saturating_duration_since(entry.heard);
        if silent > self.terms.lost_after {
            return Err(format!(
                "worker {:?} was not heard of for {:.1} s",
                entry.info.name,
                silent.as_secs_f64()
            ));
        }
        // A little later than the limit, so that it has passed when the timer fires.
        Ok(entry.heard + self.terms.lost_after + Duration::from_millis(1))
    }

    /// Every worker, by name.
    pub fn workers(&self) -> Vec<(Chosen, Role)> {
        let mut workers: Vec<_> =
            self.workers.values().map(|entry| (entry.chosen.clone(), entry.role)).collect();
        workers.sort_by(|left, right| left.0.name.cmp(&right.0.name));
        workers
    }

    pub fn snapshot(&self, now: Instant) -> Snapshot {
        let mut workers: Vec<WorkerSnapshot> = self
            .workers
            .values()
            .map(|entry| WorkerSnapshot {
                info: Arc::clone(&entry.info),
                protocol: entry.chosen.protocol,
                role: entry.role,
                state: entry.state(self.terms.worker_timeout, now),
                load: entry.load,
                in_flight: entry.in_flight,
                following: entry.following.clone(),
                known_pages: self.accounts.pages(entry.slot),
                silent: now.saturating_duration_since(entry.heard),
            })
            .collect();
        workers.sort_by(|left, right| left.info.name.cmp(&right.info.name));
        let (max_tokens, unusable) = (self.largest(now), self.unusable(now));
        Snapshot {
            workers,
            refused_pairs: self.refusals(None),
            max_tokens,
            unusable,
            policy: self.terms.policy,
            cache: self.accounts.counts(),
            decisions: self.decisions,
        }
    }
}

#[cfg(test)]
mod tests;
