//! Workers that have not served yet: a dummy request touches their weights and opens their connections first.

use host_core::Instance;
use host_wire::clock::Instant;
use host_wire::pairs::compatible;

use super::{Entry, Picked, Role, WorkerState, WorkerTable};

/// How far a worker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Warmth {
    /// Nothing was tried.
    Cold,
    /// A dummy request is under way, or is waited with for this reason.
    Warming(String),
    /// It has served one.
    Warm,
}

/// Why there is no route for a dummy request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::registry) enum NotNow {
    /// The worker is not known any more, or needs none.
    Never,
    /// It has no partner, or is not there.
    Later(String),
}

impl WorkerTable {
    /// Workers with which nothing was tried yet. From now on something is.
    pub fn take_cold(&mut self) -> Vec<Instance> {
        let cold = self.workers.values_mut().filter(|entry| entry.warmth == Warmth::Cold);
        cold.map(|entry| {
            entry.warmth = Warmth::Warming("a dummy request is under way".to_owned());
            entry.chosen.instance
        })
        .collect()
    }

    /// A route through this worker, counted as load on it: with a live partner if there is one, else with another that has not
    /// served yet. Partners with which it `failed` come last.
    pub fn pick_with(
        &mut self,
        instance: Instance,
        failed: &[Instance],
        now: Instant,
    ) -> Result<Picked, NotNow> {
        let entry = self.workers.get(&instance).ok_or(NotNow::Never)?;
        if entry.warmth == Warmth::Warm {
            return Err(NotNow::Never);
        }
        let timeout = self.terms.worker_timeout;
        if !matches!(entry.state(timeout, now), WorkerState::Warming(_)) {
            return Err(NotNow::Later("it is not heard of".to_owned()));
        }
        let fits = |other: &Entry| match entry.role {
            Role::Prefill => other.role == Role::Decode && compatible(&entry.info, &other.info).is_ok(),
            Role::Decode => other.role == Role::Prefill && compatible(&other.info, &entry.info).is_ok(),
            Role::Aggregated => false,
        };
        let partner = self
            .workers
            .values()
            .filter(|other| fits(other))
            .filter_map(|other| match other.state(timeout, now) {
                WorkerState::Live => Some((false, other.in_flight, other)),
                WorkerState::Warming(_) => Some((true, other.in_flight, other)),
                WorkerState::Suspected(_) | WorkerState::Draining => None,
            })
            .min_by_key(|&(is_new, in_flight, other)| {
                let failures = failed.iter().filter(|failed| **failed == other.chosen.instance).count();
                (failures, is_new, in_flight)
            })
            .map(|(_, _, other)| other.chosen.instance);
        let (prefill, decode) = match (entry.role, partner) {
            (Role::Aggregated, _) => (None, instance),
            (Role::Prefill, Some(partner)) => (Some(instance), partner),
            (Role::Decode, Some(partner)) => (Some(partner), instance),
            (role, None) => {
                let partner = if role == Role::Prefill { Role::Decode } else { Role::Prefill };
                return Err(NotNow::Later(format!(
                    "no {} worker is there for a first request",
                    partner.name()
                )));
            }
        };
        let prefill = prefill.and_then(|instance| self.take(instance));
        Ok(Picked { prefill, decode: self.take(decode).ok_or(NotNow::Never)?, expected: 0 })
    }

    /// These workers have served a request.
    pub fn warmed(&mut self, instances: &[Instance]) {
        for instance in instances {
            if let Some(entry) = self.workers.get_mut(instance) {
                entry.warmth = Warmth::Warm;
            }
        }
    }

    /// Why a worker has not served yet. True when this is news.
    pub fn not_warm(&mut self, instance: Instance, why: &str) -> bool {
        match self.workers.get_mut(&instance).map(|entry| &mut entry.warmth) {
            Some(Warmth::Warming(known)) if known != why => {
                why.clone_into(known);
                true
            }
            _ => false,
        }
    }
}
