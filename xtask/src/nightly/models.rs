//! `cargo xtask nightly loom` and `shuttle`: more orders and schedules than each change is tried with.

use super::outcome;
use crate::outcome::Outcome;
use crate::workspace::Workspace;

/// Of each model: one more than at each change. With six, some take hours.
const PREEMPTIONS: &str = "4";
/// Of each kind of schedule, for each model: twenty times as many as at each change.
const SCHEDULES: &str = "20000";

pub fn loom(workspace: &Workspace) -> Outcome {
    let mut command = workspace.cargo(&["test", "--package", "host-loom"]);
    command.env("LOOM_MAX_PREEMPTIONS", std::env::var("LOOM_MAX_PREEMPTIONS").unwrap_or(PREEMPTIONS.into()));
    outcome(&mut command, "every order of each model's threads")
}

pub fn shuttle(workspace: &Workspace) -> Outcome {
    let mut command = workspace.cargo(&["test", "--package", "host-shuttle"]);
    command.env("SHUTTLE_ITERATIONS", std::env::var("SHUTTLE_ITERATIONS").unwrap_or(SCHEDULES.into()));
    outcome(&mut command, "every schedule that was drawn")
}
