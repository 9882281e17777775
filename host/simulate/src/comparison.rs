//! A run on real workers beside the simulation of the same requests.

use serde::Serialize;

use crate::report::{Figures, Report};

/// What a run gave, and what the simulation gives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The workload, in words.
    pub name: String,
    /// What the clients of the real workers saw.
    pub live: Figures,
    /// The share of the prompts' tokens that the real workers found in their caches.
    pub live_found: f64,
    /// The simulation, if the cluster could be described.
    pub simulated: Option<Report>,
}

/// One figure of a comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    /// Its name and unit.
    pub name: &'static str,
    /// On real workers.
    pub live: f64,
    /// In the simulation.
    pub simulated: Option<f64>,
}

impl Row {
    /// How much more the simulation gives than the real workers, as a share of these.
    #[must_use]
    pub fn error(&self) -> Option<f64> {
        let simulated = self.simulated?;
        (self.live != 0.0).then(|| simulated / self.live - 1.0)
    }
}

type Figure = (&'static str, fn(&Figures) -> f64);

const FIGURES: [Figure; 11] = [
    ("requests completed", |figures| figures.requests.completed as f64),
    ("requests failed", |figures| figures.requests.failed as f64),
    ("requests/s", |figures| figures.throughput.requests_per_s),
    ("output tokens/s", |figures| figures.throughput.output_tokens_per_s),
    ("TTFT mean, ms", |figures| figures.ttft_ms.mean),
    ("TTFT p50, ms", |figures| figures.ttft_ms.p50),
    ("TTFT p99, ms", |figures| figures.ttft_ms.p99),
    ("ITL mean, ms", |figures| figures.itl_ms.mean),
    ("ITL p99, ms", |figures| figures.itl_ms.p99),
    ("TPOT mean, ms", |figures| figures.tpot_ms.mean),
    ("E2E p50, ms", |figures| figures.e2e_ms.p50),
];

impl Comparison {
    /// The figures, in the order of the table.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        let simulated = self.simulated.as_ref().map(|report| &report.figures);
        let row =
            |(name, figure): Figure| Row { name, live: figure(&self.live), simulated: simulated.map(figure) };
        let found = Row {
            name: "found in caches, %",
            live: self.live_found * 100.0,
            simulated: self.simulated.as_ref().map(|report| report.found() * 100.0),
        };
        FIGURES.into_iter().map(row).chain([found]).collect()
    }
}
