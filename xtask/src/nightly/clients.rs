//! `cargo xtask nightly clients`: the clients that agents are built on, unchanged, against a split server of a small model.

use std::process::Command;

use super::outcome;
use crate::outcome::Outcome;
use crate::python::{self, Environment};
use crate::workspace::{Profile, Workspace};

/// Exactly these versions, so that new releases change nothing here by themselves.
const PACKAGES: [&str; 2] = ["litellm==1.110.2", "langchain-openai==1.7.4"];

/// Runs `tests/python/agent_clients.py`.
pub fn check(workspace: &Workspace) -> Outcome {
    let [litellm, langchain] = PACKAGES;
    // Not the environment of the other packages: these need their own version of `openai`.
    let python = match python::installed_in(workspace, Environment::Clients, litellm, &[langchain]) {
        Ok(python) => python,
        Err(why) => return Outcome::Skipped(why),
    };
    if let Err(error) = workspace.build(Profile::Dev, &["host", "host-plugin-shm"]) {
        return Outcome::Failed(format!("{error:#}"));
    }
    let run = |url: &str| {
        let mut command = Command::new(&python);
        command.arg(workspace.root.join("tests/python/agent_clients.py")).arg(url);
        outcome(&mut command, &format!("{} take every answer", PACKAGES.join(" and ")))
    };
    match python::with_small_model(workspace, "clients", run) {
        Ok(outcome) => outcome,
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}
