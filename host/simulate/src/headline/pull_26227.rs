//! SGLang's pull request 26227: host memory and storage behind the decode worker's radix cache.
//!
//! Published: a model "Qwen-32B", prefill and decode workers with HiCache over Mooncake, conversations of six rounds whose
//! prompts grow from 4K to 64K tokens. TTFT (mean, p90, p99) and TPOT, without and with the caches behind the decode
//! worker.
//!
//! Not published: machines, numbers of workers, conversations at once, tokens of answers, the decode worker's pool, the
//! link, the time of a decode step. Here there is one worker of each role with two H200, answers have 200 tokens, and 4 or
//! 8 conversations go on at once. The other three are fitted to the baseline row: the step to its TPOT, the link to
//! its mean TTFT, the pool to its TTFT p90.

use super::calibrate::{Free, calibrate};
use super::{Change, Figure, Fitted, Table, row, run};
use crate::cluster::{Cluster, Link, Named};
use crate::traffic::Workload;
use crate::workloads::conversations;

const TTFT: Figure = ("TTFT mean, s", |report| report.figures.ttft_ms.mean / 1e3);
const TPOT: Figure = ("TPOT mean, ms", |report| report.figures.tpot_ms.mean);
const P90: Figure = ("TTFT p90, s", |report| report.figures.ttft_ms.p90 / 1e3);
const FIGURES: [Figure; 5] = [
    TTFT,
    P90,
    ("TTFT p99, s", |report| report.figures.ttft_ms.p99 / 1e3),
    TPOT,
    ("requests renegotiated", |report| report.transfers.renegotiated as f64),
];
const BASELINE: [f64; 4] = [15.36, 36.46, 48.87, 40.31];
const IMPROVED: [f64; 4] = [9.33, 19.30, 23.51, 41.32];

/// Tokens that each round adds. The prompts have 4,000 to 64,000 tokens. Of all prompts together, 68.6 % are earlier rounds: the
/// published share of hits of the baseline.
const ROUNDS: [u32; 6] = [4_000, 12_000, 12_000, 12_000, 12_000, 12_000];
/// Tokens of an answer.
const ANSWER: u32 = 200;

const CLUSTER: &str = "
    model = 'qwen3-32b'
    [[workers]]
    role = 'prefill'
    machine = 'h200'
    tp = 2
    host_memory_gib = 600
    [[workers]]
    role = 'decode'
    machine = 'h200'
    tp = 2
    [[tiers]]
    gigabytes_per_second = 20
    latency_us = 300
    shared = true
";

/// Conversations at once, one for each reading. With 16 the prompts alone take longer than the baseline's mean TTFT.
const CLIENTS: [usize; 2] = [4, 8];
/// The relative error of the TTFT p90 below which the pool counts as fitted.
const CLOSE: f64 = 0.02;

/// Each client has one conversation. All begin together.
fn workload(clients: usize) -> Workload {
    conversations(clients, &ROUNDS, ANSWER, clients)
}

fn step() -> Free {
    Free {
        name: "overhead of a decode step",
        unit: "ms",
        range: [0.1, 100.0],
        set: |cluster, ms| {
            if let Named::Itself(machine) = &mut cluster.workers[1].machine {
                machine.step_seconds = ms / 1e3;
            }
        },
        cell: TPOT.0,
        figure: TPOT.1,
        published: BASELINE[3],
        grows: true,
    }
}

fn link() -> Free {
    Free {
        name: "link",
        unit: "GB/s",
        range: [0.2, 50.0],
        set: |cluster, gigabytes_per_second| {
            cluster.link = Named::Itself(Link::new(gigabytes_per_second, 20.0, 0.0));
        },
        cell: TTFT.0,
        figure: TTFT.1,
        published: BASELINE[0],
        grows: false,
    }
}

/// Thousands of tokens in the decode worker's pool, at least and at most.
const POOL: [u32; 2] = [80, 800];

/// Fits the three constants: the pool by halving its range, and for each size the other two. Their cells depend on each other too
/// much to fit them in turns.
fn fit(cluster: &mut Cluster, workload: &Workload) -> Vec<Fitted> {
    let [mut low, mut high] = POOL;
    loop {
        let thousands = low.midpoint(high);
        cluster.workers[1].pool_tokens = Some(thousands * 1_000);
        let mut constants = calibrate(cluster, workload, &[step(), link()]);
        let waits = (P90.1)(&run(workload, cluster)) / BASELINE[1] - 1.0;
        if waits.abs() < CLOSE || high - low < 2 {
            let (name, unit) = ("pool of the decode worker", "thousand tokens");
            constants.push(Fitted { name, value: f64::from(thousands), unit, cell: P90.0 });
            return constants;
        }
        // A larger pool keeps more of the conversations, and less is sent.
        if waits > 0.0 { low = thousands } else { high = thousands }
    }
}

/// All readings of the table. `watch` is told what is simulated next.
#[must_use]
pub fn pull_26227(watch: &mut dyn FnMut(&str)) -> Vec<Table> {
    CLIENTS.iter().map(|clients| table(*clients, watch)).collect()
}

fn table(clients: usize, watch: &mut dyn FnMut(&str)) -> Table {
    let workload = workload(clients);
    let mut cluster =
        Cluster::parse("pull 26227", CLUSTER).unwrap_or_else(|wrong| unreachable!("a fixed text: {wrong}"));
    let machine = cluster.machine(&cluster.workers[1]);
    cluster.workers[1].machine = Named::Itself(machine);
    watch("calibrating on the baseline row");
    let constants = fit(&mut cluster, &workload);
    let fitted: Vec<&str> = constants.iter().map(|constant| constant.cell).collect();
    let mut rows = vec![row("baseline", &run(&workload, &cluster), &FIGURES, &BASELINE, &fitted)];
    cluster.workers[1].host_memory_gib = 600.0;
    let arms: [(&str, &[f64], Change); 4] = [
        ("host memory and storage behind decode", &IMPROVED, |_| {}),
        ("and layers sent in 8 groups", &[], |cluster| cluster.layer_groups = 8),
        ("and 1 in 1,000 pages cannot be restored", &[], |cluster| cluster.tier_failures = 1e-3),
        ("and 1 in 100 pages cannot be restored", &[], |cluster| cluster.tier_failures = 1e-2),
    ];
    for (name, published, change) in arms {
        watch(name);
        let mut arm = cluster.clone();
        change(&mut arm);
        rows.push(row(name, &run(&workload, &arm), &FIGURES, published, &[]));
    }
    let title = format!("SGLang pull request 26227; {clients} conversations at once");
    Table { title, constants, rows, goodput: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_rounds_are_the_published_share_of_all_prompts() {
        let prompts = ROUNDS.iter().scan(0, |tokens, more| {
            *tokens += more;
            Some(*tokens)
        });
        let all: u32 = prompts.clone().sum();
        let earlier = all - ROUNDS.iter().sum::<u32>();
        assert_eq!(prompts.last(), Some(64_000));
        assert!((f64::from(earlier) / f64::from(all) - 0.686).abs() < 0.001, "{earlier} of {all}");
    }
}
