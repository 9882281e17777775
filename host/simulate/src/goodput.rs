//! Goodput: the highest rate of arrivals at which latencies stay within limits.
//!
//! Under open arrivals time to the first token and time between tokens can both gain from a change. In a closed loop they cannot:
//! by Little's law a loop of fixed size that is answered sooner in one asks more of the other.

use serde::Serialize;

use crate::cluster::Cluster;
use crate::report::Report;
use crate::traffic::Workload;
use crate::{Options, simulate};

/// What 99 of 100 requests and tokens must stay under, in milliseconds.
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
        report.requests.failed == 0
            && report.ttft_ms.p99 <= self.ttft_p99_ms
            && report.itl_ms.p99 <= self.itl_p99_ms
    }
}

/// What a search has found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// The limits.
    pub limits: Limits,
    /// Requests per second, or 0 when not even the slowest rate that was tried stays within the limits.
    pub requests_per_s: f64,
    /// What came of that rate, or of the slowest one.
    pub report: Report,
}

/// Where to search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Search {
    /// The rate that is tried first, in requests per second.
    pub from: f64,
    /// The search ends when the rate is known to this share of it.
    pub precision: f64,
    /// Doublings, and halvings, of the first rate at most.
    pub doublings: usize,
}

impl Default for Search {
    fn default() -> Self {
        Self { from: 1.0, precision: 0.02, doublings: 12 }
    }
}

/// Searches the goodput of a cluster. `workload` makes requests that arrive at a rate, the same ones at each.
///
/// That latencies grow with the rate is taken for granted. Where they do not, the rate that is found stays within the limits, and
/// one that is higher by less than twice the precision does not.
pub fn search(
    workload: &dyn Fn(f64) -> Workload,
    cluster: &Cluster,
    limits: Limits,
    search: Search,
    options: &Options,
) -> Goodput {
    let run = |rate: f64| simulate(&workload(rate), cluster, options, &mut |_| {});
    let found = |requests_per_s, report| Goodput { limits, requests_per_s, report };
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
            if left == 0 {
                return found(0.0, report);
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
    found(good.0, good.1)
}
