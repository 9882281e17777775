//! How the parts of a command ended, and the summary of them.

use std::process::ExitCode;
use std::time::Instant;

/// How one part ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    Passed(String),
    Failed(String),
    Skipped(String),
}

/// Prints a line for each part; fails if one failed.
pub fn summary(parts: &[(&str, Outcome)], start: Instant) -> ExitCode {
    println!("\nsummary ({:.0} s)", start.elapsed().as_secs_f64());
    let mut good = true;
    for (name, outcome) in parts {
        let (word, what) = match outcome {
            Outcome::Passed(what) => ("passed", what),
            Outcome::Failed(what) => ("FAILED", what),
            Outcome::Skipped(what) => ("SKIPPED", what),
        };
        good &= !matches!(outcome, Outcome::Failed(_));
        println!("  {word:<8} {name:<14} {what}");
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
