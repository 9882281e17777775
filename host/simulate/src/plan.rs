//! Capacity planning: which workers keep latencies within limits on the fewest devices.
//!
//! An *arrangement* says how work is divided: aggregated workers, or prefill and decode workers, each with so many devices and so much
//! host memory. For each arrangement the fewest workers are searched with which a workload stays within the limits. That more workers
//! of a role never make latencies longer is taken for granted.

mod table;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cluster::{Cluster, Role, Workers};
use crate::goodput::Limits;
use crate::report::Report;
use crate::traffic::Workload;
use crate::{Options, simulate};

/// What is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Wish {
    /// The latencies to stay within.
    pub limits: Limits,
    /// Devices that one worker may have.
    pub tp: Vec<usize>,
    /// Sizes of a worker's host memory.
    pub host_memory_gib: Vec<f64>,
    /// Devices in all, at most.
    pub most_devices: usize,
}

/// How work is divided.
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
    /// What came of the workload on them.
    pub report: Report,
}

/// An arrangement, and what was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The arrangement.
    pub arrangement: Arrangement,
    /// Its fewest workers, or why there are none.
    pub fewest: Result<Fewest, String>,
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

    /// A cluster of so many workers, which are otherwise like those of `like`.
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
}

/// Searches the fewest devices. Workers are like those of `like`, but for their number, devices and host memory. Where
/// `like` has none of a role, those of another role stand in. `watch` is told what is simulated next.
pub fn plan(
    workload: &Workload,
    like: &Cluster,
    wish: &Wish,
    options: &Options,
    watch: &mut dyn FnMut(&str),
) -> Plan {
    let mut search = Search { workload, like, wish, options, watch, runs: 0 };
    let mut rows = Vec::new();
    for host_memory_gib in &wish.host_memory_gib {
        for answers_tp in &wish.tp {
            for prefill_tp in std::iter::once(None).chain(wish.tp.iter().map(|tp| Some(*tp))) {
                let arrangement =
                    Arrangement { prefill_tp, answers_tp: *answers_tp, host_memory_gib: *host_memory_gib };
                rows.push(Row { arrangement, fewest: search.fewest(arrangement) });
            }
        }
    }
    let devices = |row: &Row| row.fewest.as_ref().map_or(usize::MAX, |fewest| fewest.devices);
    rows.sort_by_key(devices);
    Plan { limits: wish.limits, runs: search.runs, rows }
}

impl Search<'_> {
    fn fewest(&mut self, arrangement: Arrangement) -> Result<Fewest, String> {
        arrangement.cluster(self.like, 1, 1).check().map_err(|(_, what)| what)?;
        let (most, answers_tp) = (self.wish.most_devices, arrangement.answers_tp);
        let mut known = BTreeMap::new();
        let mut best: Option<Fewest> = None;
        let Some(prefill_tp) = arrangement.prefill_tp else {
            let found = self.least(arrangement, 0, most / answers_tp, &mut known);
            return found.ok_or_else(|| self.too_few(&known));
        };
        for prefill in 1.. {
            // Running a cluster with more prefill workers pays only if it is smaller in all.
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

    /// The fewest workers that answer, up to `most`, beside so many prefill workers.
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
            simulate(self.workload, &cluster, self.options, &mut |_| {})
        });
        self.wish.limits.hold(report)
    }

    /// Why no number of workers is enough: the latencies of the largest cluster that was tried.
    fn too_few(&self, known: &BTreeMap<(usize, usize), Report>) -> String {
        let most = self.wish.most_devices;
        let reports = known.values().filter(|report| report.requests.failed == 0);
        let nearest = reports.min_by(|one, other| one.ttft_ms.p99.total_cmp(&other.ttft_ms.p99));
        match nearest {
            None => format!("not within {most} devices"),
            Some(report) => format!(
                "not within {most} devices: TTFT p99 {:.0} ms, ITL p99 {:.1} ms at best",
                report.ttft_ms.p99, report.itl_ms.p99
            ),
        }
    }
}
