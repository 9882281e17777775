//! Runs a workload on a cluster.

use std::time::Duration;

use host_core::Time;
use host_core::pool::PoolLimits;
use host_sim::{Faults, World};

use crate::cluster::Cluster;
use crate::hardware::Hardware;
use crate::recording::{Occupancy, Recording};
use crate::report::{Report, Samples};
use crate::router::Router;
use crate::traffic::{Traffic, Workload};

/// The time between two samples of the workers. Heartbeats reach a router as often.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Settings of a run beside workload and cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Equal seeds give equal runs.
    pub seed: u64,
    /// The number of first requests that count in no latency and no throughput, because caches are empty then.
    pub warm_up: usize,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// The time of the simulation.
    pub now: Duration,
    /// Requests that have ended.
    pub ended: usize,
    /// Requests in flight.
    pub in_flight: usize,
    /// Requests in all.
    pub all: usize,
}

/// Runs until the last request has ended. `watch` is called every second of the simulation.
///
/// # Panics
/// When the core breaks one of its own rules.
pub fn simulate(
    workload: &Workload,
    cluster: &Cluster,
    options: &Options,
    watch: &mut dyn FnMut(Progress),
) -> Report {
    play(workload, cluster, options, watch, &mut None).0
}

/// Like [`simulate`], and also records the run second by second and request by request.
///
/// # Panics
/// See [`simulate`].
pub fn record(
    workload: &Workload,
    cluster: &Cluster,
    options: &Options,
    watch: &mut dyn FnMut(Progress),
) -> (Report, Recording) {
    let mut occupancy = Some(Occupancy::new(cluster));
    let (report, traffic) = play(workload, cluster, options, watch, &mut occupancy);
    (report, occupancy.unwrap_or_default().recording(&traffic))
}

fn play(
    workload: &Workload,
    cluster: &Cluster,
    options: &Options,
    watch: &mut dyn FnMut(Progress),
    occupancy: &mut Option<Occupancy>,
) -> (Report, Traffic) {
    let mut router = Router::new(cluster.router, cluster.page_tokens);
    for workers in &cluster.workers {
        for _ in 0..workers.count {
            router.add(workers.role, cluster.pool_pages(workers), workers.radix_cache);
        }
    }
    let traffic = Traffic::new(workload, router, cluster, options.warm_up);
    let failures = cluster.tier_failures;
    let faults = Faults { missing: failures, copy: failures, ..Faults::default() };
    let mut world = World::new(options.seed, cluster.kv(), faults, Hardware::new(cluster), traffic);
    // Audits look at every page, so they are left out.
    world.audit_every(u64::MAX);
    let mut places = Vec::new();
    for workers in &cluster.workers {
        for _ in 0..workers.count {
            let config = cluster.config(workers, options.seed);
            let limits = PoolLimits::shared(config.pages);
            places.push(world.add(config, limits));
        }
    }
    let mut samples = Samples::new(places.len());
    let mut beat = Time(HEARTBEAT);
    loop {
        let next = world.clients.next();
        match next {
            Some(at) if at < beat => {
                world.run_until(at.max(world.now()));
                if let Some(ask) = world.clients.send(at.max(world.now())) {
                    world.ask(ask);
                }
            }
            None if world.clients.in_flight == 0 && world.clients.has_sent_all() => break,
            _ => {
                world.run_until(beat);
                occupancy.iter_mut().for_each(Occupancy::begin);
                for place in &places {
                    let stats = world.scheduler(*place).stats();
                    world.clients.router.hear(*place, stats.queued);
                    samples.take(*place, &stats);
                    occupancy.iter_mut().for_each(|occupancy| occupancy.take(*place, &stats));
                }
                let (sent, in_flight) = (world.clients.records.len(), world.clients.in_flight);
                watch(Progress { now: beat.0, ended: sent - in_flight, in_flight, all: workload.requests() });
                beat = beat.after(HEARTBEAT);
            }
        }
    }
    let last: Vec<_> = places
        .iter()
        .map(|place| (world.scheduler(*place).stats(), world.scheduler(*place).tier_stats()))
        .collect();
    (Report::new(cluster, &world.clients, &samples, &last), world.clients)
}
