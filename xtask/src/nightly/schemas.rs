//! `cargo xtask nightly schemas`: an independent validator checks answers of a real model under JSON schemas. Some schemas are
//! random, others are like those that programs send.

use std::process::Command;

use host_tests::fetched::Artifact;

use super::outcome;
use crate::outcome::Outcome;
use crate::workspace::{Profile, Workspace};
use crate::{fetch, python};

/// Exactly this version, so that a new release changes nothing here by itself.
const VALIDATOR: &str = "jsonschema==4.26.0";
/// Random schemas.
const COUNT: &str = "1000";
/// Tokens of an answer at most. A small model writes long texts where a schema allows them, and these are cut.
const TOKENS: &str = "120";

/// Runs `tests/python/random_schemas.py` and `tests/python/schema_sample.py`.
pub fn check(workspace: &Workspace) -> Outcome {
    let python = match python::installed(workspace, VALIDATOR, &[]) {
        Ok(python) => python,
        Err(why) => return Outcome::Skipped(why),
    };
    let problems = fetch::fetch(workspace, std::iter::once(Artifact::SmolLm2));
    if !problems.is_empty() {
        return Outcome::Skipped(problems.join("; "));
    }
    if let Err(error) = workspace.build(Profile::Dev, &["host", "host-plugin-shm"]) {
        return Outcome::Failed(format!("{error:#}"));
    }
    let count = std::env::var("SCHEMAS_COUNT").unwrap_or_else(|_unset| COUNT.to_owned());
    let run = |url: &str| {
        let script = |name: &str| {
            let mut command = Command::new(&python);
            // Without bytecode beside the scripts, of which one imports the other.
            command.arg("-B").arg(workspace.root.join("tests/python").join(name));
            command.args([url, "--tokens", TOKENS]);
            command
        };
        let passed =
            format!("{count} random schemas and those of the sample: all answers that ended are valid");
        match outcome(script("random_schemas.py").args(["--count", &count]), &passed) {
            Outcome::Passed(_) => outcome(&mut script("schema_sample.py"), &passed),
            other => other,
        }
    };
    match python::with_real_model(workspace, "schemas", run) {
        Ok(outcome) => outcome,
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}
