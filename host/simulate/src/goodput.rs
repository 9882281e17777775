//! Goodput: the highest rate of arrivals at which latencies stay within limits.
//!
//! With open arrivals a change can improve both the time to the first token and the time between tokens. In a closed loop it cannot:
//! the number of requests in flight is fixed, so by Little's law a gain in one latency raises the load on the other.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cluster::Cluster;
use crate::report::Report;
use crate::traffic::Workload;
use crate::{Options, simulate};

/// Limits for 99 of 100 requests and tokens, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Limits {
    /// Time to the first token.
    pub ttft_p99_ms: f64,
    /// Time between two tokens of an answer.
    pub itl_p99_ms: f64,
}

impl Limits {
    /// Whether a run stays within them, with every request answered.
    #[must_use]
    pub fn hold(&self, report: &Report) -> bool {
        report.figures.requests.failed == 0
            && report.figures.ttft_ms.p99 <= self.ttft_p99_ms
            && report.figures.itl_ms.p99 <= self.itl_p99_ms
    }
}

/// A rate that a search tried.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// The rate, in requests per second.
    pub requests_per_s: f64,
    /// Time to the first token that 99 of 100 requests stayed under.
    pub ttft_p99_ms: f64,
    /// Time between two tokens that 99 of 100 stayed under.
    pub itl_p99_ms: f64,
    /// Requests that were not answered.
    pub failed: usize,
    /// Whether the run stayed within the limits, with every request answered.
    pub holds: bool,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// The limits.
    pub limits: Limits,
    /// Requests per second, or 0 when not even the slowest rate that was tried stays within the limits.
    pub requests_per_s: f64,
    /// The report of that rate, or of the slowest one that was tried if none stays within the limits.
    pub report: Report,
    /// All rates that were tried, the slowest first.
    pub tried: Vec<Tried>,
}

/// Bounds of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Search {
    /// The rate that is tried first, in requests per second.
    pub from: f64,
    /// The search ends when the rate is known to this share of it.
    pub precision: f64,
    /// Doublings, and halvings, of the first rate at most.
    pub doublings: usize,
    /// No slower rate than this is tried.
    pub slowest: f64,
}

impl Default for Search {
    fn default() -> Self {
        Self { from: 1.0, precision: 0.02, doublings: 12, slowest: 0.0 }
    }
}

/// Searches the goodput of a cluster. `workload` makes requests that arrive at a rate, the same ones at each.
///
/// The search assumes that latencies grow with the rate. Where they do not, the rate that it finds still stays within the limits, and a
/// rate that is higher by less than twice the precision does not.
pub fn search(
    workload: &dyn Fn(f64) -> Workload,
    cluster: &Cluster,
    limits: Limits,
    search: Search,
    options: &Options,
) -> Goodput {
    let mut runs = BTreeMap::new();
    within(&mut |rate| simulate(&workload(rate), cluster, options, &mut |_| {}), &mut runs, limits, search)
}

/// Searches the goodput of a cluster for each of some limits, like [`search`]. Each rate is simulated once.
pub fn frontier(
    workload: &dyn Fn(f64) -> Workload,
    cluster: &Cluster,
    limits: &[Limits],
    search: Search,
    options: &Options,
) -> Vec<Goodput> {
    let mut runs = BTreeMap::new();
    let mut at = |rate| simulate(&workload(rate), cluster, options, &mut |_| {});
    limits.iter().map(|limits| within(&mut at, &mut runs, *limits, search)).collect()
}

/// Searches for one pair of limits. `runs` has the reports so far, by the bits of their rates.
fn within(
    at: &mut dyn FnMut(f64) -> Report,
    runs: &mut BTreeMap<u64, Report>,
    limits: Limits,
    search: Search,
) -> Goodput {
    let mut tried = Vec::new();
    let mut run = |rate: f64| {
        let report = runs.entry(rate.to_bits()).or_insert_with(|| at(rate)).clone();
        let (ttft_p99_ms, itl_p99_ms) = (report.figures.ttft_ms.p99, report.figures.itl_ms.p99);
        let (failed, holds) = (report.figures.requests.failed, limits.hold(&report));
        tried.push(Tried { requests_per_s: rate, ttft_p99_ms, itl_p99_ms, failed, holds });
        report
    };
    let (requests_per_s, report) = highest(&mut run, limits, search);
    tried.sort_by(|one, other| one.requests_per_s.total_cmp(&other.requests_per_s));
    Goodput { limits, requests_per_s, report, tried }
}

/// The highest rate that keeps the limits, with its report. If none does: 0, with the report of the slowest rate that was tried.
fn highest(run: &mut dyn FnMut(f64) -> Report, limits: Limits, search: Search) -> (f64, Report) {
    let mut report = run(search.from);
    let (mut good, mut bad);
    if limits.hold(&report) {
        good = (search.from, report);
        bad = None;
        for _ in 0..search.doublings {
            let rate = good.0 * 2.0;
            let report = run(rate);
            if !limits.hold(&report) {
                bad = Some(rate);
                break;
            }
            good = (rate, report);
        }
    } else {
        let mut rate = search.from;
        let mut left = search.doublings;
        loop {
            if left == 0 || rate / 2.0 < search.slowest {
                return (0.0, report);
            }
            left -= 1;
            bad = Some(rate);
            rate /= 2.0;
            report = run(rate);
            if limits.hold(&report) {
                good = (rate, report);
                break;
            }
        }
    }
    while let Some(over) = bad.filter(|over| over / good.0 > 1.0 + search.precision) {
        let rate = (good.0 * over).sqrt();
        let report = run(rate);
        match limits.hold(&report) {
            true => good = (rate, report),
            false => bad = Some(rate),
        }
    }
    good
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workloads::{poisson, unshared};

    #[test]
    fn a_frontier_has_what_a_search_for_each_pair_of_limits_finds_and_tries_no_rate_twice() {
        let text = "model = 'qwen3-32b'\n[[workers]]\nrole = 'aggregated'\nmachine = 'b200'\ntp = 2";
        let cluster = Cluster::parse("cluster.toml", text).unwrap();
        let limits = [(900.0, 60.0), (2_000.0, 60.0), (900.0, 200.0)]
            .map(|(ttft_p99_ms, itl_p99_ms)| Limits { ttft_p99_ms, itl_p99_ms });
        let from = Search { from: 4.0, precision: 0.2, ..Search::default() };
        let runs = std::cell::RefCell::new(Vec::new());
        let workload = |rate| {
            runs.borrow_mut().push(rate);
            poisson(unshared(40, 2_000, 20), rate, 1)
        };
        let options = Options::default();
        let found = frontier(&workload, &cluster, &limits, from, &options);
        let mut rates = runs.take();
        rates.sort_by(f64::total_cmp);
        assert!(rates.windows(2).all(|pair| pair[0] < pair[1]), "a rate was tried twice: {rates:?}");
        for (limits, found) in limits.iter().zip(found) {
            assert!(found.requests_per_s > 0.0, "{found}");
            assert_eq!(found, search(&workload, &cluster, *limits, from, &options));
        }
        assert!(runs.take().len() > rates.len(), "the searches have no rate in common");
    }
}
