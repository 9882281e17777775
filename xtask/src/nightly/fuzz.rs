//! `cargo xtask nightly fuzz`: libFuzzer on every reader, for a bounded time each.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};

use super::is_there;
use crate::outcome::Outcome;
use crate::workspace::Workspace;

/// Seconds for each target, unless [`SECONDS`] says otherwise.
const USUAL_SECONDS: u64 = 30;
/// Variable with the number of seconds that each target runs.
const SECONDS: &str = "FUZZ_SECONDS";
/// Variable that names some of the targets, separated by commas.
const ONLY: &str = "FUZZ_TARGETS";
/// Most memory of a target, in MiB: a small input that needs more is a finding.
const MOST_MEMORY: u32 = 1024;
/// Longest time for one input, in seconds.
const LONGEST: u32 = 10;
/// Longest input.
const MOST_BYTES: u32 = 4096;

/// The result of one target.
#[derive(Debug, PartialEq, Eq)]
struct Ran {
    target: String,
    executions: u64,
    /// The error, if one was found.
    found: Option<String>,
}

/// Builds all targets and runs each.
pub fn check(workspace: &Workspace) -> Outcome {
    if !is_there(Command::new("cargo").args(["fuzz", "--version"])) {
        return Outcome::Skipped(
            "there is no cargo-fuzz; install it with `cargo install cargo-fuzz --locked`".to_owned(),
        );
    }
    match run_all(workspace) {
        Ok(ran) => outcome(&ran),
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}

fn outcome(ran: &[Ran]) -> Outcome {
    let executions: u64 = ran.iter().map(|ran| ran.executions).sum();
    let found: Vec<&str> =
        ran.iter().filter(|ran| ran.found.is_some()).map(|ran| ran.target.as_str()).collect();
    let done = format!("{executions} executions of {} targets", ran.len());
    match found.as_slice() {
        [] => Outcome::Passed(format!("{done} found nothing")),
        found => Outcome::Failed(format!("{done} found something in {}; see above", found.join(", "))),
    }
}

fn run_all(workspace: &Workspace) -> anyhow::Result<Vec<Ran>> {
    let seconds = match std::env::var(SECONDS) {
        Ok(text) => text.parse().with_context(|| format!("{SECONDS}={text} is no number of seconds"))?,
        Err(_unset) => USUAL_SECONDS,
    };
    let folder = workspace.root.join("fuzz");
    let all = targets(&std::fs::read_to_string(folder.join("Cargo.toml"))?);
    let only = std::env::var(ONLY).ok();
    let chosen: Vec<&String> = match &only {
        None => all.iter().collect(),
        Some(only) => only
            .split(',')
            .map(|name| {
                let found = all.iter().find(|target| *target == name);
                found
                    .with_context(|| format!("{ONLY} names {name:?}, which is no target: {}", all.join(", ")))
            })
            .collect::<anyhow::Result<_>>()?,
    };
    let built = build(workspace)?;
    let mut ran = Vec::new();
    for target in chosen {
        let one = run(workspace, &built, target, seconds)?;
        let found = one.found.as_deref().unwrap_or("nothing found");
        println!("{target:<18} {:>12} executions, {found}", one.executions);
        ran.push(one);
    }
    Ok(ran)
}

/// The names of the binaries in the manifest of `fuzz`.
fn targets(manifest: &str) -> Vec<String> {
    let binaries = manifest.split("[[bin]]").skip(1);
    let name = |text: &str| Some(text.split_once("name = \"")?.1.split_once('"')?.0.to_owned());
    binaries.filter_map(name).collect()
}

/// Builds the targets, and returns the folder that they are in.
fn build(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    let target = workspace.target.join("fuzz");
    let mut command = Command::new("cargo");
    // Without a sanitizer the targets run several times as fast and need no nightly compiler. The readers have no unsafe code.
    command.args(["fuzz", "build", "--sanitizer", "none"]).current_dir(&workspace.root);
    let status = command.env("CARGO_TARGET_DIR", &target).stdin(Stdio::null()).status();
    let status = status.context("cargo fuzz cannot be run")?;
    ensure!(status.success(), "the targets do not build; see above");
    let output = Command::new("rustc").arg("-vV").output().context("rustc cannot be run")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(target.join(host.context("rustc names no host")?).join("release"))
}

/// Runs a target. New inputs are kept in the target folder, so that the next run continues from them.
fn run(workspace: &Workspace, built: &Path, target: &str, seconds: u64) -> anyhow::Result<Ran> {
    let (learned, found) =
        (workspace.target.join("fuzz/corpus").join(target), workspace.target.join("fuzz/found"));
    for folder in [&learned, &found] {
        std::fs::create_dir_all(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    }
    let mut command = Command::new(built.join(target));
    command.arg(&learned).arg(workspace.root.join("fuzz/corpus").join(target));
    command.args([
        format!("-max_total_time={seconds}"),
        format!("-rss_limit_mb={MOST_MEMORY}"),
        format!("-timeout={LONGEST}"),
        format!("-max_len={MOST_BYTES}"),
        format!("-artifact_prefix={}/{target}-", found.display()),
        "-print_final_stats=1".to_owned(),
    ]);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{target} cannot be run"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let executions = executions(&said);
    if output.status.success() {
        let Some(executions) = executions else { bail!("{target} does not say what it did:\n{said}") };
        return Ok(Ran { target: target.to_owned(), executions, found: None });
    }
    let tail: Vec<&str> = said.lines().rev().take(40).collect();
    let tail: Vec<&str> = tail.into_iter().rev().collect();
    println!("{}", tail.join("\n"));
    let found = format!(
        "FOUND something ({}), see above; the input is in {}: mend it, and keep the input in fuzz/corpus/{target}",
        output.status,
        found.display()
    );
    Ok(Ran { target: target.to_owned(), executions: executions.unwrap_or(0), found: Some(found) })
}

/// The number of inputs that were run, as libFuzzer reports it at the end.
fn executions(said: &str) -> Option<u64> {
    let number = said.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))?;
    number.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_from_the_manifest_and_executions_from_what_a_target_says() {
        let manifest = "[package]\nname = \"host-fuzz\"\n[[bin]]\nname = \"elf\"\npath = \"x\"\n[[bin]]\nname = \"lock\"\n";
        assert_eq!(targets(manifest), ["elf", "lock"]);
        let said = "#8\tDONE\nstat::number_of_executed_units: 1234\nstat::average_exec_per_sec: 3\n";
        assert_eq!(executions(said), Some(1234));
        assert_eq!(executions("killed"), None);
        let kept =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/Cargo.toml")).unwrap();
        assert!(targets(&kept).contains(&"scheduler".to_owned()));
    }

    #[test]
    fn a_find_is_a_failure_that_names_the_target() {
        let ran = |target: &str, found: Option<&str>| Ran {
            target: target.to_owned(),
            executions: 5,
            found: found.map(str::to_owned),
        };
        let passed = outcome(&[ran("elf", None), ran("lock", None)]);
        assert_eq!(passed, Outcome::Passed("10 executions of 2 targets found nothing".to_owned()));
        let Outcome::Failed(why) = outcome(&[ran("elf", None), ran("lock", Some("x"))]) else { panic!() };
        assert!(why.contains("something in lock"), "{why}");
    }
}
