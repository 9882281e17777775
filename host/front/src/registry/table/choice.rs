//! Chooses the workers of a request, or says why there is no route.

use host_core::Instance;
use host_core::routing::{Choice, Preference, Reported, Sight, WorkerFacts, choose};
use host_wire::clock::Instant;
use host_wire::pairs::compatible;
use host_wire::proto::WorkerInfo;

use super::{Entry, MAX_REFUSALS, Need, NoRoute, Picked, Policy, Role, WorkerState, WorkerTable};
use crate::registry::Chosen;

/// Workers of one role that are alike in all that decides about pairs. A cluster has many workers and few kinds.
struct Kind<'a> {
    /// The description of one of the workers.
    info: &'a WorkerInfo,
    /// The largest `max_tokens` of the workers.
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
        let sight = by_prefix.then(|| self.accounts.look(need.prompt_tokens, need.chains, now));
        let Some(best) = self.cheapest(need, sight.as_ref(), avoid, now) else {
            return Err(NoRoute::NoWorker(self.missing(now)));
        };
        self.picks += 1;
        self.decisions.all += 1;
        let mut expected = 0;
        if let Some(sight) = &sight {
            for instance in best.prefill.iter().chain([&best.answers]) {
                expected = expected.max(self.give(need, *instance, sight));
            }
            self.decisions.cached += u64::from(expected > 0);
        }
        if let Some(session) = need.session {
            let stayed = self.accounts.was_at(session, best.answers);
            self.decisions.stayed += u64::from(stayed);
            self.accounts.remember(session, best.prefill, best.answers);
        }
        let prefill = best.prefill.and_then(|instance| self.take(instance));
        let decode = self.take(best.answers).ok_or_else(|| NoRoute::NoWorker("the worker left".into()))?;
        Ok(Picked { prefill, decode, expected })
    }

    /// Adds the request to a worker's account. Returns the tokens of the prompt that the worker is expected to have cached.
    fn give(&mut self, need: Need<'_>, instance: Instance, sight: &Sight<'_>) -> u64 {
        let Some(place) = self.workers.get(&instance).map(|entry| self.place(entry, need)) else { return 0 };
        self.accounts.give(need.room, &place, sight)
    }

    fn place(&self, entry: &Entry, need: Need<'_>) -> WorkerFacts {
        let at = entry.chosen.instance;
        WorkerFacts {
            slot: entry.slot,
            role: entry.role.into(),
            cache: entry.info.cache_events.then_some(entry.identity),
            elsewhere: entry.elsewhere[0].min(entry.elsewhere[1]),
            queued: entry.queued[0].min(entry.queued[1]),
            page_tokens: entry.chosen.page_tokens,
            stays: need.session.is_some_and(|session| self.accounts.was_at(session, at)),
        }
    }

    fn cheapest(
        &self,
        need: Need<'_>,
        sight: Option<&Sight<'_>>,
        avoid: &[Instance],
        now: Instant,
    ) -> Option<Choice<Instance>> {
        let fits = |entry: &Entry| u64::from(entry.info.max_tokens) >= need.tokens;
        let candidates = |role: Role| -> Vec<(Preference, &Entry)> {
            let of_role = self.live(now).filter(|entry| entry.role == role && fits(entry));
            of_role.map(|entry| (self.preference(entry, need, sight, avoid), entry)).collect()
        };
        let [prefill, decode, alone] = [Role::Prefill, Role::Decode, Role::Aggregated].map(candidates);
        let may_pair = |prefill: &Entry, decode: &Entry| compatible(&prefill.info, &decode.info).is_ok();
        let choice = choose(&prefill, &decode, &alone, may_pair)?;
        let instance = |entry: &Entry| entry.chosen.instance;
        Some(Choice { prefill: choice.prefill.map(instance), answers: instance(choice.answers) })
    }

    pub(super) fn take(&mut self, instance: Instance) -> Option<Chosen> {
        let entry = self.workers.get_mut(&instance)?;
        entry.in_flight += 1;
        entry.last_pick = self.picks;
        Some(entry.chosen.clone())
    }

    fn preference(
        &self,
        entry: &Entry,
        need: Need<'_>,
        sight: Option<&Sight<'_>>,
        avoid: &[Instance],
    ) -> Preference {
        let (instance, policy) = (entry.chosen.instance, self.terms.policy);
        let reported = Reported {
            requests: u64::from(entry.load.queued) + u64::from(entry.load.running),
            in_flight: u64::from(entry.in_flight),
            last_pick: entry.last_pick,
        };
        let cost = sight.map(|sight| self.accounts.cost(&self.place(entry, need), sight).tokens);
        Preference {
            unable: u32::from(!need.abilities.are_had_by(&entry.chosen)),
            avoided: u32::from(avoid.contains(&instance)),
            load: policy.load(cost, &reported),
            turn: policy.turn(&reported, self.terms.seed, need.room, instance),
        }
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

    /// Sentences about pairs that may not work together, one for each pair of kinds. With a `newcomer`, only pairs with it.
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

    /// Why no request can be served now, or `None` if some can.
    pub fn unusable(&self, now: Instant) -> Option<String> {
        self.largest(now).is_none().then(|| self.missing(now))
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
