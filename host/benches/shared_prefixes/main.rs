//! Many requests that share few long prefixes, against the real server: router, prefill and decode worker, shm, and the
//! synthetic executor, whose steps take longer the more sequences decode.
//!
//! `cargo build --release --workspace && cargo bench -p host --bench shared_prefixes [-- rounds [requests [slope]]]`
//!
//! 20 prefixes of 2000 tokens, each request with 200 tokens of its own (91 % of a prompt is shared), answers of 32 tokens, 128
//! requests in flight all the time. A decode step takes 17.4 ms and 0.417 ms per sequence, so 32.8 ms with 37 sequences and twice
//! as long with 116. These are half the times that SGLang published for its decode radix cache (pull request 19746: 65.6 ms between
//! tokens with 37 running, 130.6 ms with 104 to 126). The decode pool holds 37 whole requests. `slope` sets another time per
//! sequence, in microseconds; 37 sequences take 32.8 ms with every slope.
//!
//! Each round runs all arms one after the other, each on its own server. Arms are compared within a round, and the table shows the
//! median over rounds. The client measures times when it reads. The first and the last 128 requests of an arm are not counted: the
//! first fill the cache, and the load falls during the last. The targets are relative to the time between tokens of the first arm
//! in the same round.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

mod client;
mod report;

use std::path::Path;

use client::Load;
use host_tests::cluster::{Cluster, Start};
use report::{Figures, Row};

const IN_FLIGHT: usize = 128;
const PREFIXES: usize = 20;
const PREFIX_TOKENS: usize = 2_000;
const OWN_TOKENS: usize = 200;
const ANSWER_TOKENS: usize = 32;
const PAGE_TOKENS: usize = 16;
/// Whole requests that fit the decode pool.
const FITTING: usize = 37;
/// Default of a decode step's time per sequence, and the time of a step with as many sequences as fit. In microseconds.
const SLOPE: usize = 417;
const FITTING_STEP: usize = 32_829;

/// One way to serve.
struct Arm {
    name: &'static str,
    flags: &'static [&'static str],
    /// Target for the time between tokens, relative to the first arm's.
    target: Option<f64>,
}

const BOTH: &[&str] = &["--decode-radix-cache", "--prefill-radix-cache"];
const ARMS: [Arm; 7] = [
    Arm { name: "off", flags: &[], target: None },
    Arm { name: "decode cache", flags: &["--decode-radix-cache"], target: None },
    Arm { name: "both caches", flags: BOTH, target: None },
    Arm { name: "both, target 1.5 x off", flags: BOTH, target: Some(1.5) },
    Arm { name: "both, target 1.25 x off", flags: BOTH, target: Some(1.25) },
    Arm { name: "both, target 1.05 x off", flags: BOTH, target: Some(1.05) },
    Arm { name: "both, target 1.0 x off", flags: BOTH, target: Some(1.0) },
];

fn main() -> anyhow::Result<()> {
    let mut numbers = std::env::args().skip(1).filter_map(|argument| argument.parse().ok());
    let rounds = numbers.next().unwrap_or(3);
    let requests = numbers.next().unwrap_or(800);
    let slope = numbers.next().unwrap_or(SLOPE);
    anyhow::ensure!(
        FITTING * slope < FITTING_STEP,
        "{slope} us per sequence leave nothing for the step itself"
    );
    anyhow::ensure!(
        requests > 3 * IN_FLIGHT,
        "at least {} requests, or nothing is left to count",
        3 * IN_FLIGHT
    );
    let mut rows: Vec<Row> = ARMS.iter().map(|arm| Row::new(arm.name)).collect();
    for round in 0..rounds {
        let mut base = None;
        for (arm, row) in ARMS.iter().zip(&mut rows) {
            let figures = measure(arm, requests, slope, base)?;
            println!("round {round}, {}: {figures:?}", arm.name);
            base = base.or(Some(figures.itl_mean_ms));
            row.add(figures);
        }
    }
    report::print(&rows);
    Ok(())
}

/// Runs one arm. `base` is the first arm's mean time between tokens in milliseconds.
fn measure(arm: &Arm, requests: usize, slope: usize, base: Option<f64>) -> anyhow::Result<Figures> {
    let whole = (PREFIX_TOKENS + OWN_TOKENS + ANSWER_TOKENS).div_ceil(PAGE_TOKENS);
    let pages = (FITTING * whole).to_string();
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let target = arm.target.zip(base).map(|(factor, base)| format!("{:.2}", factor * base));
    let mut flags: Vec<&str> = vec!["--executor", "synthetic", "--pool-pages", &pages];
    flags.extend([
        "--max-batch",
        "256",
        "--max-running",
        "512",
        "--chunk-tokens",
        "8192",
        "--log-level",
        "warn",
    ]);
    flags.extend(arm.flags);
    if let Some(target) = &target {
        flags.extend(["--target-itl-ms", target]);
    }
    let step = FITTING_STEP - FITTING * slope;
    let config = format!(
        "[synthetic]\nlayers = 1\nkv-heads = 1\nhead-dim = 8\nstep-us = {step}\nsequence-us = {slope}\n\
         prefill-token-us = 4\n"
    );
    let flags = flags.into_iter().map(str::to_owned).collect();
    let cluster = Cluster::start(&Start { program, flags, config, workers: 2 });
    let load = Load { url: cluster.url.clone(), requests };
    let answers = load.run()?;
    let metrics = cluster.metrics(&cluster.worker("decode"));
    Ok(Figures::of(&answers, &metrics))
}
