//! Runs clusters with all kinds of faults, seed by seed: `cargo run --release -p host-simulate --example faults -- FIRST
//! SEEDS [MOST]`.
//!
//! The search ends after MOST failing cases, 5 by default.
//!
//! `... -- 'CASE'` runs one case again, and prints every event and every action of its workers.

use std::process::ExitCode;

use host_simulate::faults::{Case, search, traced};

/// Failing cases after which the search ends.
const MOST: usize = 5;

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    // Panics are not printed, because failures are reported at the end.
    std::panic::set_hook(Box::new(|_| {}));
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let fails = match &arguments[..] {
        [first, seeds, most @ ..] if most.len() < 2 => {
            let (first, seeds) = (first.parse::<u64>()?, seeds.parse::<u64>()?);
            let most = most.first().map_or(Ok(MOST), |most| most.parse())?;
            let summary = search(first..first + seeds, most, &mut |_| {});
            print!("{summary}");
            !summary.found.is_empty()
        }
        [case] => {
            let (run, trace) = traced(&case.parse::<Case>()?);
            trace.iter().for_each(|line| println!("{line}"));
            run.mishaps.iter().for_each(|mishap| println!("{mishap:?}"));
            println!("{:?} {:?}", run.tally, run.broken);
            run.broken.is_some()
        }
        _ => return Err("give the first seed and how many, or a case".into()),
    };
    Ok(if fails { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
