//! `host simulate --faults` and `--replay`: simulated clusters with many faults.

use std::io::{IsTerminal as _, Write as _};

use host_simulate::faults::{Case, run, search};
use host_wire::clock;

use super::super::Refused;
use super::super::output::say;
use super::lines;

/// Number of failing cases after which a search ends.
const MOST: usize = 5;

/// Runs cases with these seeds, and reports which fail.
pub(super) fn seeds(first: u64, seeds: u64) -> anyhow::Result<()> {
    // Silences panics while cases run. Failures are reported at the end.
    std::panic::set_hook(Box::new(|_| {}));
    let shown = std::io::stderr().is_terminal();
    let begun = clock::now();
    let mut watch = |seed: u64| {
        let done = seed.wrapping_sub(first);
        if shown && done.is_multiple_of(500) {
            // A failure to print progress is ignored: nothing depends on it.
            let _unread = write!(std::io::stderr(), "\r{done} of {seeds} seeds");
        }
    };
    let all = (0..seeds).map(|number| first.wrapping_add(number));
    let summary = search(all, MOST, &mut watch);
    if shown {
        let _unread = write!(std::io::stderr(), "\r{:40}\r", "");
    }
    lines(&summary)?;
    say!("{:.0} s", begun.elapsed().as_secs_f64());
    match summary.found.is_empty() {
        true => Ok(()),
        false => Err(anyhow::anyhow!(
            "a request, a page or a connection was lost; the cases above say how to run it again"
        )),
    }
}

/// Runs one case, and reports what goes wrong in it.
pub(super) fn replay(text: &str) -> anyhow::Result<()> {
    let case: Case = text.parse().map_err(|wrong| Refused(format!("--replay: {wrong}")))?;
    std::panic::set_hook(Box::new(|_| {}));
    let run = run(&case, true);
    for mishap in &run.mishaps {
        say!("{:.3} s, mishap {}: {}", mishap.at.0.as_secs_f64(), mishap.number, mishap.what);
    }
    let tally = run.tally;
    say!("{} requests answered in {} tries, {} refused", tally.answered, tally.tries, tally.refused);
    match run.broken {
        None => Ok(()),
        Some(broken) => Err(anyhow::anyhow!("it fails: {}", broken.what)),
    }
}
