//! SGLang's pull request 19746: a radix cache on the decode worker.
//!
//! Published: Qwen3-32B with FP8 KV on one machine with eight B200. There are three prefill workers and one decode
//! worker of two devices each. The load is 1,000 requests, 128 at a time, with one of 20 beginnings of 50,000 tokens and
//! 4,500 tokens behind it. About 37 requests ran on the baseline's decode worker, with 99 % of its pool in use: a pool
//! of two million tokens, which is what 90 % of 360 GB leave beside 64 GB of weights. Answers have 355 tokens (430
//! tokens a second at 1.21 requests).
//!
//! Not published: the time of a decode step beside reading weights and KV, and the speed of the link. The first is fitted
//! to the baseline's ITL, the second to its requests per second.

use super::calibrate::{Free, calibrate};
use super::{Arm, Change, Figure, Row, Table, row, run};
use crate::Options;
use crate::cluster::{Cluster, Link, Named, Policy};
use crate::goodput::{Limits, Search, frontier};
use crate::machine::Machine;
use crate::traffic::Workload;
use crate::workloads::{SharedPrefixes, poisson};

const REQUESTS: Figure = ("requests/s", |report| report.figures.throughput.requests_per_s);
const ITL: Figure = ("ITL mean, ms", |report| report.figures.itl_ms.mean);

const FIGURES: [Figure; 7] = [
    REQUESTS,
    ("output tokens/s", |report| report.figures.throughput.output_tokens_per_s),
    ("TTFT p50, s", |report| report.figures.ttft_ms.p50 / 1e3),
    ("TTFT mean, s", |report| report.figures.ttft_ms.mean / 1e3),
    ("E2E p50, s", |report| report.figures.e2e_ms.p50 / 1e3),
    ITL,
    ("duration, s", |report| report.figures.duration_s),
];
const BASELINE: [f64; 7] = [1.21, 430.0, 73.2, 77.7, 99.1, 65.6, 827.0];
const IMPROVED: [f64; 7] = [1.59, 566.0, 9.0, 31.6, 73.4, 130.6, 628.0];

/// Requests in flight at once.
const CONCURRENCY: usize = 128;
/// Requests of a search for goodput, and how many of them fill the caches first. A prompt that is not cached takes three
/// seconds. So with one such prompt in a hundred, no rate keeps two seconds.
const ARRIVALS: usize = 600;
const WARM_UP: usize = 100;
/// The limits of such searches, in milliseconds: each of the first with each of the second.
const TTFT_P99: [f64; 5] = [1_000.0, 2_000.0, 5_000.0, 10_000.0, 30_000.0];
const ITL_P99: [f64; 4] = [60.0, 80.0, 120.0, 200.0];
/// The target of an arm, as a share of the limit: the target is a mean, and 99 in 100 must keep the limit.
const TARGET: f64 = 15.0 / 16.0;

const CLUSTER: &str = "
    model = 'qwen3-32b'
    kv = 'fp8'
    [[workers]]
    role = 'prefill'
    count = 3
    machine = 'b200'
    tp = 2
    [[workers]]
    role = 'decode'
    machine = 'b200'
    tp = 2
    radix_cache = false
";

fn decode(cluster: &mut Cluster, set: impl FnOnce(&mut Machine)) {
    let workers = &mut cluster.workers[1];
    let Named::Itself(machine) = &mut workers.machine else { return };
    set(machine);
}

fn link(cluster: &mut Cluster, gigabytes_per_second: f64) {
    cluster.link = Named::Itself(Link::new(gigabytes_per_second, 20.0, 0.0));
}

fn speed_of_the_link() -> Free {
    Free {
        name: "link",
        unit: "GB/s",
        range: [2.0, 100.0],
        set: link,
        cell: REQUESTS.0,
        figure: REQUESTS.1,
        published: BASELINE[0],
        grows: true,
    }
}

/// Both readings of the table. `watch` is told what is simulated next.
#[must_use]
pub fn pull_19746(watch: &mut dyn FnMut(&str)) -> Vec<Table> {
    let overhead = Free {
        name: "overhead of a decode step",
        unit: "ms",
        range: [1.0, 100.0],
        set: |cluster, ms| decode(cluster, |machine| machine.step_seconds = ms / 1e3),
        cell: ITL.0,
        figure: ITL.1,
        published: BASELINE[5],
        grows: true,
    };
    let bandwidth = Free {
        name: "share of the memory's bandwidth",
        unit: "",
        range: [0.05, 1.0],
        set: |cluster, share| decode(cluster, |machine| machine.bandwidth_efficiency = share),
        cell: ITL.0,
        figure: ITL.1,
        published: BASELINE[5],
        grows: false,
    };
    [("ITL is explained by a fixed time per step", overhead), ("ITL is explained by slow reading", bandwidth)]
        .into_iter()
        .map(|(reading, constant)| table(reading, constant, watch))
        .collect()
}

fn table(reading: &str, constant: Free, watch: &mut dyn FnMut(&str)) -> Table {
    let asks = SharedPrefixes::PULL_19746.asks(0);
    let workload = Workload::Closed { asks, concurrency: CONCURRENCY };
    let mut cluster =
        Cluster::parse("pull 19746", CLUSTER).unwrap_or_else(|wrong| unreachable!("a fixed text: {wrong}"));
    let machine = cluster.machine(&cluster.workers[1]);
    cluster.workers[1].machine = Named::Itself(machine);
    watch("calibrating on the baseline row");
    let constants = calibrate(&mut cluster, &workload, &[constant, speed_of_the_link()]);
    let fitted: Vec<&str> = constants.iter().map(|constant| constant.cell).collect();
    let mut rows = vec![row("baseline", &run(&workload, &cluster), &FIGURES, &BASELINE, &fitted)];
    cluster.workers[1].radix_cache = true;
    let arms: [(&str, &[f64], Change); 5] = [
        ("radix cache on decode", &IMPROVED, |_| {}),
        ("and a target of 80 ms", &[], |cluster| cluster.workers[1].target_itl_ms = Some(80.0)),
        ("and layers sent in 8 groups", &[], |cluster| cluster.layer_groups = 8),
        ("radix cache, no shared transfers", &IMPROVED, |cluster| cluster.share_transfers = false),
        ("two prefill and two decode workers", &[], |cluster| {
            cluster.workers[0].count = 2;
            cluster.workers[1].count = 2;
        }),
    ];
    for (name, published, change) in arms {
        watch(name);
        let mut arm = cluster.clone();
        change(&mut arm);
        rows.push(row(name, &run(&workload, &arm), &FIGURES, published, &[]));
    }
    rows.extend(larger(&cluster, watch));
    let goodput = goodput(&cluster, watch);
    Table { title: format!("SGLang pull request 19746; {reading}"), constants, rows, goodput }
}

/// Two, four and eight times the cluster and its load, routed by prefix and in turn. The number of prefixes stays 20.
fn larger(cluster: &Cluster, watch: &mut dyn FnMut(&str)) -> Vec<Row> {
    let (size, load) = (cluster.workers[0].count, SharedPrefixes::PULL_19746.requests);
    let routed = [2, 4, 8]
        .map(|times| [("by prefix", Policy::Prefix), ("in turn", Policy::RoundRobin)].map(|by| (times, by)));
    let arm = |(times, (by, router)): (usize, (&str, Policy))| {
        let name = format!("{} prefill, {times} decode, routed {by}", size * times);
        watch(&name);
        let mut arm = Cluster { router, ..cluster.clone() };
        (arm.workers[0].count, arm.workers[1].count) = (size * times, times);
        let asks = SharedPrefixes { requests: load * times, ..SharedPrefixes::PULL_19746 }.asks(0);
        let workload = Workload::Closed { asks, concurrency: CONCURRENCY * times };
        row(&name, &run(&workload, &arm), &FIGURES, &[], &[])
    };
    routed.into_iter().flatten().map(arm).collect()
}

/// The goodput of each arm. Requests are of the same kind, and arrive independently of each other.
fn goodput(cluster: &Cluster, watch: &mut dyn FnMut(&str)) -> Vec<Arm> {
    let asks = SharedPrefixes { requests: ARRIVALS, ..SharedPrefixes::PULL_19746 }.asks(0);
    let workload = |rate| poisson(asks.clone(), rate, 1);
    let from = Search { from: 0.8, precision: 0.03, doublings: 5, ..Search::default() };
    let options = Options { warm_up: WARM_UP, ..Options::default() };
    let arms = [
        ("baseline", false, false),
        ("radix cache on decode", true, false),
        ("a target of 15/16 of the ITL's limit", false, true),
        ("cache and such a target", true, true),
    ];
    let arm = |(name, cached, has_target): (&str, bool, bool)| {
        let mut goodput = Vec::new();
        for itl in ITL_P99.chunks(if has_target { 1 } else { ITL_P99.len() }) {
            watch(&format!("goodput: {name}, ITL p99 up to {} ms", itl[itl.len() - 1]));
            let mut cluster = cluster.clone();
            cluster.workers[1].radix_cache = cached;
            cluster.workers[1].target_itl_ms = has_target.then_some(itl[0] * TARGET);
            let with = |itl_p99_ms: &f64| {
                TTFT_P99.map(|ttft_p99_ms| Limits { ttft_p99_ms, itl_p99_ms: *itl_p99_ms })
            };
            let limits: Vec<Limits> = itl.iter().flat_map(with).collect();
            goodput.extend(frontier(&workload, &cluster, &limits, from, &options));
        }
        Arm { name: name.to_owned(), goodput }
    };
    arms.into_iter().map(arm).collect()
}
