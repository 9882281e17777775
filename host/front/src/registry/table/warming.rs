//! Workers that have not served yet. A dummy request first touches their weights and opens their connections.

use host_core::Instance;
use host_wire::clock::Instant;
use host_wire::pairs::compatible;

use super::{Entry, Picked, Role, WorkerState, WorkerTable};

/// How far the warm-up of a worker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Warmth {
    /// No dummy request was tried.
    Cold,
    /// A dummy request is under way, or waits for this reason.
    Warming(String),
    /// The worker has served a dummy request.
    Warm,
}

/// The reason why there is no route for a dummy request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::registry) enum NotNow {
    /// The worker is not known any more, or needs no dummy request.
    Never,
    /// The worker has no partner, or is not available.
    Later(String),
}

impl WorkerTable {
    /// Takes the workers that were not tried yet, and marks them as warming.
    pub fn take_cold(&mut self) -> Vec<Instance> {
        let cold = self.workers.values_mut().filter(|entry| entry.warmth == Warmth::Cold);
        cold.map(|entry| {
            entry.warmth = Warmth::Warming("a dummy request is under way".to_owned());
            entry.chosen.instance
        })
        .collect()
    }

    /// Picks a route through this worker and counts it as load. The partner is a live worker if there is one, else another worker
    /// that has not served yet. Partners in `failed` come last.
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

    /// Notes that these workers have served a request.
    pub fn warmed(&mut self, instances: &[Instance]) {
        for instance in instances {
            if let Some(entry) = self.workers.get_mut(instance) {
                entry.warmth = Warmth::Warm;
            }
        }
    }

    /// Notes why a worker has not served yet. Returns whether the reason is new.
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
