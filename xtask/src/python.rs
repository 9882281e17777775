//! The `openai` package against a running server.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;

use crate::server::Server;
use crate::workspace::{Profile, Workspace};

/// Exactly this version, so that a new release changes nothing here by itself.
const OPENAI: &str = "openai==3.52.0";

/// Runs tests/python/openai_client.py against a split server of the small model. False when a check failed.
pub fn check(workspace: &Workspace, python: &Path) -> anyhow::Result<bool> {
    let model = workspace.tiny_model()?;
    let built = workspace.built(Profile::Dev);
    let flag = |path: &Path| path.display().to_string();
    let flags = ["--model", &flag(&model), "--plugins-dir", &flag(&built)].map(str::to_owned);
    let server = Server::start(&built.join("host"), &flags, &workspace.target.join("demo"), "openai")?;
    let status = Command::new(python)
        .arg(workspace.root.join("tests/python/openai_client.py"))
        .arg(&server.url)
        .stdin(Stdio::null())
        .status()
        .context("python cannot be run")?;
    server.stop()?;
    Ok(status.success())
}

/// A python with the package, in its own environment below the target folder.
///
/// # Errors
/// With the reason why there is none.
pub fn environment(workspace: &Workspace) -> Result<PathBuf, String> {
    let folder = workspace.target.join("python");
    let python = folder.join("bin/python");
    let ready = folder.join(format!("{OPENAI}.installed"));
    if ready.exists() && python.exists() {
        return Ok(python);
    }
    let base = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    succeed(Command::new(base).args(["-m", "venv", "--clear"]).arg(&folder), "a virtual environment")?;
    let pip = ["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", OPENAI];
    succeed(Command::new(&python).args(pip), &format!("`pip install {OPENAI}`"))?;
    std::fs::write(&ready, "").map_err(|error| format!("{} cannot be written: {error}", ready.display()))?;
    Ok(python)
}

fn succeed(command: &mut Command, what: &str) -> Result<(), String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{what} failed, because python3 cannot be run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    let last: Vec<&str> = said.lines().rev().take(3).collect();
    let last: Vec<&str> = last.into_iter().rev().collect();
    Err(format!("{what} failed ({}): {}", output.status, last.join(" | ")))
}
