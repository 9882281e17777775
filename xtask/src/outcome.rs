//! Outcomes of the parts of a command, and their summary.

use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The outcome of one part.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    Passed(String),
    Failed(String),
    Skipped(String),
}

impl Outcome {
    /// The same with the time that it took, if anything ran.
    pub fn after(self, time: Duration) -> Self {
        let told = |what: String| format!("{what} ({:.0} s)", time.as_secs_f64());
        match self {
            Self::Passed(what) => Self::Passed(told(what)),
            Self::Failed(what) => Self::Failed(told(what)),
            skipped @ Self::Skipped(_) => skipped,
        }
    }
}

/// Prints a line for each part, and fails if one failed.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ran_says_how_long_and_what_was_skipped_stays_so() {
        let after = |outcome: Outcome| outcome.after(Duration::from_millis(2600));
        assert_eq!(after(Outcome::Passed("all".into())), Outcome::Passed("all (3 s)".into()));
        assert_eq!(after(Outcome::Failed("one".into())), Outcome::Failed("one (3 s)".into()));
        assert_eq!(after(Outcome::Skipped("no tool".into())), Outcome::Skipped("no tool".into()));
    }
}
