//! Checks a cluster before it is simulated.
//!
//! Bounds are far from what machines have. With them, no number of bytes is more than its type holds, and a cluster fits the memory of
//! the machine that simulates it. Times have a bound of their own ([`seconds`](crate::hardware::seconds)).

use std::ops::RangeInclusive;

use host_core::layer_groups::MOST_LAYER_GROUPS;

use super::{Cluster, Link, MeasuredStep, Role, Workers};
use crate::machine::Machine;
use crate::model::Model;

/// A key that is wrong, and what is wrong with it.
type Wrong = (String, String);

/// Microseconds: up to a quarter of an hour.
const MICROS: RangeInclusive<f64> = 0.0..=1e9;
/// Units of 10⁹ bytes per second: from a megabyte per second.
const GIGABYTES: RangeInclusive<f64> = 1e-3..=1e9;
/// Operations or bytes per second: from a billion.
const RATE: RangeInclusive<f64> = 1e9..=1e24;
/// Shares of a peak.
const SHARE: RangeInclusive<f64> = 1e-2..=1.0;
/// Bytes of a page.
const PAGE: RangeInclusive<f64> = 1.0..=1e11;
/// Pages of all pools and host memories together. The simulation has some bytes for each.
const MOST_PAGES: f64 = 1e8;

impl Cluster {
    /// The most ranks of a worker.
    pub const MOST_RANKS: usize = 1024;
    /// The most host memory of a worker, in GiB.
    pub const MOST_HOST_GIB: f64 = 1e6;

    /// Checks that the cluster can be simulated.
    ///
    /// # Errors
    /// The key that is wrong, and what is wrong with it.
    pub fn check(&self) -> Result<(), Wrong> {
        named("model", self.model.find(&Model::PRESETS))?;
        named("link", self.link.find(&Link::PRESETS))?;
        let (link, model) = (self.link(), self.model());
        within([
            ("page_tokens", f64::from(self.page_tokens), 1.0..=65_536.0),
            ("link.gigabytes_per_second", link.gigabytes_per_second, GIGABYTES),
            ("link.latency_us", link.latency_us, MICROS),
            ("link.page_us", link.page_us, MICROS),
            ("link.run_us", link.run_us, MICROS),
            ("link.workers_per_card", link.workers_per_card as f64, 1.0..=1e6),
            ("router_us", self.router_us, MICROS),
            ("tier_failures", self.tier_failures, 0.0..=1.0),
            ("model.parameters", model.parameters, 1.0..=1e15),
            ("model.layers", f64::from(model.layers), 1.0..=1_000.0),
            ("model.heads", f64::from(model.heads), 1.0..=1_000.0),
            ("model.kv_heads", f64::from(model.kv_heads), 1.0..=1_000.0),
            ("model.head_dim", f64::from(model.head_dim), 1.0..=65_536.0),
        ])?;
        if let Some(sliding) = model.sliding {
            within([
                ("model.sliding.layers", f64::from(sliding.layers), 1.0..=1_000.0),
                ("model.sliding.tokens", f64::from(sliding.tokens), 1.0..=1e9),
            ])?;
            if self.layer_groups > 1 {
                let what = "models with sliding layers send whole pages: leave it out";
                return Err(("layer_groups".into(), what.into()));
            }
        }
        for (place, tier) in self.tiers.iter().enumerate() {
            let keys = [
                ("gigabytes_per_second", tier.gigabytes_per_second, GIGABYTES),
                ("latency_us", tier.latency_us, MICROS),
            ];
            within(keys).map_err(|(key, what)| (format!("tiers[{place}].{key}"), what))?;
        }
        let most = model.layers.min(MOST_LAYER_GROUPS);
        if !(1..=most).contains(&self.layer_groups) || model.layers % self.layer_groups != 0 {
            let (groups, layers) = (self.layer_groups, model.layers);
            let what = format!(
                "{groups} does not divide the model's {layers} layers, or is above {MOST_LAYER_GROUPS}"
            );
            return Err(("layer_groups".into(), what));
        }
        within([("bytes of a page: page_tokens", self.page_bytes(), PAGE)])?;
        for (place, workers) in self.workers.iter().enumerate() {
            self.check_workers(workers).map_err(|(key, what)| (format!("workers[{place}].{key}"), what))?;
        }
        let pages = self.workers.iter().map(|workers| {
            workers.count as f64 * f64::from(self.pool_pages(workers))
                + workers.count as f64 * f64::from(self.slots(workers))
        });
        within([("workers: pages of all together", pages.sum(), 1.0..=MOST_PAGES)])?;
        let has = |role| self.workers.iter().any(|workers| workers.role == role);
        let (prefill, decode, alone) = (has(Role::Prefill), has(Role::Decode), has(Role::Aggregated));
        match (prefill, decode, alone) {
            (true, true, false) | (false, false, true) => Ok(()),
            _ => Err((
                "workers".into(),
                "there must be prefill and decode workers, or aggregated ones alone".into(),
            )),
        }
    }

    fn check_workers(&self, workers: &Workers) -> Result<(), Wrong> {
        named("machine", workers.machine.find(&Machine::PRESETS))?;
        let machine = self.machine(workers);
        within([
            ("count", workers.count as f64, 1.0..=100_000.0),
            ("tp", workers.tp as f64, 1.0..=Self::MOST_RANKS as f64),
            ("chunk_tokens", f64::from(workers.chunk_tokens), 1.0..=1e9),
            ("max_batch", f64::from(workers.max_batch), 1.0..=65_536.0),
            ("reserved_decode_tokens", f64::from(workers.reserved_decode_tokens), 1.0..=1e9),
            ("target_itl_ms", workers.target_itl_ms.unwrap_or(1.0), 1e-3..=1e6),
            ("memory_share", workers.memory_share, SHARE),
            ("host_memory_gib", workers.host_memory_gib, 0.0..=Self::MOST_HOST_GIB),
            ("machine.memory", machine.memory, 0.0..=1e18),
            ("machine.flops", machine.flops, RATE),
            ("machine.bandwidth", machine.bandwidth, RATE),
            ("machine.host_bandwidth", machine.host_bandwidth, RATE),
            ("machine.compute_efficiency", machine.compute_efficiency, SHARE),
            ("machine.bandwidth_efficiency", machine.bandwidth_efficiency, SHARE),
            ("machine.step_seconds", machine.step_seconds, 0.0..=1e3),
        ])?;
        if let Some(MeasuredStep { base_us, prompt_token_us, sequence_us }) = workers.step {
            within([
                ("step.base_us", base_us, MICROS),
                ("step.prompt_token_us", prompt_token_us, MICROS),
                ("step.sequence_us", sequence_us, MICROS),
                // Time must pass between steps.
                ("step", base_us + prompt_token_us.min(sequence_us), 1e-3..=2e9),
            ])?;
        }
        if workers.host_memory_gib > 0.0 && !workers.radix_cache {
            return Err(("host_memory_gib".into(), "offload tiers need radix_cache = true".into()));
        }
        if let Some(tokens) = workers.pool_tokens {
            within([("pool_tokens", f64::from(tokens), f64::from(self.page_tokens)..=f64::from(u32::MAX))])?;
        }
        if self.pool_pages(workers) == 0 {
            let weights = self.model().weight_bytes(self.weights) / 1e9;
            let memory = machine.memory * workers.tp as f64 * workers.memory_share / 1e9;
            return Err((
                "tp".into(),
                format!(
                    "{weights:.1} GB of weights leave no page of the {memory:.1} GB that memory_share gives: take more devices, or set pool_tokens"
                ),
            ));
        }
        Ok(())
    }
}

fn named<T>(key: &str, found: Result<T, String>) -> Result<(), Wrong> {
    found.map(drop).map_err(|what| (key.to_owned(), what))
}

/// A number without a long row of zeros.
fn shown(number: f64) -> String {
    let plain = number == 0.0 || (1e-3..1e7).contains(&number.abs());
    if plain { number.to_string() } else { format!("{number:e}") }
}

fn within<const N: usize>(keys: [(&str, f64, RangeInclusive<f64>); N]) -> Result<(), Wrong> {
    for (key, value, range) in keys {
        if !range.contains(&value) {
            let (least, most) = (range.start(), range.end());
            let [value, least, most] = [value, *least, *most].map(shown);
            return Err((key.to_owned(), format!("{value} is not from {least} to {most}")));
        }
    }
    Ok(())
}
