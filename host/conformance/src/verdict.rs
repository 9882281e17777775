//! The verdict that the process of a case writes. The last such line counts.

use std::io::Write as _;

use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};

/// Prefix of the line with the verdict.
const MARK: &str = "@verdict ";

#[derive(Deserialize, Serialize)]
pub(super) struct Verdict {
    pub status: String,
    pub text: String,
}

impl Verdict {
    /// The last verdict in the output of a process, if it wrote one.
    pub fn last_in(output: &str) -> Option<Self> {
        let (_, json) = output.lines().rev().find_map(|line| line.split_once(MARK))?;
        serde_json::from_str(json).ok()
    }
}

/// Writes the verdict about the case of this process.
pub(super) fn tell(status: &str, text: String) -> std::io::Result<()> {
    let verdict = serde_json::to_string(&Verdict { status: status.to_owned(), text })?;
    let mut output = std::io::stdout().lock();
    writeln!(output, "\n{MARK}{verdict}")?;
    output.flush()
}

/// Reports that the case passed, and kills this process in the middle of its other threads' work, as a crash would.
pub(super) fn pass_and_die() -> ! {
    // If the verdict cannot be written, the case counts as crashed.
    let _unheard = tell("pass", String::new());
    // A process may signal itself.
    let _dead = kill_process(getpid(), Signal::KILL);
    std::process::abort()
}
