//! `cargo xtask nightly schemathesis`: sends valid and invalid requests made from `/openapi.json`. The answers must be as it
//! says.

use std::path::Path;
use std::process::Command;

use super::outcome;
use crate::outcome::Outcome;
use crate::python;
use crate::server::Server;
use crate::workspace::{Profile, Workspace};

/// Exactly this version, so that a new release changes nothing here by itself.
const PACKAGE: &str = "schemathesis==4.32.5";
/// Requests to each path, beside those at the limits of its fields.
const EXAMPLES: &str = "50";
/// The check that is left out: no schema says that an expression can be compiled, or that prompt and answer fit the model.
const NOT_CHECKED: &str = "positive_data_acceptance";
/// The path that is left out, because it would end the workers.
const NOT_CALLED: &str = "/drain";

/// Tries every path of a server without a model.
pub fn check(workspace: &Workspace) -> Outcome {
    let python = match python::installed(workspace, PACKAGE, &[]) {
        Ok(python) => python,
        Err(why) => return Outcome::Skipped(why),
    };
    match run(workspace, &python.with_file_name("schemathesis")) {
        Ok(outcome) => outcome,
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}

fn run(workspace: &Workspace, schemathesis: &Path) -> anyhow::Result<Outcome> {
    workspace.build(Profile::Dev, &["host", "host-plugin-shm"])?;
    let built = workspace.built(Profile::Dev);
    let template = workspace.root.join("tests/python/tools.jinja");
    let flags = [
        "--executor",
        "synthetic",
        "--kv-memory",
        "64MiB",
        "--max-model-len",
        "4096",
        "--default-max-tokens",
        "16",
        "--no-request-log",
        "--plugins-dir",
        &built.display().to_string(),
        "--chat-template",
        &template.display().to_string(),
    ]
    .map(str::to_owned);
    let folder = workspace.target.join("schemathesis");
    let server = Server::start(&built.join("host"), &flags, &folder, "server")?;
    let examples = std::env::var("SCHEMATHESIS_EXAMPLES").unwrap_or_else(|_unset| EXAMPLES.to_owned());
    let mut command = Command::new(schemathesis);
    // Schemathesis keeps its findings in the folder that it runs in.
    command
        .current_dir(&folder)
        .arg("--config-file")
        .arg(workspace.root.join("tests/python/schemathesis.toml"));
    command.args(["run", &format!("{}/openapi.json", server.url), "--checks", "all"]);
    command.args([
        "--exclude-checks",
        NOT_CHECKED,
        "--exclude-path",
        NOT_CALLED,
        "--max-examples",
        &examples,
    ]);
    command.args(["--continue-on-failure", "--request-timeout", "60"]);
    let passed = format!(
        "{examples} examples for each path: no error of the server, every answer as the document says"
    );
    let found = outcome(&mut command, &passed);
    server.stop()?;
    Ok(found)
}
