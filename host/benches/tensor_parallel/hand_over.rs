//! Measures hand-overs of one prompt at a time.

use std::time::Instant;

use super::{Arm, arms, start};

/// 32 layers, 8 heads of 64, bf16: 64 KiB a token, 1 MiB a page of 16 tokens.
const MODEL: &str = "layers = 32\nkv-heads = 8\nhead-dim = 64\nprefill-token-us = 150\n";
const PROMPT: u32 = 1024;
const WARM_UP: u32 = 2;
/// Odd, so that a median is one of the times.
const ROUNDS: u32 = 21;

/// Prints a table of milliseconds, each with its ratio to the hand-over of the arm with equal sizes in the same layout.
pub fn run(plugin: &str, wanted: &[String]) -> anyhow::Result<()> {
    let plain = wanted.iter().any(|word| word == "plain");
    let words: Vec<String> = wanted.iter().filter(|word| *word != "plain").cloned().collect();
    println!("{} MiB of KV, {plugin}, median of {ROUNDS} rounds", u64::from(PROMPT) * 64 / 1024);
    for digests in [false, true].into_iter().filter(|digests| !(plain && *digests)) {
        println!(
            "\n| arm, {} | first token, ms | hand-over, ms | of equal |",
            if digests { "digests" } else { "no digests" }
        );
        println!("| --- | ---: | ---: | ---: |");
        // Servers of one layout at a time: they share the machine's memory.
        for layer_first in [false, true] {
            let pages = (PROMPT / 16 * 3).to_string();
            let mut flags = vec!["--pool-pages", &pages, "--chunk-tokens", "2048", "--layer-groups", "off"];
            flags.extend((!digests).then_some("--no-page-integrity"));
            let arms: Vec<Arm> =
                arms(&words).into_iter().filter(|arm| arm.layer_first == layer_first).collect();
            if arms.is_empty() {
                continue;
            }
            let mut servers = vec![start(None, plugin, MODEL, &flags)];
            servers.extend(arms.iter().map(|arm| start(Some(arm), plugin, MODEL, &flags)));
            let mut times = vec![Vec::new(); servers.len()];
            for round in 0..WARM_UP + ROUNDS {
                let prompt: Vec<u32> = (0..PROMPT).map(|token| (token * 7 + round * 13) % 250).collect();
                // Each server takes each place in the turn equally often.
                for index in (0..servers.len()).map(|turn| (turn + round as usize) % servers.len()) {
                    let begun = Instant::now();
                    servers[index].generate(&prompt, 1).map_err(anyhow::Error::msg)?;
                    if round >= WARM_UP {
                        times[index].push(begun.elapsed());
                    }
                }
            }
            let medians: Vec<f64> = times
                .into_iter()
                .map(|mut times| {
                    times.sort_unstable();
                    times[times.len() / 2].as_secs_f64() * 1e3
                })
                .collect();
            println!("| aggregated, 4 ranks | {:.2} | | |", medians[0]);
            for (arm, time) in arms.iter().zip(&medians[1..]) {
                let (over, equal) = (time - medians[0], medians[1] - medians[0]);
                println!("| {} | {time:.2} | {over:.2} | {:.2} |", arm.name(), over / equal);
            }
        }
    }
    Ok(())
}
