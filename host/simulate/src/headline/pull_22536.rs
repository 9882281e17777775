//! SGLang's pull request 22536: gathering through staging buffers, where prefill and decode workers divide the heads in
//! different ways.
//!
//! Published (a review comment by the team of NIXL): the TTFT of 1 to 512 prompts that are sent at once, the best of four runs,
//! before and after, with four prefill ranks for four decode ranks (p4d4) and with two for four (p2d4). Before, a rank writes each
//! token of each layer on its own where the ranks differ.
//!
//! Not published: model, machine, lengths of prompts and answers. Here the model is Qwen3-8B on H200, answers have 16 tokens, and
//! prompts 100 or 200. Three constants are fitted to the column before: the fixed time of a step to one prompt over
//! p4d4, the router's time for a request to 256 prompts over p4d4, and the time of a run to 256 prompts over p2d4.

use std::time::Duration;

use host_core::transfer::StagingMode;

use super::calibrate::{Free, calibrate};
use super::{Cell, Row, Table, run};
use crate::cluster::{Cluster, Named};
use crate::report::Report;
use crate::traffic::Workload;
use crate::workloads::unshared;

/// The mean time to the first token, in milliseconds.
const TTFT: fn(&Report) -> f64 = |report| report.figures.ttft_ms.mean;

/// Prompts at once, and the names of their cells.
const PROMPTS: [(usize, &str); 10] = [
    (1, "1 prompt: TTFT, ms"),
    (2, "2 prompts"),
    (4, "4 prompts"),
    (8, "8 prompts"),
    (16, "16 prompts"),
    (32, "32 prompts"),
    (64, "64 prompts"),
    (128, "128 prompts"),
    (256, "256 prompts"),
    (512, "512 prompts"),
];
/// The published times of each number of prompts: before and after, in milliseconds.
const P4D4: [[f64; 10]; 2] = [
    [31.0, 45.0, 47.0, 52.0, 58.0, 94.0, 127.0, 231.0, 327.0, 633.0],
    [31.0, 45.0, 48.0, 51.0, 60.0, 97.0, 127.0, 182.0, 314.0, 577.0],
];
const P2D4: [[f64; 10]; 2] = [
    [34.0, 54.0, 57.0, 70.0, 88.0, 150.0, 226.0, 425.0, 749.0, 2078.0],
    [32.0, 50.0, 53.0, 59.0, 74.0, 115.0, 154.0, 238.0, 355.0, 1437.0],
];
/// The place of 256 prompts in these lists.
const MANY: usize = 8;

/// Tokens of a prompt, one number for each reading.
const TOKENS: [u32; 2] = [100, 200];

const CLUSTER: &str = "
    model = 'qwen3-8b'
    kv_layout = 'layer-kv-page-token-head-dim'
    staging = 'never'
    [[workers]]
    role = 'prefill'
    machine = 'h200'
    tp = 4
    [[workers]]
    role = 'decode'
    machine = 'h200'
    tp = 4
    max_batch = 512
";

fn at_once(prompts: usize, tokens: u32) -> Workload {
    let mut asks = unshared(prompts, tokens, 16);
    asks.iter_mut().for_each(|ask| ask.at = Duration::ZERO);
    Workload::Open(asks)
}

fn step() -> Free {
    Free {
        name: "fixed time of a step",
        unit: "ms",
        range: [1.0, 100.0],
        set: |cluster, ms| {
            for workers in &mut cluster.workers {
                if let Named::Itself(machine) = &mut workers.machine {
                    machine.step_seconds = ms / 1e3;
                }
            }
        },
        cell: "TTFT of 1 prompt, p4d4",
        figure: TTFT,
        published: P4D4[0][0],
        grows: true,
    }
}

fn router() -> Free {
    Free {
        name: "router's time for a request",
        unit: "us",
        range: [10.0, 10_000.0],
        set: |cluster, us| cluster.router_us = us,
        cell: "TTFT of 256 prompts, p4d4",
        figure: TTFT,
        published: P4D4[0][MANY],
        grows: true,
    }
}

fn writing() -> Free {
    Free {
        name: "a run",
        unit: "us",
        range: [0.01, 10.0],
        set: |cluster, us| {
            if let Named::Itself(link) = &mut cluster.link {
                link.run_us = us;
            }
        },
        cell: "TTFT of 256 prompts, p2d4",
        figure: TTFT,
        published: P2D4[0][MANY],
        grows: true,
    }
}

/// Both readings of the table. `watch` is told what is simulated next.
#[must_use]
pub fn pull_22536(watch: &mut dyn FnMut(&str)) -> Vec<Table> {
    TOKENS.iter().map(|tokens| table(*tokens, watch)).collect()
}

fn table(tokens: u32, watch: &mut dyn FnMut(&str)) -> Table {
    let mut cluster =
        Cluster::parse("pull 22536", CLUSTER).unwrap_or_else(|wrong| unreachable!("a fixed text: {wrong}"));
    cluster.link = Named::Itself(cluster.link());
    for place in 0..cluster.workers.len() {
        let machine = cluster.machine(&cluster.workers[place]);
        cluster.workers[place].machine = Named::Itself(machine);
    }
    watch("calibrating on the baseline row");
    let mut constants = Vec::new();
    // Twice, because each depends a little on the other.
    for _ in 0..2 {
        constants = calibrate(&mut cluster, &at_once(1, tokens), &[step()]);
        constants.extend(calibrate(&mut cluster, &at_once(PROMPTS[MANY].0, tokens), &[router()]));
    }
    cluster.workers[0].tp = 2;
    constants.extend(calibrate(&mut cluster, &at_once(PROMPTS[MANY].0, tokens), &[writing()]));

    let mut rows = Vec::new();
    let arms = [
        ("p2d4 before", 2, StagingMode::Never, P2D4[0], &[MANY][..]),
        ("p2d4 after", 2, StagingMode::Auto, P2D4[1], &[]),
        ("p4d4 before", 4, StagingMode::Never, P4D4[0], &[0, MANY]),
        ("p4d4 after", 4, StagingMode::Auto, P4D4[1], &[]),
    ];
    for (name, ranks, staging, published, fitted) in arms {
        watch(name);
        let mut arm = Cluster { staging, ..cluster.clone() };
        arm.workers[0].tp = ranks;
        rows.push(row(name, &arm, tokens, Some((published, fitted))));
    }
    let own = "p2d4 in the order of this host's pools, without staging";
    watch(own);
    let arm = Cluster { kv_layout: Cluster::default_kv_layout(), ..cluster };
    rows.push(row(own, &arm, tokens, None));
    let title = format!("SGLang pull request 22536; prompts of {tokens} tokens");
    Table { title, constants, rows, goodput: Vec::new() }
}

/// One configuration with each number of prompts. `published` has the published values, and the places of those that constants
/// were fitted to.
fn row(name: &str, cluster: &Cluster, tokens: u32, published: Option<([f64; 10], &[usize])>) -> Row {
    let cells = PROMPTS.iter().enumerate().map(|(place, (prompts, name))| Cell {
        name,
        published: published.map(|(values, _)| values[place]),
        simulated: TTFT(&run(&at_once(*prompts, tokens), cluster)),
        fitted: published.is_some_and(|(_, fitted)| fitted.contains(&place)),
    });
    Row { name: name.to_owned(), cells: cells.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_saves_time_where_ranks_differ_and_costs_none_where_they_do_not() {
        let mut cluster = Cluster::parse("pull 22536", CLUSTER).unwrap();
        cluster.link = Named::Itself(cluster.link());
        (writing().set)(&mut cluster, 0.26);
        let mut first = |ranks, staging| {
            cluster.workers[0].tp = ranks;
            cluster.staging = staging;
            TTFT(&run(&at_once(32, TOKENS[0]), &cluster))
        };
        let [equal, differing] = [4, 2].map(|ranks| {
            let [before, after] =
                [StagingMode::Never, StagingMode::Auto].map(|staging| first(ranks, staging));
            before / after
        });
        assert!(differing > 1.3, "p2d4 takes {differing} times as long without staging");
        assert!((equal - 1.0).abs() < 1e-9, "p4d4 takes {equal} times as long without staging");
    }
}
