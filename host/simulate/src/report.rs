//! The report of a simulation.
//!
//! The four latencies are those of the benchmark clients of SGLang (`bench_serving`) and vLLM (`vllm bench serve`), over requests
//! that were completed:
//!
//! | | Per | From, to |
//! | --- | --- | --- |
//! | TTFT | request | sent, first token |
//! | ITL | token but the first | token before, token (over all tokens of all requests) |
//! | TPOT | request of two tokens or more | (E2E − TTFT) / (tokens − 1) |
//! | E2E | request | sent, last token |
//!
//! Percentiles are interpolated between neighbours, as NumPy does.

mod distribution;

use std::time::Duration;

use host_core::hierarchy::TierStats;
use host_core::scheduler::Stats;
use serde::Serialize;

use crate::cluster::{Cluster, Role};
use crate::seen::Seen;
use crate::traffic::{Record, Traffic};
pub use distribution::Distribution;

/// The results of a simulation, all of them computed from virtual time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// What clients saw of the requests that are measured.
    #[serde(flatten)]
    pub figures: Figures,
    /// Where the KV of prompts came from.
    pub prompts: Prompts,
    /// Pages sent between workers.
    pub transfers: Transfers,
    /// Each worker, in the order of the cluster file.
    pub workers: Vec<Worker>,
}

/// What clients see of a run. A client of a real server can measure the same.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// From the first request to the last token, in seconds.
    pub duration_s: f64,
    /// The number of requests, by their end.
    pub requests: Requests,
    /// Time to the first token, in milliseconds.
    pub ttft_ms: Distribution,
    /// Time between two tokens of an answer, in milliseconds.
    pub itl_ms: Distribution,
    /// Mean time per token but the first of an answer, in milliseconds.
    pub tpot_ms: Distribution,
    /// Time to the last token, in milliseconds.
    pub e2e_ms: Distribution,
    /// Requests and tokens per second.
    pub throughput: Throughput,
}

impl Figures {
    /// The figures of these requests, in the order in which they were sent. `gaps` are the seconds between two tokens, over all
    /// tokens of all requests.
    #[must_use]
    pub fn of(seen: &[Seen], gaps: &[f64]) -> Self {
        let done = || seen.iter().filter(|request| request.complete);
        let first = seen.first().map_or(Duration::ZERO, |request| request.sent);
        let end = seen.iter().filter_map(|request| request.ended).max().unwrap_or(first);
        let seconds = end.saturating_sub(first).as_secs_f64();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let (mut ttft, mut tpot, mut e2e) = (Vec::new(), Vec::new(), Vec::new());
        let (mut input, mut output) = (0.0, 0.0);
        for request in done() {
            let Some((begun, last)) = request.tokens else { continue };
            ttft.push(ms(begun.saturating_sub(request.sent)));
            e2e.push(ms(last.saturating_sub(request.sent)));
            if request.received > 1 {
                tpot.push(ms(last.saturating_sub(begun)) / f64::from(request.received - 1));
            }
            input += f64::from(request.prompt);
            output += f64::from(request.received);
        }
        let completed = done().count();
        let per_second = |value: f64| ratio(value, seconds);
        Self {
            duration_s: round(seconds),
            requests: Requests { completed, failed: seen.len() - completed },
            ttft_ms: Distribution::of(ttft),
            itl_ms: Distribution::of(gaps.iter().map(|gap| gap * 1e3).collect()),
            tpot_ms: Distribution::of(tpot),
            e2e_ms: Distribution::of(e2e),
            throughput: Throughput {
                requests_per_s: per_second(completed as f64),
                input_tokens_per_s: per_second(input),
                output_tokens_per_s: per_second(output),
            },
        }
    }
}

/// How the measured requests ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Requests {
    /// Answered.
    pub completed: usize,
    /// Refused or failed.
    pub failed: usize,
}

/// Per second of the duration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Throughput {
    /// Requests that were completed.
    pub requests_per_s: f64,
    /// Tokens of their prompts.
    pub input_tokens_per_s: f64,
    /// Tokens of their answers.
    pub output_tokens_per_s: f64,
}

/// Tokens of prompts, on workers that compute prompts and on workers that receive pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Prompts {
    /// Tokens of all prompts that were sent.
    pub tokens: u64,
    /// Computed, on any worker.
    pub computed: u64,
    /// Found in the pool of the worker that computes the prompt.
    pub found_l1: u64,
    /// Pages that workers copied back from host memory, in tokens.
    pub found_l2: u64,
    /// Pages that workers read from storage, in tokens.
    pub found_l3: u64,
    /// Found in the pool of a decode worker, and so not sent there.
    pub not_sent: u64,
}

/// Pages sent between workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Transfers {
    /// Pages.
    pub pages: u64,
    /// Their bytes, in units of 10⁹, with each head once.
    pub gigabytes: f64,
    /// Requests that waited for another one to bring the same pages, on any worker.
    pub shared: u64,
    /// Requests for which a decode worker asked prefill for pages that it could not restore.
    pub renegotiated: u64,
}

/// One worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worker {
    /// Its role.
    pub role: Role,
    /// Pages of its pool.
    pub pages: u32,
    /// The share of them that requests held, cached prefixes that they used included: the mean over the seconds of the run.
    pub used_mean: f64,
    /// The largest share in any second.
    pub used_most: f64,
    /// Requests past the queue, on average.
    pub active_mean: f64,
    /// Requests in the queue, on average.
    pub queued_mean: f64,
    /// Steps.
    pub steps: u64,
    /// Tokens of answers per step.
    pub answers_per_step: f64,
    /// Requests that were preempted.
    pub preemptions: u64,
}

/// The state of workers, sampled once a second.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples {
    workers: Vec<Sample>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    looks: u64,
    used: u64,
    used_most: u64,
    active: u64,
    queued: u64,
}

impl Samples {
    pub(crate) fn new(workers: usize) -> Self {
        Self { workers: vec![Sample::default(); workers] }
    }

    pub(crate) fn take(&mut self, place: usize, stats: &Stats) {
        let used = (stats.pool.held + stats.locked_pages + stats.pool.quarantined) as u64;
        let sample = &mut self.workers[place];
        sample.looks += 1;
        sample.used += used;
        sample.used_most = sample.used_most.max(used);
        sample.active += stats.active as u64;
        sample.queued += stats.queued as u64;
    }
}

/// Rounds to four digits behind the point, so that reports are equal on machines that differ in the last bit.
fn round(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { round(part / whole) } else { 0.0 }
}

impl Report {
    pub(crate) fn new(
        cluster: &Cluster,
        traffic: &Traffic,
        samples: &Samples,
        last: &[(Stats, Vec<TierStats>)],
    ) -> Self {
        let seen: Vec<Seen> = traffic.measured().iter().map(Record::seen).collect();
        let roles: Vec<_> = cluster
            .workers
            .iter()
            .flat_map(|workers| {
                std::iter::repeat_n((workers.role, cluster.pool_pages(workers)), workers.count)
            })
            .collect();
        let tokens = traffic.records.iter().map(|record| u64::from(record.prompt)).sum();
        let mut prompts = Prompts { tokens, ..Prompts::default() };
        let mut transfers = Transfers::default();
        for ((role, _), (stats, _)) in roles.iter().zip(last) {
            let (page, tiers) = (u64::from(cluster.page_tokens), &stats.hierarchy);
            prompts.computed += stats.prefill_tokens + stats.recomputed_tokens;
            prompts.found_l2 += (tiers.loaded - tiers.loaded_from_storage) * page;
            prompts.found_l3 += tiers.loaded_from_storage * page;
            match role {
                Role::Decode => prompts.not_sent += stats.cached_tokens,
                Role::Prefill | Role::Aggregated => prompts.found_l1 += stats.cached_tokens,
            }
            transfers.pages += stats.pages_sent;
            transfers.shared += stats.shared_transfers;
            transfers.renegotiated += tiers.renegotiated;
        }
        transfers.gigabytes = round(transfers.pages as f64 * cluster.page_bytes() / 1e9);
        let workers =
            roles.iter().zip(last).zip(&samples.workers).map(|(((role, pages), (stats, _)), sample)| {
                let mean = |sum: u64| ratio(sum as f64, sample.looks as f64);
                Worker {
                    role: *role,
                    pages: *pages,
                    used_mean: ratio(mean(sample.used), f64::from(*pages)),
                    used_most: ratio(sample.used_most as f64, f64::from(*pages)),
                    active_mean: mean(sample.active),
                    queued_mean: mean(sample.queued),
                    steps: stats.batches,
                    answers_per_step: ratio(stats.decode_tokens as f64, stats.batches as f64),
                    preemptions: stats.retractions,
                }
            });
        Self { figures: Figures::of(&seen, &traffic.gaps), prompts, transfers, workers: workers.collect() }
    }

    /// The share of the prompts' tokens that no worker computed.
    #[must_use]
    pub fn found(&self) -> f64 {
        1.0 - ratio(self.prompts.computed as f64, self.prompts.tokens as f64).min(1.0)
    }

    /// As indented JSON, with a line break at its end.
    #[must_use]
    pub fn json(&self) -> String {
        // Serialization cannot fail: the report has numbers, strings and lists only.
        serde_json::to_string_pretty(self).map(|text| text + "\n").unwrap_or_default()
    }
}
