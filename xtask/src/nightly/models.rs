//! `cargo xtask nightly loom` and `shuttle`: run models with more orders and schedules than the tests of each change.

use super::outcome;
use crate::outcome::Outcome;
use crate::workspace::Workspace;

/// Preemptions of threads in each model: one more than at each change. With six, some models take hours.
const PREEMPTIONS: &str = "4";
/// Schedules of each kind for each model: twenty times as many as at each change.
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
