//! Measures the time of a prompt's hand-over, with pages sent whole and layer by layer: `cargo bench -p host --bench layer_groups`.
//!
//! For each case three servers run at once and get requests in turn: an aggregated one, which hands nothing over, and two with
//! prefill and decode workers over `shm`, with `--layer-groups off` and `auto`. The synthetic executor computes for as long as its
//! cost model says. A server's figure is the median over rounds of the time to the first token, as the client sees it. The
//! hand-over is the time that a split server takes beyond the aggregated one: from the end of the computation to the first token
//! that decode gives, with transfer and verification.
//!
//! Needs `cargo build --release -p host-plugin-shm` before.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

use std::path::Path;
use std::time::{Duration, Instant};

use host_tests::cluster::{Cluster, Start};

const WARM_UP: u32 = 3;
/// Odd, so that a median is one of the times.
const ROUNDS: u32 = 41;
/// Rounds for prompts whose hand-over takes one or two milliseconds.
const SHORT_ROUNDS: u32 = 301;

struct Case {
    name: &'static str,
    prompt: u32,
    chunk: u32,
    synthetic: &'static str,
    flags: &'static [&'static str],
}

/// 32 layers, 8 heads of 64, bf16: 64 KiB a token, 1 MiB a page of 16.
const LARGE: &str = "layers = 32\nkv-heads = 8\nhead-dim = 64\nprefill-token-us = 120\n";
/// 4 layers, 2 heads of 32, f32: 2 KiB a token.
const SMALL: &str = "prefill-token-us = 20\n";

const CASES: [Case; 8] = [
    Case {
        name: "128 MiB at once",
        prompt: 2048,
        chunk: 2048,
        synthetic: LARGE,
        flags: &["--kv-dtype", "bf16"],
    },
    Case {
        name: "128 MiB at once, layers contiguous",
        prompt: 2048,
        chunk: 2048,
        synthetic: LARGE,
        flags: &["--kv-dtype", "bf16", "--kv-layout", "page-layer-head-kv-token-dim"],
    },
    Case {
        name: "128 MiB at once, no digests",
        prompt: 2048,
        chunk: 2048,
        synthetic: LARGE,
        flags: &["--kv-dtype", "bf16", "--no-page-integrity"],
    },
    Case {
        name: "128 MiB in 4 chunks, no digests",
        prompt: 2048,
        chunk: 512,
        synthetic: LARGE,
        flags: &["--kv-dtype", "bf16", "--no-page-integrity"],
    },
    Case {
        name: "16 MiB at once, no digests",
        prompt: 256,
        chunk: 2048,
        synthetic: LARGE,
        flags: &["--kv-dtype", "bf16", "--no-page-integrity"],
    },
    // The smallest that is cut: two groups of 512 KiB.
    Case {
        name: "1 MiB at once, no digests",
        prompt: 16,
        chunk: 2048,
        synthetic: LARGE,
        flags: &["--kv-dtype", "bf16", "--no-page-integrity"],
    },
    Case { name: "1 MiB at once, small pieces", prompt: 512, chunk: 2048, synthetic: SMALL, flags: &[] },
    Case { name: "64 KiB at once, small pieces", prompt: 32, chunk: 2048, synthetic: SMALL, flags: &[] },
];

fn start(case: &Case, more: &[&str]) -> Cluster {
    let pages = (case.prompt.div_ceil(16) * 3).to_string();
    let chunk = case.chunk.to_string();
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let directory = program.parent().unwrap_or(program).display().to_string();
    let flags = ["--executor", "synthetic", "--pool-pages", &pages, "--chunk-tokens", &chunk];
    let plugins = ["--plugins-dir", &directory];
    let flags = flags.iter().chain(&plugins).chain(case.flags).chain(more);
    let flags = flags.map(|flag| (*flag).to_owned()).collect();
    let workers = if more.contains(&"aggregated") { 1 } else { 2 };
    Cluster::start(&Start { program, flags, config: format!("[synthetic]\n{}", case.synthetic), workers })
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

fn main() -> Result<(), String> {
    let only: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    println!(
        "| case | aggregated, ms | off, ms | auto, ms | hand-over off | hand-over auto | auto / off | parts ahead |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    for case in
        CASES.iter().filter(|case| only.is_empty() || only.iter().any(|name| case.name.contains(name)))
    {
        let servers = [
            start(case, &["--role", "aggregated"]),
            start(case, &["--layer-groups", "off"]),
            start(case, &["--layer-groups", "auto"]),
        ];
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        let rounds = WARM_UP + if case.prompt <= 512 { SHORT_ROUNDS } else { ROUNDS };
        for round in 0..rounds {
            let prompt: Vec<u32> = (0..case.prompt).map(|token| (token * 7 + round * 13) % 250).collect();
            // Each server comes first, second and third equally often.
            for index in (0..servers.len()).map(|turn| (turn + round as usize) % servers.len()) {
                let begun = Instant::now();
                servers[index].generate(&prompt, 1)?;
                if round >= WARM_UP {
                    times[index].push(begun.elapsed());
                }
            }
        }
        let prefill = servers[2].metrics(&servers[2].worker("prefill"));
        let ahead = prefill.get("host_layer_parts_sent_total").copied().unwrap_or(0.0);
        let [whole, off, auto] = times.map(median);
        println!(
            "| {} | {whole:.2} | {off:.2} | {auto:.2} | {:.2} | {:.2} | {:.2} | {:.1} |",
            case.name,
            off - whole,
            auto - whole,
            (auto - whole) / (off - whole),
            ahead / f64::from(rounds),
        );
    }
    Ok(())
}
