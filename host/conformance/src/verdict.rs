//! What the process of a case says of it, as the last such line that it writes.

use std::io::Write as _;

use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};

/// Starts the line.
const MARK: &str = "@verdict ";

#[derive(Deserialize, Serialize)]
pub(super) struct Verdict {
    pub status: String,
    pub text: String,
}

impl Verdict {
    /// The one in the output of a process, if it came so far.
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

/// Ends this process as a crash does, in the middle of what its other threads do: the case has passed so far.
pub(super) fn pass_and_die() -> ! {
    // Without its verdict the case counts as crashed.
    let _unheard = tell("pass", String::new());
    // A process may signal itself.
    let _dead = kill_process(getpid(), Signal::KILL);
    std::process::abort()
}
