//! Capacity planning: which workers keep latencies within limits on the fewest devices.
//!
//! An *arrangement* says how work is divided: aggregated workers, or prefill and decode workers, each with a number of devices and a
//! size of host memory. The search finds, for each arrangement, the fewest workers with which a workload stays within the limits. It
//! assumes that more workers of a role never make a latency longer.

mod table;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cluster::{Cluster, Role, Workers};
use crate::goodput::Limits;
use crate::report::Report;
use crate::traffic::Workload;
use crate::{Options, simulate};

/// What a plan searches for: latency limits, and the workers that it may use.
#[derive(Clone, Debug, PartialEq)]
pub struct Wish {
    /// Limits of both latencies.
    pub limits: Limits,
    /// Numbers of devices that a worker may have.
    pub tp: Vec<usize>,
    /// Sizes of host memory that a worker may have.
    pub host_memory_gib: Vec<f64>,
    /// Largest number of devices of all workers together.
    pub most_devices: usize,
}

/// How work is divided over kinds of workers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Arrangement {
    /// Devices of each prefill worker, or `None` where workers are aggregated.
    pub prefill_tp: Option<usize>,
    /// Devices of each decode or aggregated worker.
    pub answers_tp: usize,
    /// Host memory of each worker.
    pub host_memory_gib: f64,
}

/// The fewest workers of an arrangement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fewest {
    /// Prefill workers, or none where workers are aggregated.
    pub prefill: usize,
    /// Decode or aggregated workers.
    pub answers: usize,
    /// Devices of all of them.
    pub devices: usize,
    /// The report of the workload on them.
    pub report: Report,
}

/// A cluster that was simulated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// Prefill workers, or none where workers are aggregated.
    pub prefill: usize,
    /// Decode or aggregated workers.
    pub answers: usize,
    /// Devices of all of them.
    pub devices: usize,
    /// Time to the first token that 99 of 100 requests stayed under.
    pub ttft_p99_ms: f64,
    /// Time between two tokens that 99 of 100 stayed under.
    pub itl_p99_ms: f64,
    /// Requests that were not answered.
    pub failed: usize,
    /// Whether the cluster stayed within the limits, with every request answered.
    pub holds: bool,
}

/// An arrangement and the result of its search.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The arrangement.
    pub arrangement: Arrangement,
    /// The fewest workers that keep the limits, or the reason why no number of them does.
    pub fewest: Result<Fewest, String>,
    /// Its clusters that were simulated, those of the fewest devices first.
    pub tried: Vec<Tried>,
}

/// All arrangements, those of the fewest devices first.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The limits.
    pub limits: Limits,
    /// Runs that the search took.
    pub runs: usize,
    /// The arrangements.
    pub rows: Vec<Row>,
}

impl Arrangement {
    fn devices(&self, prefill: usize, answers: usize) -> usize {
        self.prefill_tp.unwrap_or(0) * prefill + self.answers_tp * answers
    }

    /// The cluster with these numbers of workers. Everything else of a worker is as in `like`.
    fn cluster(&self, like: &Cluster, prefill: usize, answers: usize) -> Cluster {
        let find = |roles: [Role; 3]| {
            let of = |role: Role| like.workers.iter().find(move |workers| workers.role == role);
            roles.into_iter().find_map(of)
        };
        let worker = |role: Role, count: usize, tp: usize, roles: [Role; 3]| {
            let host_memory_gib = self.host_memory_gib;
            find(roles).map(|workers| Workers { role, count, tp, host_memory_gib, ..workers.clone() })
        };
        let (p, d, a) = (Role::Prefill, Role::Decode, Role::Aggregated);
        let workers = match self.prefill_tp {
            Some(tp) => {
                vec![worker(p, prefill, tp, [p, a, d]), worker(d, answers, self.answers_tp, [d, a, p])]
            }
            None => vec![worker(a, answers, self.answers_tp, [a, d, p])],
        };
        Cluster { workers: workers.into_iter().flatten().collect(), ..like.clone() }
    }
}

struct Search<'a> {
    workload: &'a Workload,
    like: &'a Cluster,
    wish: &'a Wish,
    options: &'a Options,
    watch: &'a mut dyn FnMut(&str),
    runs: usize,
    /// Clusters of the current arrangement that were simulated.
    tried: Vec<Tried>,
}

/// Searches the fewest devices. Workers are as in `like`, except for their number, devices and host memory. If `like` has no worker of
/// a role, the search takes a worker of another role instead. `watch` gets a line about each run before it begins.
pub fn plan(
    workload: &Workload,
    like: &Cluster,
    wish: &Wish,
    options: &Options,
    watch: &mut dyn FnMut(&str),
) -> Plan {
    let mut search = Search { workload, like, wish, options, watch, runs: 0, tried: Vec::new() };
    let mut rows = Vec::new();
    for host_memory_gib in &wish.host_memory_gib {
        for answers_tp in &wish.tp {
            for prefill_tp in std::iter::once(None).chain(wish.tp.iter().map(|tp| Some(*tp))) {
                let arrangement =
                    Arrangement { prefill_tp, answers_tp: *answers_tp, host_memory_gib: *host_memory_gib };
                let fewest = search.fewest(arrangement);
                let mut tried = std::mem::take(&mut search.tried);
                tried.sort_by_key(|cluster| (cluster.devices, cluster.prefill));
                rows.push(Row { arrangement, fewest, tried });
            }
        }
    }
    let devices = |row: &Row| row.fewest.as_ref().map_or(usize::MAX, |fewest| fewest.devices);
    rows.sort_by_key(devices);
    Plan { limits: wish.limits, runs: search.runs, rows }
}

impl Search<'_> {
    fn fewest(&mut self, arrangement: Arrangement) -> Result<Fewest, String> {
        let (most, answers_tp) = (self.wish.most_devices, arrangement.answers_tp);
        arrangement.cluster(self.like, 1, 1).check().map_err(|(_, what)| what)?;
        let many = |tp: usize| (most / tp).max(1);
        for (prefill, answers) in [(many(arrangement.prefill_tp.unwrap_or(1)), 1), (1, many(answers_tp))] {
            let largest = arrangement.cluster(self.like, prefill, answers);
            largest.check().map_err(|(key, what)| format!("{key}: {what}"))?;
        }
        let mut known = BTreeMap::new();
        let mut best: Option<Fewest> = None;
        let Some(prefill_tp) = arrangement.prefill_tp else {
            let found = self.least(arrangement, 0, most / answers_tp, &mut known);
            return found.ok_or_else(|| self.too_few(&known));
        };
        for prefill in 1.. {
            // A cluster with more prefill workers is of interest only if it has fewer devices than the best one so far.
            let bound = best.as_ref().map_or(most, |best| best.devices - 1);
            let Some(left) = bound.checked_sub(prefill * prefill_tp).filter(|left| *left >= answers_tp)
            else {
                break;
            };
            if let Some(found) = self.least(arrangement, prefill, left / answers_tp, &mut known) {
                best = Some(found);
            }
        }
        best.ok_or_else(|| self.too_few(&known))
    }

    /// The fewest decode or aggregated workers, up to `most`, that keep the limits beside this number of prefill workers.
    fn least(
        &mut self,
        arrangement: Arrangement,
        prefill: usize,
        most: usize,
        known: &mut BTreeMap<(usize, usize), Report>,
    ) -> Option<Fewest> {
        if most == 0 || !self.holds(arrangement, (prefill, most), known) {
            return None;
        }
        let (mut bad, mut good) = (0, most);
        while good - bad > 1 {
            let middle = bad + (good - bad) / 2;
            match self.holds(arrangement, (prefill, middle), known) {
                true => good = middle,
                false => bad = middle,
            }
        }
        let report = known.remove(&(prefill, good))?;
        Some(Fewest { prefill, answers: good, devices: arrangement.devices(prefill, good), report })
    }

    fn holds(
        &mut self,
        arrangement: Arrangement,
        (prefill, answers): (usize, usize),
        known: &mut BTreeMap<(usize, usize), Report>,
    ) -> bool {
        let report = known.entry((prefill, answers)).or_insert_with(|| {
            self.runs += 1;
            let devices = arrangement.devices(prefill, answers);
            (self.watch)(&format!("run {}: {prefill} + {answers} workers, {devices} devices", self.runs));
            let cluster = arrangement.cluster(self.like, prefill, answers);
            let report = simulate(self.workload, &cluster, self.options, &mut |_| {});
            let (ttft_p99_ms, itl_p99_ms) = (report.figures.ttft_ms.p99, report.figures.itl_ms.p99);
            let (failed, holds) = (report.figures.requests.failed, self.wish.limits.hold(&report));
            self.tried.push(Tried { prefill, answers, devices, ttft_p99_ms, itl_p99_ms, failed, holds });
            report
        });
        self.wish.limits.hold(report)
    }

    /// Why no number of workers is enough, with the latencies of the cluster whose TTFT was lowest.
    fn too_few(&self, known: &BTreeMap<(usize, usize), Report>) -> String {
        let most = self.wish.most_devices;
        let reports = known.values().filter(|report| report.figures.requests.failed == 0);
        let nearest =
            reports.min_by(|one, other| one.figures.ttft_ms.p99.total_cmp(&other.figures.ttft_ms.p99));
        match nearest {
            None => format!("not within {most} devices"),
            Some(report) => format!(
                "not within {most} devices: TTFT p99 {:.0} ms, ITL p99 {:.1} ms at best",
                report.figures.ttft_ms.p99, report.figures.itl_ms.p99
            ),
        }
    }
}
