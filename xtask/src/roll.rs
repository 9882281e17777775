//! `cargo xtask roll`: a cluster goes from one build to another under load.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, ensure};

use crate::workspace::{Profile, Workspace};

const HELP: &str = "\
Rolls a cluster from the build of one commit to that of another under load, and back, and compares every answer with that of one
aggregated worker.

Both commits are built in target/roll. Router, prefill and decode worker of the first one start on this machine. Workers of the second
one come, those that they replace are drained, and the router goes last. Ends with a report; the exit code is 1 if a request was lost
or a token was wrong.

Usage: cargo xtask roll [OPTIONS]

Options:
  --from COMMIT  The first build [default: HEAD~1]
  --to COMMIT    The second one [default: HEAD]
  --clients N    Clients at once [default: 6]
  --answers N    Complete answers that are waited for before each step [default: 300]
  --seed N       What is drawn: prompts and their order [default: 1]
  --executor NAME
                 What computes the answers: synthetic, or cpu, a small made-up model, of which clients request chats, answers held
                 to grammars, and calls of tools, too [default: synthetic]
  -h, --help     This text";

/// Files that are built of a commit, and their names in the folder of a build.
const FILES: [(&str, &str); 2] = [("host", "host"), ("libhost_plugin_shm.so", "shm.so")];

/// Runs the command.
pub fn run(arguments: &[String]) -> anyhow::Result<ExitCode> {
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        println!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let (mut from, mut to, mut others) = ("HEAD~1", "HEAD", Vec::new());
    let mut rest = arguments.iter();
    while let Some(flag) = rest.next() {
        let value = rest.next().with_context(|| format!("{flag} needs a value\n\n{HELP}"))?;
        match flag.as_str() {
            "--from" => from = value,
            "--to" => to = value,
            "--clients" | "--answers" | "--seed" | "--executor" => others.extend([flag, value]),
            _ => anyhow::bail!("there is no {flag}\n\n{HELP}"),
        }
    }
    let workspace = Workspace::find()?;
    let (from, to) = (build(&workspace, from)?, build(&workspace, to)?);
    let mut command =
        workspace.cargo(&["run", "--quiet", "--package", "host-tests", "--example", "roll", "--"]);
    command.arg("--from").arg(from).arg("--to").arg(to).args(others);
    let status = command.status().context("cargo cannot be run")?;
    ensure!(status.code().is_some(), "the run ended with {status}");
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Builds a commit, if that was not done before, and returns the folder with its program and its plugin.
fn build(workspace: &Workspace, commit: &str) -> anyhow::Result<PathBuf> {
    let name = git(workspace, &["rev-parse", "--verify", "--short=12", &format!("{commit}^{{commit}}")])?;
    let rolls = workspace.target.join("roll");
    let folder = rolls.join(&name);
    println!("{commit} is {name}");
    if FILES.iter().all(|(_, file)| folder.join(file).is_file()) {
        return Ok(folder);
    }
    let source = folder.join("source");
    std::fs::create_dir_all(&source).with_context(|| format!("{} cannot be made", source.display()))?;
    let archive = folder.join("source.tar");
    git(workspace, &["archive", "--output", &archive.display().to_string(), &name])?;
    let mut unpack = Command::new("tar");
    // Files get the current time: cargo takes a file that is older than its build for one that has not changed.
    unpack.args(["--extract", "--touch", "--file"]).arg(&archive).arg("--directory").arg(&source);
    ensure!(unpack.status().context("tar cannot be run")?.success(), "{name} cannot be unpacked; see above");
    std::fs::remove_file(&archive).with_context(|| format!("{} cannot be removed", archive.display()))?;
    // All commits are built in one target folder, so that dependencies are built once. Their own crates are built again for each
    // commit.
    let own = Workspace { root: source, target: rolls.join("target") };
    own.build(Profile::Dev, &["host", "host-plugin-shm"])?;
    for (built, file) in FILES {
        copy(&own.built(Profile::Dev).join(built), &folder.join(file))?;
    }
    Ok(folder)
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::copy(from, to)
        .with_context(|| format!("{} cannot be copied to {}", from.display(), to.display()))?;
    Ok(())
}

fn git(workspace: &Workspace, arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = Command::new("git");
    command.args(arguments).current_dir(&workspace.root).stderr(Stdio::inherit());
    let output = command.output().context("git cannot be run")?;
    ensure!(output.status.success(), "git {} failed; see above", arguments.join(" "));
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
