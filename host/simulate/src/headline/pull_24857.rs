//! SGLang's pull request 24857: decode workers allocate the tail of a prompt's windows, instead of windows for the whole
//! prompt.
//!
//! Published: DeepSeek-V4-Pro on GB300, twelve prefill workers of four devices and one decode worker of twelve; 16,384
//! prompts of 8,192 tokens, answers of 1,024, 4,096 requests at once; output tokens per second, mean TTFT and TPOT.
//!
//! Here a quarter of the cluster has a quarter of the load, and the throughput is a quarter of the published one. The TPOT gives the
//! time of a decode step. Not published: what limits the throughput before. There are two readings: the prefill workers, whose time
//! for a token is fitted to the throughput, and the decode worker's pool, whose size is. Four fifths of the KV before are those of
//! sliding layers, which is an assumption: these layers do not compress, and the others compress by four.

use super::calibrate::{Free, calibrate};
use super::{Figure, Fitted, Table, row, run};
use crate::cluster::{Cluster, MeasuredStep, Named};
use crate::model::{Model, Sliding};
use crate::traffic::Workload;
use crate::workloads::unshared;

const OUTPUT: Figure = ("output tokens/s", |report| report.figures.throughput.output_tokens_per_s);
const TPOT: Figure = ("TPOT mean, ms", |report| report.figures.tpot_ms.mean);
const FIGURES: [Figure; 4] = [
    OUTPUT,
    ("TTFT mean, ms", |report| report.figures.ttft_ms.mean),
    TPOT,
    ("pages held by the decode worker, mean %", |report| {
        report.workers.last().map_or(0.0, |worker| worker.used_mean * 100.0)
    }),
];
/// The share of the published cluster and load that is simulated.
const SHARE: f64 = 0.25;
const BEFORE: [f64; 3] = [52_850.0 * SHARE, 19_838.0, 49.92];
const AFTER: [f64; 3] = [53_405.0 * SHARE, 19_015.0, 49.92];

const CLUSTER: &str = "
    model = { parameters = 1e9, layers = 15, heads = 64, kv_heads = 1, head_dim = 288 }
    page_tokens = 256
    [[workers]]
    role = 'prefill'
    count = 3
    machine = 'b200'
    tp = 4
    radix_cache = false
    step = { base_us = 1000, prompt_token_us = 10, sequence_us = 0 }
    [[workers]]
    role = 'decode'
    machine = 'b200'
    tp = 3
    radix_cache = false
    max_batch = 4096
    pool_tokens = 100_000_000
    step = { base_us = 49920, prompt_token_us = 0, sequence_us = 0 }
";

/// Layers of the same KV, and those of them that do not slide.
const ALL: u32 = 75;
const FULL: u32 = 15;

fn workload() -> Workload {
    Workload::Closed { asks: unshared(4096, 8192, 1024), concurrency: 1024 }
}

fn prefill() -> Free {
    Free {
        name: "prefill worker's time for a token",
        unit: "us",
        range: [5.0, 200.0],
        set: |cluster, us| {
            let step = MeasuredStep { base_us: 1000.0, prompt_token_us: us, sequence_us: 0.0 };
            cluster.workers[0].step = Some(step);
        },
        cell: OUTPUT.0,
        figure: OUTPUT.1,
        published: BEFORE[0],
        grows: false,
    }
}

fn pool() -> Free {
    Free {
        name: "pool of the decode worker",
        unit: "thousand tokens",
        range: [1_000.0, 20_000.0],
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range")]
        set: |cluster, thousands| cluster.workers[1].pool_tokens = Some((thousands * 1e3) as u32),
        cell: OUTPUT.0,
        figure: OUTPUT.1,
        published: BEFORE[0],
        grows: true,
    }
}

/// Both readings of the table. `watch` is told what is simulated next.
#[must_use]
pub fn pull_24857(watch: &mut dyn FnMut(&str)) -> Vec<Table> {
    [("prefill workers limit the throughput", prefill()), ("the decode worker's pool limits it", pool())]
        .into_iter()
        .map(|(reading, constant)| table(reading, constant, watch))
        .collect()
}

/// The cluster whose decode worker keeps windows of whole prompts: all layers see all tokens, as far as memory is concerned.
fn whole() -> Cluster {
    let cluster =
        Cluster::parse("pull 24857", CLUSTER).unwrap_or_else(|wrong| unreachable!("a fixed text: {wrong}"));
    let model = Model { layers: ALL, ..cluster.model() };
    Cluster { model: Named::Itself(model), ..cluster }
}

/// The same cluster with the tails of windows. Its memory is the same: a page has a fifth of the layers, so there are five times as
/// many.
fn tail(whole: &Cluster) -> Cluster {
    let sliding = Some(Sliding { layers: ALL - FULL, tokens: 128 });
    let mut tail = whole.clone();
    tail.model = Named::Itself(Model { layers: FULL, sliding, ..whole.model() });
    tail.workers[1].pool_tokens = tail.workers[1].pool_tokens.map(|tokens| tokens.saturating_mul(ALL / FULL));
    tail
}

fn table(reading: &str, constant: Free, watch: &mut dyn FnMut(&str)) -> Table {
    let mut before = whole();
    watch("calibrating on the baseline row");
    let mut constants = calibrate(&mut before, &workload(), &[constant]);
    constants.push(Fitted { name: "time of a decode step", value: BEFORE[2], unit: "ms", cell: TPOT.0 });
    let fitted: Vec<&str> = constants.iter().map(|constant| constant.cell).collect();
    let rows_before = row("windows of whole prompts", &run(&workload(), &before), &FIGURES, &BEFORE, &fitted);

    watch("windows of the tails of prompts");
    let tail = tail(&before);
    let after = row("windows of their tails", &run(&workload(), &tail), &FIGURES, &AFTER, &[TPOT.0]);
    let title = format!("SGLang pull request 24857; {reading}");
    Table { title, constants, rows: vec![rows_before, after], goodput: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails_of_windows_take_a_fifth_of_the_memory() {
        let workload = Workload::Closed { asks: unshared(64, 8192, 64), concurrency: 32 };
        let used = |cluster: &Cluster| (FIGURES[3].1)(&run(&workload, cluster));
        let mut before = whole();
        before.workers[1].pool_tokens = Some(1_000_000);
        let (all, tails) = (used(&before), used(&tail(&before)));
        let share = tails / all;
        // Beside a fifth of the layers there are windows of one or two pages of 256 tokens, of 33.
        assert!((0.2..0.3).contains(&share), "{all} % of the pool before, {tails} % with tails");
    }
}
