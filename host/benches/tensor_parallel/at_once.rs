//! Measures many prompts that are sent at the same moment.

use super::client::first_tokens;
use super::{arms, start};

/// 8 layers, 8 heads of 64, bf16: 16 KiB a token.
const MODEL: &str = "layers = 8\nkv-heads = 8\nhead-dim = 64\nprefill-token-us = 4\nstep-us = 500\n";
const PROMPT: usize = 512;
const LEVELS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
const RUNS: usize = 4;

/// Prints a table: a row per number of prompts, a column per arm, milliseconds.
pub fn run(plugin: &str, wanted: &[String]) -> anyhow::Result<()> {
    let arms = arms(wanted);
    println!("{PROMPT} tokens of 16 KiB each, {plugin}, best of {RUNS} mean times to the first token, ms");
    let mut columns = Vec::new();
    let mut prompts = 0;
    for arm in &arms {
        // The pool holds all prompts of the highest level, so that the transfer is measured and not waiting for pages.
        let pages = (PROMPT.div_ceil(16) + 1) * 256;
        let pages = pages.to_string();
        let flags =
            ["--pool-pages", &pages, "--chunk-tokens", "8192", "--max-batch", "256", "--max-running", "512"];
        let server = start(Some(arm), plugin, MODEL, &flags);
        let mut column = Vec::new();
        for level in LEVELS {
            let mut best = f64::INFINITY;
            for _ in 0..RUNS {
                let times = first_tokens(&server.url, level, PROMPT, prompts)?;
                prompts += level;
                best = best.min(times.iter().sum::<f64>() / times.len() as f64);
            }
            column.push(best);
        }
        eprintln!("{}: {column:.1?}", arm.name());
        columns.push(column);
    }
    let names: Vec<String> = arms.iter().map(super::Arm::name).collect();
    println!("| prompts | {} |", names.join(" | "));
    println!("| ---: |{}", " ---: |".repeat(names.len()));
    for (row, level) in LEVELS.iter().enumerate() {
        let cells: Vec<String> = columns.iter().map(|column| format!("{:.1}", column[row])).collect();
        println!("| {level} | {} |", cells.join(" | "));
    }
    Ok(())
}
