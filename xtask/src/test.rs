//! `cargo xtask test`: everything that can fail, in one command.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::Instant;

use anyhow::Context;

use crate::python;
use crate::workspace::{Profile, Workspace};

const HELP: &str = "\
Build everything and run every test.

Builds the workspace (tests load the plugins that this leaves in the target folder), runs `cargo test --workspace`
with the comparison of the CPU executor with candle, and runs the `openai` python package against a split server. The
package is installed into an environment below the target folder, and so are NIXL (66 MiB), moto (30 MiB), an S3 server for
NIXL's storage tier, and Mooncake (60 MiB), for the tests of their plugins, with Debian's libibverbs1 for the latter where the machine has none, and NVIDIA's compilers for CUDA 12 and 13 (142 MiB), which need no GPU, for those of the CUDA kernels. Where that is not possible, those tests are skipped, loudly, and with CI=true a missing `openai` fails. The few tests
that need what a machine may lack (a nightly compiler, gdb, curl, what NIXL links to) are skipped wherever it is
missing; the summary names each.

Usage: cargo xtask test [ARGUMENTS FOR CARGO TEST]

With arguments, only `cargo test` runs, with them: `cargo xtask test -p host --test walk`.

Environment:
  CI=true       The openai client may not be skipped
  NIXL_LIBRARY  Another libnixl_capi.so for the tests of the NIXL plugin [default: the installed one]
  MOTO_PYTHON   Another Python with moto for those of its tier in a bucket [default: the installed one]
  MOONCAKE_PYTHON
                Another Python with Mooncake for the tests of its plugin [default: the installed one]
  NVRTC         Other folders with libnvrtc.so for the tests of the CUDA kernels, separated as in PATH
  PYTHON        Python that makes the environment [default: python3]";

/// How one part ended.
enum Outcome {
    Passed(String),
    Failed(String),
    Skipped(String),
}

/// Runs the command.
pub fn run(arguments: &[String]) -> anyhow::Result<ExitCode> {
    if arguments.first().is_some_and(|first| ["--help", "-h"].contains(&first.as_str())) {
        println!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let start = Instant::now();
    let workspace = Workspace::find()?;
    workspace.build(Profile::Dev)?;
    let nixl = nixl_library(&workspace);
    let nvrtc = nvrtc_folders(&workspace);
    let mooncake = mooncake_environment(&workspace);
    let moto = moto_python(&workspace);
    let variables = nixl.map(|library| ("NIXL_LIBRARY", library.into()));
    let variables = variables.into_iter().chain(nvrtc.map(|folders| ("NVRTC", folders))).chain(mooncake);
    let variables = variables.chain(moto.map(|python| ("MOTO_PYTHON", python.into())));
    let mut parts = vec![("cargo test", cargo_test(&workspace, arguments, variables.collect())?)];
    let client = if arguments.is_empty() {
        openai_client(&workspace)
    } else {
        Outcome::Skipped("arguments choose among the tests of cargo".to_owned())
    };
    parts.push(("openai client", client));

    println!("\nsummary ({:.0} s)", start.elapsed().as_secs_f64());
    let mut good = true;
    for (name, outcome) in &parts {
        let (word, what) = match outcome {
            Outcome::Passed(what) => ("passed", what),
            Outcome::Failed(what) => ("FAILED", what),
            Outcome::Skipped(what) => ("SKIPPED", what),
        };
        good &= !matches!(outcome, Outcome::Failed(_));
        println!("  {word:<8} {name:<14} {what}");
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The library for the tests of the NIXL plugin, which say that they are skipped when there is none.
fn nixl_library(workspace: &Workspace) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("NIXL_LIBRARY").filter(|path| !path.is_empty()) {
        return Some(named.into());
    }
    let found = python::nixl(workspace);
    if let Err(reason) = &found {
        println!("NIXL cannot be had: {reason}");
    }
    found.ok()
}

/// The S3 server for the tests of NIXL's storage tier in a bucket, which say that they are skipped when there is none.
fn moto_python(workspace: &Workspace) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("MOTO_PYTHON").filter(|path| !path.is_empty()) {
        return Some(named.into());
    }
    let found = python::moto(workspace);
    if let Err(reason) = &found {
        println!("moto cannot be had: {reason}");
    }
    found.ok()
}

/// What the tests of the Mooncake plugin find their Mooncake by. They say that they are skipped when there is none.
fn mooncake_environment(workspace: &Workspace) -> Vec<(&'static str, OsString)> {
    if std::env::var_os("MOONCAKE_PYTHON").is_some_and(|path| !path.is_empty()) {
        return Vec::new();
    }
    match python::mooncake(workspace) {
        Ok((python, preload)) => vec![("MOONCAKE_PYTHON", python.into()), ("MOONCAKE_PRELOAD", preload)],
        Err(reason) => {
            println!("Mooncake cannot be had: {reason}");
            Vec::new()
        }
    }
}

/// The compilers for the tests of the CUDA kernels, which say that they are skipped when there is none.
fn nvrtc_folders(workspace: &Workspace) -> Option<OsString> {
    if let Some(named) = std::env::var_os("NVRTC").filter(|paths| !paths.is_empty()) {
        return Some(named);
    }
    let found = python::nvrtc(workspace);
    if let Err(reason) = &found {
        println!("NVRTC cannot be had: {reason}");
    }
    found.ok()
}

fn cargo_test(
    workspace: &Workspace,
    arguments: &[String],
    variables: Vec<(&'static str, OsString)>,
) -> anyhow::Result<Outcome> {
    let package = |argument: &String| argument.starts_with("-p") || argument.starts_with("--package");
    let chosen = arguments.iter().take_while(|argument| *argument != "--").any(package);
    // One failing test program must not hide the others'.
    let mut command = workspace.cargo(&["test", "--no-fail-fast"]);
    if !chosen {
        // The CPU executor against candle's models: 130 more crates, so only where all tests run.
        command.args(["--workspace", "--features", "host-tests/oracle"]);
    }
    command.envs(variables);
    let mut child = command.args(arguments).stdout(Stdio::piped()).spawn().context("cargo cannot be run")?;
    let mut counts = Counts::default();
    if let Some(stdout) = child.stdout.take() {
        let mut ours = std::io::stdout();
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.context("the output of cargo test cannot be read")?;
            counts.add(&String::from_utf8_lossy(&line));
            ours.write_all(&line).and_then(|()| ours.write_all(b"\n")).context("nobody reads the output")?;
        }
    }
    let status = child.wait().context("cargo test cannot be waited for")?;
    let Counts { passed, failed, ignored, skipped } = counts;
    let what = format!("{passed} passed, {failed} failed, {ignored} ignored");
    // What a test could not check on this machine; it says so itself.
    let skips: String = skipped.iter().map(|skip| format!("\n           SKIPPED {skip}")).collect();
    Ok(match status.success() {
        true => Outcome::Passed(format!("{what}{skips}")),
        false => Outcome::Failed(format!("{what}; {status}{skips}")),
    })
}

/// What the test programs said in their last lines.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
    /// What tests said that they could not check.
    skipped: Vec<String>,
}

/// Whether the client may not be skipped.
fn ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true")
}

impl Counts {
    /// Takes `test result: ok. 3 passed; 0 failed; 1 ignored; …`, and leaves other lines alone.
    fn add(&mut self, line: &str) {
        if let Some((_, what)) = line.split_once("SKIPPED: ") {
            self.skipped.push(what.to_owned());
        }
        let Some(rest) = line.strip_prefix("test result: ") else { return };
        let words: Vec<&str> = rest.split([' ', ';', '.']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let Ok(number) = pair[0].parse::<u64>() else { continue };
            match pair[1] {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }
}

fn openai_client(workspace: &Workspace) -> Outcome {
    println!("\nopenai client");
    let python = match python::environment(workspace) {
        Ok(python) => python,
        Err(reason) => {
            println!("SKIPPED: the openai package cannot be had: {reason}");
            return if ci() { Outcome::Failed(reason) } else { Outcome::Skipped(reason) };
        }
    };
    match python::check(workspace, &python) {
        Ok(true) => Outcome::Passed("all checks".to_owned()),
        Ok(false) => Outcome::Failed("see above".to_owned()),
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_test_programs_are_added_up() {
        let mut counts = Counts::default();
        for line in [
            "running 4 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "SKIPPED: a dragon: there is none here",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 7 filtered out; finished in 1.20s",
        ] {
            counts.add(line);
        }
        assert_eq!(
            counts,
            Counts {
                passed: 4,
                failed: 2,
                ignored: 1,
                skipped: vec!["a dragon: there is none here".to_owned()]
            }
        );
    }
}
