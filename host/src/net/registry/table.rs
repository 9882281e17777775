//! The table of workers and every decision about it. Time comes in; nothing here waits.

use std::collections::HashMap;
use std::time::Duration;

use host_core::Instance;

use super::pairs::compatible;
use super::{Chosen, channel};
use crate::net::clock::Instant;
use crate::net::proto::{Load, WorkerInfo};

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Computes prompts and sends their KV.
    Prefill,
    /// Receives KV and generates.
    Decode,
    /// Both, without a transfer.
    Aggregated,
}

impl Role {
    /// As the control plane writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Aggregated => "aggregated",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        [Role::Prefill, Role::Decode, Role::Aggregated].into_iter().find(|role| role.name() == name)
    }
}

/// How a route is chosen among those that fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// The workers with the fewest requests, in turn among equals.
    #[default]
    LeastLoaded,
    /// In turn.
    RoundRobin,
}

/// What the registry holds workers to.
#[derive(Clone, Debug)]
pub struct Terms {
    /// The served model's name; a worker with another is refused.
    pub model: String,
    /// A worker not heard of for this long is suspected: no new requests.
    pub worker_timeout: Duration,
    /// A worker not heard of for this long is lost: requests under way on it are given up.
    pub lost_after: Duration,
    /// Most workers, silent ones included.
    pub max_workers: usize,
    /// How routes are chosen.
    pub policy: Policy,
}

/// What a request asks of a route.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// Prompt + answer, in tokens.
    pub tokens: u64,
}

/// Why no route was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoRoute {
    /// Nobody to serve it now; the sentence says what is missing. Waiting may help.
    Nobody(String),
    /// Every usable route is too small; the largest holds this many tokens.
    TooLong(u32),
}

/// Whether a worker gets requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerState {
    /// Yes.
    Live,
    /// No, and why.
    Suspected(String),
}

/// Everything the table knows.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Every worker, by name.
    pub workers: Vec<WorkerSnapshot>,
    /// Pairs that may not work together, as sentences; at most [`MAX_REFUSALS`].
    pub refused_pairs: Vec<String>,
    /// Longest prompt + answer over all usable routes; absent when there is none.
    pub max_tokens: Option<u32>,
    /// Why there is no route, when there is none.
    pub unusable: Option<String>,
}

/// One worker in a [`Snapshot`].
#[derive(Clone, Debug)]
pub struct WorkerSnapshot {
    /// What it said of itself.
    pub info: WorkerInfo,
    /// Its role.
    pub role: Role,
    /// Whether it gets requests.
    pub state: WorkerState,
    /// Its last heartbeat's load.
    pub load: Load,
    /// Requests that this router has on it.
    pub in_flight: u32,
    /// Time since it was last heard of.
    pub silent: Duration,
}

/// Most refused pairs spelled out in one message.
pub const MAX_REFUSALS: usize = 8;
const MAX_NAME: usize = 256;
const MAX_TEXT: usize = 1024;
const MAX_TRANSFERS: usize = 16;
const MAX_ENDPOINT: usize = 64 << 10;
/// A silent worker is forgotten after this many times `lost_after`.
const FORGET: u32 = 30;

#[derive(Debug)]
struct Entry {
    chosen: Chosen,
    info: WorkerInfo,
    role: Role,
    heard: Instant,
    broken: Option<String>,
    load: Load,
    in_flight: u32,
    /// When it was last chosen, counted in picks.
    last_pick: u64,
}

impl Entry {
    fn state(&self, timeout: Duration, now: Instant) -> WorkerState {
        let silent = now.saturating_duration_since(self.heard);
        if silent > timeout {
            WorkerState::Suspected(format!("not heard of for {:.1} s", silent.as_secs_f64()))
        } else if let Some(why) = &self.broken {
            WorkerState::Suspected(why.clone())
        } else {
            WorkerState::Live
        }
    }
}

/// A route's workers.
#[derive(Debug)]
pub(super) struct Picked {
    pub prefill: Option<Chosen>,
    pub decode: Chosen,
}

/// What a heartbeat came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heard {
    pub known: bool,
    /// It was suspected until now.
    pub revived: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct WorkerTable {
    terms: Terms,
    workers: HashMap<Instance, Entry>,
    picks: u64,
}

impl WorkerTable {
    pub fn new(terms: Terms) -> Self {
        Self { terms, workers: HashMap::new(), picks: 0 }
    }

    pub fn register(&mut self, info: WorkerInfo, now: Instant) -> Result<String, String> {
        let role = self.check(&info)?;
        let forget = self.terms.lost_after.saturating_mul(FORGET);
        let instance = Instance(info.instance);
        self.workers.retain(|&other, entry| {
            let replaced = other != instance && entry.info.name == info.name;
            !replaced && now.saturating_duration_since(entry.heard) <= forget
        });
        if self.workers.len() >= self.terms.max_workers && !self.workers.contains_key(&instance) {
            return Err(format!("{} workers are registered, which is the limit", self.terms.max_workers));
        }
        let chosen = Chosen {
            instance,
            name: info.name.clone(),
            address: info.address.clone(),
            max_tokens: info.max_tokens,
            channel: channel(&info.address)?,
        };
        let (in_flight, last_pick) =
            self.workers.get(&instance).map_or((0, 0), |known| (known.in_flight, known.last_pick));
        let refused = self.refusals(Some((&info, role)));
        let entry = Entry {
            chosen,
            info,
            role,
            heard: now,
            broken: None,
            load: Load::default(),
            in_flight,
            last_pick,
        };
        self.workers.insert(instance, entry);
        Ok(refused.join("; "))
    }

    fn check(&self, info: &WorkerInfo) -> Result<Role, String> {
        let role = Role::parse(&info.role)
            .ok_or_else(|| format!("unknown role {:?}: use prefill, decode or aggregated", info.role))?;
        let bounded = |what: &str, text: &str, limit: usize| {
            if text.is_empty() {
                Err(format!("the worker's {what} is empty"))
            } else if text.len() > limit {
                Err(format!("the worker's {what} has {} bytes; at most {limit} are allowed", text.len()))
            } else {
                Ok(())
            }
        };
        bounded("name", &info.name, MAX_NAME)?;
        bounded("address", &info.address, MAX_TEXT)?;
        let identity = info.identity.as_ref().ok_or("the worker gives no KV identity")?;
        for (what, text) in [
            ("model", &identity.model),
            ("weights digest", &identity.weights),
            ("executor", &identity.executor),
            ("KV element type", &identity.dtype),
            ("KV layout", &identity.layout),
        ] {
            bounded(what, text, MAX_TEXT)?;
        }
        for (what, number) in [
            ("max_tokens", info.max_tokens),
            ("page_tokens", identity.page_tokens),
            ("layers", identity.layers),
            ("kv_heads", identity.kv_heads),
            ("head_dim", identity.head_dim),
            ("ranks", identity.ranks),
        ] {
            if number == 0 {
                return Err(format!("the worker's {what} is 0"));
            }
        }
        if identity.model != self.terms.model {
            return Err(format!(
                "the worker serves model {:?} and this router {:?}",
                identity.model, self.terms.model
            ));
        }
        if info.transfer.len() > MAX_TRANSFERS {
            let count = info.transfer.len();
            return Err(format!(
                "the worker offers {count} transfer endpoints; at most {MAX_TRANSFERS} are allowed"
            ));
        }
        for way in &info.transfer {
            bounded("transfer plugin name", &way.plugin, MAX_NAME)?;
            if way.endpoint.len() > MAX_ENDPOINT {
                return Err(format!(
                    "the endpoint of transfer plugin {:?} has {} bytes; at most {MAX_ENDPOINT} are allowed",
                    way.plugin,
                    way.endpoint.len()
                ));
            }
        }
        Ok(role)
    }

    pub fn heartbeat(&mut self, instance: Instance, load: Load, now: Instant) -> Heard {
        let Some(entry) = self.workers.get_mut(&instance) else {
            return Heard { known: false, revived: false };
        };
        let revived = entry.state(self.terms.worker_timeout, now) != WorkerState::Live;
        entry.heard = now;
        entry.broken = None;
        entry.load = load;
        Heard { known: true, revived }
    }

    /// True when this is news.
    pub fn suspect(&mut self, instance: Instance, why: &str) -> bool {
        let Some(entry) = self.workers.get_mut(&instance) else { return false };
        entry.broken.replace(why.to_owned()).is_none()
    }

    pub fn done(&mut self, instances: &[Instance]) {
        for instance in instances {
            if let Some(entry) = self.workers.get_mut(instance) {
                entry.in_flight = entry.in_flight.saturating_sub(1);
            }
        }
    }

    /// When to ask again.
    pub fn lost(&self, instance: Instance, now: Instant) -> Result<Instant, String> {
        let Some(entry) = self.workers.get(&instance) else {
            return Err("the worker was replaced by a new instance".into());
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

    pub fn pick(&mut self, need: Need, avoid: &[Instance], now: Instant) -> Result<Picked, NoRoute> {
        let mut largest: Option<u32> = None;
        // Those that failed this request already come last, whatever their load.
        let mut best: Option<((bool, u64, u64), Option<Instance>, Instance)> = None;
        let prefills = self.ranked(Role::Prefill, avoid, now);
        for (rank, decode) in self.serving(avoid, now) {
            // Prefills are in order, so the first that fits is the best for this decode worker.
            let partner = if decode.role == Role::Aggregated {
                largest = largest.max(Some(decode.info.max_tokens));
                if u64::from(decode.info.max_tokens) < need.tokens {
                    continue;
                }
                None
            } else {
                let mut found = None;
                for &(prefill_rank, prefill) in &prefills {
                    if compatible(&prefill.info, &decode.info).is_err() {
                        continue;
                    }
                    let holds = prefill.info.max_tokens.min(decode.info.max_tokens);
                    largest = largest.max(Some(holds));
                    if u64::from(holds) >= need.tokens {
                        found = Some((prefill_rank, prefill));
                        break;
                    }
                }
                if found.is_none() {
                    continue;
                }
                found
            };
            let cost = match partner {
                Some((prefill_rank, _)) => {
                    (rank.0 || prefill_rank.0, rank.1.max(prefill_rank.1), rank.2.max(prefill_rank.2))
                }
                None => rank,
            };
            if best.as_ref().is_none_or(|(least, ..)| cost < *least) {
                best =
                    Some((cost, partner.map(|(_, prefill)| prefill.chosen.instance), decode.chosen.instance));
            }
        }
        drop(prefills);
        let Some((_, prefill, decode)) = best else {
            return Err(match largest {
                Some(largest) => NoRoute::TooLong(largest),
                None => NoRoute::Nobody(self.missing(now)),
            });
        };
        self.picks += 1;
        let prefill = prefill.and_then(|instance| self.take(instance));
        let decode = self.take(decode).ok_or_else(|| NoRoute::Nobody("the worker left".into()))?;
        Ok(Picked { prefill, decode })
    }

    fn take(&mut self, instance: Instance) -> Option<Chosen> {
        let entry = self.workers.get_mut(&instance)?;
        entry.in_flight += 1;
        entry.last_pick = self.picks;
        Some(entry.chosen.clone())
    }

    /// (failed this request, load, last picked): least first.
    fn rank(&self, entry: &Entry, avoid: &[Instance]) -> (bool, u64, u64) {
        let load = match self.terms.policy {
            // The heartbeat is up to a second old; what this router has sent since is not.
            Policy::LeastLoaded => {
                let reported = u64::from(entry.load.queued) + u64::from(entry.load.running);
                reported.max(u64::from(entry.in_flight))
            }
            Policy::RoundRobin => 0,
        };
        (avoid.contains(&entry.chosen.instance), load, entry.last_pick)
    }

    fn live(&self, now: Instant) -> impl Iterator<Item = &Entry> {
        let timeout = self.terms.worker_timeout;
        self.workers.values().filter(move |entry| entry.state(timeout, now) == WorkerState::Live)
    }

    fn ranked(&self, role: Role, avoid: &[Instance], now: Instant) -> Vec<((bool, u64, u64), &Entry)> {
        let mut ranked: Vec<_> = self
            .live(now)
            .filter(|entry| entry.role == role)
            .map(|entry| (self.rank(entry, avoid), entry))
            .collect();
        ranked
            .sort_by(|left, right| (left.0, left.1.chosen.instance).cmp(&(right.0, right.1.chosen.instance)));
        ranked
    }

    fn serving(&self, avoid: &[Instance], now: Instant) -> Vec<((bool, u64, u64), &Entry)> {
        let mut serving = self.ranked(Role::Decode, avoid, now);
        serving.extend(self.ranked(Role::Aggregated, avoid, now));
        serving
    }

    /// Sentences for pairs that may not work together: all of them, or those with one newcomer.
    fn refusals(&self, newcomer: Option<(&WorkerInfo, Role)>) -> Vec<String> {
        let of = |role: Role| {
            self.workers.values().filter(move |entry| entry.role == role).map(|entry| &entry.info)
        };
        let pairs: Box<dyn Iterator<Item = (&WorkerInfo, &WorkerInfo)>> = match newcomer {
            Some((info, Role::Prefill)) => Box::new(of(Role::Decode).map(move |decode| (info, decode))),
            Some((info, Role::Decode)) => Box::new(of(Role::Prefill).map(move |prefill| (prefill, info))),
            Some((_, Role::Aggregated)) => Box::new(std::iter::empty()),
            None => Box::new(
                of(Role::Prefill)
                    .flat_map(move |prefill| of(Role::Decode).map(move |decode| (prefill, decode))),
            ),
        };
        let mut refused: Vec<String> = pairs
            .filter_map(|(prefill, decode)| compatible(prefill, decode).err())
            .take(MAX_REFUSALS)
            .collect();
        refused.sort();
        refused
    }

    /// Why nobody serves.
    fn missing(&self, now: Instant) -> String {
        let count = |role: Role| self.live(now).filter(|entry| entry.role == role).count();
        let (prefill, decode) = (count(Role::Prefill), count(Role::Decode));
        let mut text = match (prefill, decode) {
            (0, 0) => "no live worker is registered".to_owned(),
            (0, _) => "no live prefill worker is registered".to_owned(),
            (_, 0) => "no live decode worker is registered".to_owned(),
            _ => format!("none of {prefill} prefill and {decode} decode workers may work together"),
        };
        if prefill > 0 && decode > 0 {
            text = format!("{text}: {}", self.refusals(None).join("; "));
        } else {
            let mut suspected: Vec<String> = self
                .workers
                .values()
                .filter_map(|entry| match entry.state(self.terms.worker_timeout, now) {
                    WorkerState::Live => None,
                    WorkerState::Suspected(why) => Some(format!("{:?} {why}", entry.info.name)),
                })
                .collect();
            suspected.sort();
            suspected.truncate(MAX_REFUSALS);
            if !suspected.is_empty() {
                text = format!("{text}; suspected: {}", suspected.join(", "));
            }
        }
        text
    }

    pub fn snapshot(&mut self, now: Instant) -> Snapshot {
        let mut workers: Vec<WorkerSnapshot> = self
            .workers
            .values()
            .map(|entry| WorkerSnapshot {
                info: entry.info.clone(),
                role: entry.role,
                state: entry.state(self.terms.worker_timeout, now),
                load: entry.load,
                in_flight: entry.in_flight,
                silent: now.saturating_duration_since(entry.heard),
            })
            .collect();
        workers.sort_by(|left, right| left.info.name.cmp(&right.info.name));
        // Asking for more than anybody holds finds the largest route without taking it.
        let (max_tokens, unusable) = match self.pick(Need { tokens: u64::MAX }, &[], now) {
            Err(NoRoute::TooLong(largest)) => (Some(largest), None),
            Err(NoRoute::Nobody(why)) => (None, Some(why)),
            Ok(_) => (None, None),
        };
        Snapshot { workers, refused_pairs: self.refusals(None), max_tokens, unusable }
    }
}

#[cfg(test)]
mod tests;
