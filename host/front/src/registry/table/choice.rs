//! Chooses the workers of a request, or says why there are none.

use host_core::{Instance, Room};
use host_wire::clock::Instant;
use host_wire::pairs::compatible;
use host_wire::proto::WorkerInfo;

use super::{Entry, MAX_REFUSALS, Need, NoRoute, Picked, Policy, Role, WorkerState, WorkerTable};
use crate::registry::Chosen;
use crate::registry::prefix::{Place, Sight};

/// The cost of a worker for a request. Fields are compared in this order, and the least is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    /// Workers that took part in a failed try of this request: only if there is no other.
    avoided: u32,
    /// Requests on it, or by [`Policy::Prefix`] what it has to do, in tokens.
    load: u64,
    /// When it was last chosen, so that equals take turns; by [`Policy::Random`] its lot.
    turn: u64,
}

impl Cost {
    /// The cost of two workers that are both needed.
    fn both(self, other: Cost) -> Cost {
        Cost {
            avoided: self.avoided + other.avoided,
            load: self.load.saturating_add(other.load),
            // As if they were one: a sum would always come after a worker that serves alone.
            turn: self.turn.max(other.turn),
        }
    }
}

struct Candidate {
    cost: Cost,
    prefill: Option<Instance>,
    decode: Instance,
}

/// Workers of one role that are alike in everything that decides about pairs. A cluster has many workers and few kinds.
struct Kind<'a> {
    /// One of them.
    info: &'a WorkerInfo,
    /// The most that any of them holds.
    max_tokens: u32,
}

fn alike(left: &WorkerInfo, right: &WorkerInfo) -> bool {
    left.identity == right.identity
        && left.transfer.iter().map(|way| &way.plugin).eq(right.transfer.iter().map(|way| &way.plugin))
}

impl WorkerTable {
    /// Chooses a route and counts it as load.
    pub fn pick(&mut self, need: Need<'_>, avoid: &[Instance], now: Instant) -> Result<Picked, NoRoute> {
        match self.largest(now) {
            None => return Err(NoRoute::NoWorker(self.missing(now))),
            Some(largest) if u64::from(largest) < need.tokens => return Err(NoRoute::TooLong(largest)),
            Some(_) => {}
        }
        let by_prefix =
            self.terms.policy == Policy::Prefix && self.live(now).any(|worker| worker.info.cache_events);
        let sight = by_prefix.then(|| self.prefixes.look(need.prompt_tokens, need.chains, now));
        let Some(best) = self.cheapest(need, sight.as_ref(), avoid, now) else {
            return Err(NoRoute::NoWorker(self.missing(now)));
        };
        self.picks += 1;
        self.decisions.all += 1;
        let mut expected = 0;
        if let Some(sight) = &sight {
            for instance in best.prefill.iter().chain([&best.decode]) {
                expected = expected.max(self.give(need, *instance, sight));
            }
            self.decisions.cached += u64::from(expected > 0);
        }
        if let Some(session) = need.session {
            let stayed = self.prefixes.sessions.was_at(session, best.decode);
            self.decisions.stayed += u64::from(stayed);
            self.prefixes.remember(session, best.prefill, best.decode);
        }
        let prefill = best.prefill.and_then(|instance| self.take(instance));
        let decode = self.take(best.decode).ok_or_else(|| NoRoute::NoWorker("the worker left".into()))?;
        Ok(Picked { prefill, decode, expected })
    }

    /// Writes the request to a worker's account. Returns the tokens that the worker is expected to hold.
    fn give(&mut self, need: Need<'_>, instance: Instance, sight: &Sight<'_>) -> u64 {
        let Some(place) = self.workers.get(&instance).map(|entry| self.place(entry, need)) else { return 0 };
        self.prefixes.give(need.room, &place, sight)
    }

    fn place(&self, entry: &Entry, need: Need<'_>) -> Place {
        let at = entry.chosen.instance;
        Place {
            slot: entry.slot,
            role: entry.role,
            cache: entry.info.cache_events.then_some(entry.identity),
            elsewhere: entry.elsewhere[0].min(entry.elsewhere[1]),
            queued: entry.queued[0].min(entry.queued[1]),
            page_tokens: entry.chosen.page_tokens,
            stays: need.session.is_some_and(|session| self.prefixes.sessions.was_at(session, at)),
        }
    }

    fn cheapest(
        &self,
        need: Need<'_>,
        sight: Option<&Sight<'_>>,
        avoid: &[Instance],
        now: Instant,
    ) -> Option<Candidate> {
        let fits = |entry: &Entry| u64::from(entry.info.max_tokens) >= need.tokens;
        let ranked = |role: Role| {
            let mut ranked: Vec<(Cost, &Entry)> = self
                .live(now)
                .filter(|entry| entry.role == role && fits(entry))
                .map(|entry| (self.cost(entry, need, sight, avoid), entry))
                .collect();
            ranked.sort_by_key(|&(cost, _)| cost);
            ranked
        };
        let prefills = ranked(Role::Prefill);
        let pairs = ranked(Role::Decode).into_iter().filter_map(|(cost, decode)| {
            // Prefills are in order, so the first that may work with this decode worker is the best for it.
            let (prefill_cost, prefill) =
                prefills.iter().find(|(_, prefill)| compatible(&prefill.info, &decode.info).is_ok())?;
            Some(Candidate {
                cost: cost.both(*prefill_cost),
                prefill: Some(prefill.chosen.instance),
                decode: decode.chosen.instance,
            })
        });
        let alone = ranked(Role::Aggregated).into_iter().map(|(cost, worker)| Candidate {
            cost,
            prefill: None,
            decode: worker.chosen.instance,
        });
        pairs.chain(alone).min_by_key(|candidate| candidate.cost)
    }

    pub(super) fn take(&mut self, instance: Instance) -> Option<Chosen> {
        let entry = self.workers.get_mut(&instance)?;
        entry.in_flight += 1;
        entry.last_pick = self.picks;
        Some(entry.chosen.clone())
    }

    fn cost(&self, entry: &Entry, need: Need<'_>, sight: Option<&Sight<'_>>, avoid: &[Instance]) -> Cost {
        let instance = entry.chosen.instance;
        let load = match (self.terms.policy, sight) {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "tokens, rounded down"
            )]
            (_, Some(sight)) => self.prefixes.cost(&self.place(entry, need), sight).tokens as u64,
            // The heartbeat is up to a second old; what this router has sent since is not.
            (Policy::LeastLoaded | Policy::Prefix, None) => {
                let reported = u64::from(entry.load.queued) + u64::from(entry.load.running);
                reported.max(u64::from(entry.in_flight))
            }
            (Policy::RoundRobin | Policy::Random, None) => 0,
        };
        let turn = match self.terms.policy {
            Policy::Random => lot(self.terms.seed, need.room, instance),
            _ => entry.last_pick,
        };
        Cost { avoided: u32::from(avoid.contains(&instance)), load, turn }
    }

    pub(super) fn live(&self, now: Instant) -> impl Iterator<Item = &Entry> {
        let timeout = self.terms.worker_timeout;
        self.workers.values().filter(move |entry| entry.state(timeout, now) == WorkerState::Live)
    }

    fn kinds<'a>(role: Role, entries: impl Iterator<Item = &'a Entry>) -> Vec<Kind<'a>> {
        let mut kinds: Vec<Kind<'a>> = Vec::new();
        for entry in entries.filter(|entry| entry.role == role) {
            match kinds.iter_mut().find(|kind| alike(kind.info, &entry.info)) {
                Some(kind) => kind.max_tokens = kind.max_tokens.max(entry.info.max_tokens),
                None => kinds.push(Kind { info: &entry.info, max_tokens: entry.info.max_tokens }),
            }
        }
        kinds
    }

    /// Longest prompt + answer over all routes that can be used now.
    pub fn largest(&self, now: Instant) -> Option<u32> {
        let decodes = Self::kinds(Role::Decode, self.live(now));
        let pairs = Self::kinds(Role::Prefill, self.live(now)).into_iter().flat_map(|prefill| {
            decodes
                .iter()
                .filter(|decode| compatible(prefill.info, decode.info).is_ok())
                .map(|decode| decode.max_tokens.min(prefill.max_tokens))
                .max()
        });
        let alone = Self::kinds(Role::Aggregated, self.live(now)).into_iter().map(|kind| kind.max_tokens);
        pairs.chain(alone).max()
    }

    /// Sentences for pairs that may not work together, one for each pair of kinds: all of them, or those with a newcomer.
    pub(super) fn refusals(&self, newcomer: Option<(&WorkerInfo, Role)>) -> Vec<String> {
        let kinds = |role: Role| match newcomer {
            Some((info, its)) if its == role => vec![info],
            Some((_, Role::Aggregated)) => Vec::new(),
            _ => Self::kinds(role, self.workers.values()).into_iter().map(|kind| kind.info).collect(),
        };
        let (prefills, decodes) = (kinds(Role::Prefill), kinds(Role::Decode));
        prefills
            .iter()
            .flat_map(|prefill| decodes.iter().filter_map(|decode| compatible(prefill, decode).err()))
            .take(MAX_REFUSALS)
            .collect()
    }

    /// Why no worker can serve.
    pub(super) fn missing(&self, now: Instant) -> String {
        let count = |role: Role| self.live(now).filter(|entry| entry.role == role).count();
        let (prefill, decode) = (count(Role::Prefill), count(Role::Decode));
        let text = match (prefill, decode) {
            (0, 0) => "no live worker is registered",
            (0, _) => "no live prefill worker is registered",
            (_, 0) => "no live decode worker is registered",
            _ => {
                let refused = self.refusals(None).join("; ");
                return format!(
                    "none of {prefill} prefill and {decode} decode workers may work together: {refused}"
                );
            }
        };
        let (mut suspected, mut draining, mut warming) = (Vec::new(), Vec::new(), Vec::new());
        for entry in self.workers.values() {
            match entry.state(self.terms.worker_timeout, now) {
                WorkerState::Live => {}
                WorkerState::Suspected(why) => suspected.push(format!("{:?} {why}", entry.info.name)),
                WorkerState::Draining => draining.push(format!("{:?}", entry.info.name)),
                WorkerState::Warming(why) => warming.push(format!("{:?} {why}", entry.info.name)),
            }
        }
        let mut text = text.to_owned();
        for (what, mut workers) in [("suspected", suspected), ("draining", draining), ("warming up", warming)]
        {
            if !workers.is_empty() {
                workers.truncate(MAX_REFUSALS);
                text.push_str(&format!("; {what}: {}", workers.join(", ")));
            }
        }
        text
    }
}

/// A lot for a worker and a room, by the last step of splitmix64.
fn lot(seed: u64, room: Room, instance: Instance) -> u64 {
    let mut bits = seed ^ room.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ instance.0.rotate_left(32);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
