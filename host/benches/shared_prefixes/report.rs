//! Figures of the answers.

use std::collections::BTreeMap;

use super::client::Answer;
use super::{IN_FLIGHT, OWN_TOKENS, PREFIX_TOKENS};

/// The figures of one arm in one round.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    pub requests_per_second: f64,
    pub ttft_p50_ms: f64,
    pub ttft_p99_ms: f64,
    pub itl_mean_ms: f64,
    pub itl_p50_ms: f64,
    pub itl_p99_ms: f64,
    /// Mean sequences in a decode step.
    pub sequences: f64,
    /// Fraction of all prompt tokens that decode held.
    pub hit_rate: f64,
    pub moved_mib: f64,
}

impl Figures {
    /// Computes figures from the answers without the first and last ones.
    pub fn of(answers: &[Answer], metrics: &BTreeMap<String, f64>) -> Self {
        let ends: Vec<f64> = answers.iter().filter_map(|answer| answer.tokens.last().copied()).collect();
        let counted = &answers[IN_FLIGHT..answers.len() - IN_FLIGHT];
        let (from, to) = (counted[0].sent, counted[counted.len() - 1].sent);
        let finished = ends.iter().filter(|end| (from..to).contains(end)).count();
        let mut waits: Vec<f64> =
            counted.iter().map(|answer| 1e3 * (answer.tokens[0] - answer.sent)).collect();
        let gaps =
            counted.iter().flat_map(|answer| answer.tokens.windows(2).map(|pair| 1e3 * (pair[1] - pair[0])));
        let mut gaps: Vec<f64> = gaps.collect();
        waits.sort_by(f64::total_cmp);
        gaps.sort_by(f64::total_cmp);
        let metric = |name: &str| metrics.get(name).copied().unwrap_or(f64::NAN);
        let prompts = answers.len() as f64 * (PREFIX_TOKENS + OWN_TOKENS) as f64;
        Self {
            requests_per_second: finished as f64 / (to - from),
            ttft_p50_ms: quantile(&waits, 0.5),
            ttft_p99_ms: quantile(&waits, 0.99),
            itl_mean_ms: gaps.iter().sum::<f64>() / gaps.len() as f64,
            itl_p50_ms: quantile(&gaps, 0.5),
            itl_p99_ms: quantile(&gaps, 0.99),
            sequences: metric("host_decode_tokens_total") / metric("host_batches_total"),
            hit_rate: metric("host_prefix_delivered_tokens_total{tier=\"device\"}") / prompts,
            moved_mib: answers.iter().map(|answer| answer.moved).sum::<u64>() as f64 / f64::from(1 << 20),
        }
    }
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

/// The figures of one arm in all rounds.
pub struct Row {
    name: &'static str,
    rounds: Vec<Figures>,
}

impl Row {
    /// A row without figures.
    pub fn new(name: &'static str) -> Self {
        Self { name, rounds: Vec::new() }
    }

    /// Adds the figures of a round.
    pub fn add(&mut self, figures: Figures) {
        self.rounds.push(figures);
    }

    fn median(&self, figure: impl Fn(&Figures) -> f64) -> f64 {
        let mut values: Vec<f64> = self.rounds.iter().map(figure).collect();
        values.sort_by(f64::total_cmp);
        quantile(&values, 0.5)
    }

    /// Median over rounds of the ratio between this arm's figure and another arm's in the same round.
    fn ratio(&self, base: &Row, figure: impl Fn(&Figures) -> f64) -> f64 {
        let mut ratios: Vec<f64> = self
            .rounds
            .iter()
            .zip(&base.rounds)
            .map(|(ours, theirs)| figure(ours) / figure(theirs))
            .collect();
        ratios.sort_by(f64::total_cmp);
        quantile(&ratios, 0.5)
    }
}

/// Prints the table as the documentation has it. Arms are compared with the first one.
pub fn print(rows: &[Row]) {
    println!(
        "| arm | requests/s | TTFT p50 | p99 | gain p50 | ITL mean | p50 | p99 | mean / off | sequences | hits | MiB moved |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    let Some(off) = rows.first() else { return };
    for row in rows {
        println!(
            "| {} | {:.1} | {:.0} ms | {:.0} ms | {:.1}x | {:.1} ms | {:.1} ms | {:.1} ms | {:.2} | {:.0} | {:.0} % | {:.0} |",
            row.name,
            row.median(|figures| figures.requests_per_second),
            row.median(|figures| figures.ttft_p50_ms),
            row.median(|figures| figures.ttft_p99_ms),
            1.0 / row.ratio(off, |figures| figures.ttft_p50_ms),
            row.median(|figures| figures.itl_mean_ms),
            row.median(|figures| figures.itl_p50_ms),
            row.median(|figures| figures.itl_p99_ms),
            row.ratio(off, |figures| figures.itl_mean_ms),
            row.median(|figures| figures.sequences),
            100.0 * row.median(|figures| figures.hit_rate),
            row.median(|figures| figures.moved_mib),
        );
    }
}
