//! `cargo xtask nightly`: checks that take too long, or need too much, to be made of every change.

mod benchmarks;
mod browser;
mod chaos;
mod clients;
mod fuzz;
mod kit;
mod memory;
mod models;
mod safeguards;
mod schema;
mod schemas;

use std::ffi::OsStr;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::bail;

use crate::msrv;
use crate::outcome::{Outcome, summary};
use crate::workspace::Workspace;

const HELP: &str = "\
Checks that take too long, or need too much, to be made of every change.

A check whose tool is missing is skipped, and the summary names the command that installs it.

Usage: cargo xtask nightly [CHECK...]

Options:
  --list      The checks, and what each is
  -h, --help  This text";

/// One of the checks.
struct Check {
    name: &'static str,
    about: &'static str,
    run: fn(&Workspace) -> Outcome,
}

const CHECKS: &[Check] = &[
    Check {
        name: "dependencies",
        about: "licences, banned crates and sources of all crates in Cargo.lock, by deny.toml (cargo-deny)",
        run: |workspace| dependencies(workspace, "cargo-deny".as_ref()),
    },
    Check {
        name: "advisories",
        about: "known defects of the crates in Cargo.lock, where RustSec's database can be fetched (cargo-deny, git)",
        run: |workspace| advisories(workspace, "cargo-deny".as_ref()),
    },
    Check {
        name: "msrv",
        about: "`cargo xtask msrv`: what plugins are made of, with the oldest compiler that may build them",
        run: oldest_compiler,
    },
    Check {
        name: "loom",
        about: "protocols of atomics in every order that the memory model allows (tests/loom)",
        run: models::loom,
    },
    Check {
        name: "shuttle",
        about: "locks, queues and channels under schedules that are drawn (tests/shuttle)",
        run: models::shuttle,
    },
    Check {
        name: "asan",
        about: "crates with unsafe code, their plugins and the kept inputs of fuzzing, with AddressSanitizer",
        run: memory::asan,
    },
    Check {
        name: "valgrind",
        about: "plugins as they are released, loaded from their files, under memcheck (valgrind)",
        run: memory::valgrind,
    },
    Check {
        name: "miri",
        about: "the net around plugins and the page copies under Miri (a nightly compiler with miri)",
        run: memory::miri,
    },
    Check {
        name: "kit",
        about: "plugins that keep their contract pass the conformance kit 50 times of 50, or KIT_TIMES, or only KIT_PLUGINS",
        run: kit::check,
    },
    Check {
        name: "chaos",
        about: "`cargo xtask chaos`: a thousand faults on real processes under load, every answer compared (PyPI: NIXL, Mooncake)",
        run: chaos::faults,
    },
    Check {
        name: "soak",
        about: "`cargo xtask chaos`: hostile clients for 60 minutes or SOAK_MINUTES, and memory that stays flat",
        run: chaos::soak,
    },
    Check {
        name: "roll",
        about: "`cargo xtask roll`: a cluster goes from the build of the commit before to this one under load, and back",
        run: roll,
    },
    Check {
        name: "clients",
        about: "litellm and langchain-openai, unchanged, against a split server: chats, schemas, tools, responses (PyPI)",
        run: clients::check,
    },
    Check {
        name: "benchmarks",
        about: "benchmark clients of SGLang, vLLM and NVIDIA, and `llm`, unchanged, against a split server (PyPI, 1 GB)",
        run: benchmarks::check,
    },
    Check {
        name: "schemas",
        about: "a real model under 1000 random schemas, or SCHEMAS_COUNT, and a sample like those of programs: what ends is valid (PyPI)",
        run: schemas::check,
    },
    Check {
        name: "schemathesis",
        about: "requests made from /openapi.json, 50 or SCHEMATHESIS_EXAMPLES to each path, and their answers held to it (PyPI)",
        run: schema::check,
    },
    Check {
        name: "browser",
        about: "the pages of `host simulate --html` in headless Chromium: drawn, complete, zoomed and moved (npm, 120 MB)",
        run: browser::check,
    },
    Check {
        name: "faults",
        about: "`host simulate --faults`: 100,000 seeds or FAULT_SEEDS of simulated clusters in which everything goes wrong",
        run: faults,
    },
    Check {
        name: "determinism",
        about: "simulations in a release build, on one thread and beside seven others: the reports that a debug build wrote",
        run: determinism,
    },
    Check {
        name: "safeguards",
        about: "the same with each safeguard taken out of the core in turn: the seeds find that it is missing",
        run: safeguards::check,
    },
    Check {
        name: "fuzz",
        about: "every reader under libFuzzer, 30 s each or FUZZ_SECONDS, or only FUZZ_TARGETS (cargo-fuzz, a C++ compiler)",
        run: fuzz::check,
    },
];

/// Runs the command.
pub fn run(arguments: &[String]) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let mut chosen: Vec<&Check> = Vec::new();
    for argument in arguments {
        match argument.as_str() {
            "--help" | "-h" => {
                println!("{HELP}");
                return Ok(ExitCode::SUCCESS);
            }
            "--list" => {
                CHECKS.iter().for_each(|check| println!("{:<14} {}", check.name, check.about));
                return Ok(ExitCode::SUCCESS);
            }
            name => match CHECKS.iter().find(|check| check.name == name) {
                Some(check) => chosen.push(check),
                None => bail!("nightly has no check {name:?}; see `cargo xtask nightly --list`"),
            },
        }
    }
    if chosen.is_empty() {
        chosen.extend(CHECKS);
    }
    let workspace = Workspace::find()?;
    let mut parts = Vec::new();
    for check in chosen {
        println!("\n{}: {}", check.name, check.about);
        let began = Instant::now();
        parts.push((check.name, (check.run)(&workspace).after(began.elapsed())));
    }
    Ok(summary(&parts, start))
}

/// Other seeds each day, so that the checks of a month are not one check.
fn faults(workspace: &Workspace) -> Outcome {
    let seeds = std::env::var("FAULT_SEEDS").unwrap_or_else(|_unset| "100000".to_owned());
    let days = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86_400);
    let first = (days * 1_000_000).to_string();
    let mut command = Command::new("cargo");
    command.current_dir(&workspace.root).args([
        "run",
        "--release",
        "-p",
        "host-simulate",
        "--example",
        "faults",
        "--",
    ]);
    outcome(command.args([&first, &seeds]), &format!("{seeds} seeds from {first}, nothing found"))
}

/// The written reports were made by a debug build. The tests that every change passes compare them with one, too.
fn determinism(workspace: &Workspace) -> Outcome {
    let with_threads = |threads: &str| {
        let mut command =
            workspace.cargo(&["test", "--release", "-p", "host-simulate", "--test", "clusters"]);
        outcome(command.args(["--", "--test-threads", threads]), "every report is the written one")
    };
    match with_threads("1") {
        Outcome::Passed(_) => with_threads("8"),
        other => other,
    }
}

/// Whether a program starts and says its version.
fn is_there(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// What a command prints, without the last line's end.
fn print(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// Passed if the command succeeds.
fn outcome(command: &mut Command, passed: &str) -> Outcome {
    match command.stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Outcome::Passed(passed.to_owned()),
        Ok(status) => Outcome::Failed(format!("{command:?} ended with {status}; see above")),
        Err(error) => Outcome::Failed(format!("{command:?} cannot be run: {error}")),
    }
}

/// `cargo-deny` with these arguments, unless it is not there.
fn cargo_deny(workspace: &Workspace, deny: &OsStr, arguments: &[&str]) -> Result<Command, Outcome> {
    if !is_there(Command::new(deny).arg("--version")) {
        return Err(Outcome::Skipped(
            "there is no cargo-deny; install it with `cargo install cargo-deny --locked`".to_owned(),
        ));
    }
    let mut command = Command::new(deny);
    command.arg("--locked").args(arguments).current_dir(&workspace.root);
    Ok(command)
}

/// What deny.toml says of licences, bans and sources. `deny` is cargo-deny.
fn dependencies(workspace: &Workspace, deny: &OsStr) -> Outcome {
    let arguments = ["check", "--hide-inclusion-graph", "licenses", "bans", "sources"];
    match cargo_deny(workspace, deny, &arguments) {
        Ok(mut command) => outcome(&mut command, "licences, bans and sources are as deny.toml says"),
        Err(skipped) => skipped,
    }
}

/// What RustSec's database says of dependencies. `deny` is cargo-deny. A machine without the network does not fail.
fn advisories(workspace: &Workspace, deny: &OsStr) -> Outcome {
    let fetched = cargo_deny(workspace, deny, &["fetch", "db"]).map(|mut fetch| is_there(&mut fetch));
    match fetched {
        Ok(true) => {}
        Ok(false) => {
            return Outcome::Skipped("https://github.com/RustSec/advisory-db cannot be fetched".to_owned());
        }
        Err(skipped) => return skipped,
    }
    let arguments = ["check", "--hide-inclusion-graph", "--disable-fetch", "advisories"];
    match cargo_deny(workspace, deny, &arguments) {
        Ok(mut command) => outcome(&mut command, "no crate has a known defect that deny.toml does not name"),
        Err(skipped) => skipped,
    }
}

fn oldest_compiler(workspace: &Workspace) -> Outcome {
    let version = match msrv::rust_version(workspace) {
        Ok(version) => version,
        Err(error) => return Outcome::Failed(format!("{error:#}")),
    };
    if !is_there(Command::new("rustup").args(["run", &version, "cargo", "--version"])) {
        return Outcome::Skipped(format!(
            "there is no Rust {version}; install it with `rustup toolchain install {version}`"
        ));
    }
    let passed = format!("the API and the crates of `host plugins new` with Rust {version}");
    outcome(&mut workspace.cargo(&["xtask", "msrv"]), &passed)
}

/// From the commit before this one, and back. Both are built.
fn roll(workspace: &Workspace) -> Outcome {
    let passed = "no request was lost or refused, and no token differs";
    match outcome(&mut workspace.cargo(&["xtask", "roll"]), passed) {
        Outcome::Passed(_) => outcome(&mut workspace.cargo(&["xtask", "roll", "--executor", "cpu"]), passed),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::dist::licences::{accepted, is_satisfied};
    use crate::dist::{metadata, target_triple};

    fn root() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
    }

    /// A program that stands in for cargo-deny: it notes what it is called with, fetches the database or does not, and ends
    /// as it is told.
    fn stand_in(folder: &Path, fetched: i32, code: i32) -> PathBuf {
        let path = folder.join(format!("deny-{fetched}-{code}"));
        let script = format!(
            "#!/bin/sh\ntest \"$1\" = --version && exit 0\necho \"$PWD $*\" > {}/called\n\
             test \"$2\" = fetch && exit {fetched}\nexit {code}\n",
            folder.display()
        );
        crate::executable::write(&path, &script);
        path
    }

    #[test]
    fn without_cargo_deny_the_check_is_skipped_with_the_command_that_installs_it() {
        let workspace = Workspace { root: root().into(), target: "target".into() };
        let Outcome::Skipped(why) = dependencies(&workspace, "/nowhere/cargo-deny".as_ref()) else {
            panic!("it was not skipped")
        };
        assert!(why.contains("cargo install cargo-deny --locked"), "{why}");
    }

    #[test]
    fn cargo_deny_decides_and_is_asked_in_the_root() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        let workspace = Workspace { root: at.clone(), target: "target".into() };
        assert!(matches!(dependencies(&workspace, stand_in(&at, 1, 0).as_ref()), Outcome::Passed(_)));
        let called = std::fs::read_to_string(at.join("called")).unwrap();
        let expected = "--locked check --hide-inclusion-graph licenses bans sources";
        assert_eq!(called.trim(), format!("{} {expected}", at.display()));
        assert!(matches!(dependencies(&workspace, stand_in(&at, 0, 4).as_ref()), Outcome::Failed(_)));
    }

    #[test]
    fn advisories_fail_the_check_only_where_their_database_can_be_fetched() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        let workspace = Workspace { root: at.clone(), target: "target".into() };
        let of = |fetched, code| advisories(&workspace, stand_in(&at, fetched, code).as_ref());
        assert!(matches!(of(0, 0), Outcome::Passed(_)));
        let called = std::fs::read_to_string(at.join("called")).unwrap();
        assert!(
            called.ends_with("--locked check --hide-inclusion-graph --disable-fetch advisories\n"),
            "{called}"
        );
        assert!(matches!(of(0, 1), Outcome::Failed(_)));
        let Outcome::Skipped(why) = of(1, 1) else { panic!("it was not skipped") };
        assert!(why.contains("advisory-db"), "{why}");
    }

    /// The strings of a list of deny.toml.
    fn list<'a>(deny: &'a str, name: &str) -> BTreeSet<&'a str> {
        let text = deny.split_once(&format!("\n{name} = [")).unwrap().1.split_once(']').unwrap().0;
        text.split(',').map(|entry| entry.trim().trim_matches('"')).filter(|text| !text.is_empty()).collect()
    }

    #[test]
    fn licences_that_deny_toml_allows_are_accepted_in_a_release() {
        let deny = std::fs::read_to_string(root().join("deny.toml")).unwrap();
        let allowed = list(&deny, "allow");
        assert!(allowed.contains("MIT"), "{allowed:?}");
        let refused: Vec<_> = allowed.difference(&accepted()).copied().collect();
        assert_eq!(refused, [""; 0]);
    }

    /// What of cargo-deny's work needs no cargo-deny: licences, sources and banned crates of what is built here.
    #[test]
    fn dependencies_of_this_machine_s_target_are_as_deny_toml_says() {
        let deny = std::fs::read_to_string(root().join("deny.toml")).unwrap();
        let licences: Vec<&str> = list(&deny, "allow").into_iter().collect();
        let [index] = list(&deny, "allow-registry").into_iter().collect::<Vec<_>>()[..] else {
            panic!("one registry is allowed")
        };
        let banned = deny.split("crate = \"").skip(1).filter_map(|rest| rest.split('"').next());
        let banned: BTreeSet<&str> = banned.collect();
        assert!(banned.contains("openssl-sys"), "{banned:?}");
        let workspace = Workspace { root: root().into(), target: "target".into() };
        let target = target_triple().unwrap();
        let metadata = metadata(&workspace, &target).unwrap();
        let mut others = 0;
        for package in metadata["packages"].as_array().unwrap() {
            let text = |field: &str| package[field].as_str().unwrap_or_default();
            let (name, source) = (text("name"), text("source"));
            assert!(!banned.contains(name), "deny.toml bans {name}");
            if !source.is_empty() {
                others += 1;
                assert_eq!(source, format!("registry+{index}"), "{name}");
                assert!(is_satisfied(text("license"), &licences), "{name} is under {:?}", text("license"));
            }
        }
        assert!(others > 100, "{others} crates of others");
    }

    #[test]
    fn a_check_that_is_not_there_is_an_error() {
        assert!(run(&["weather".to_owned()]).unwrap_err().to_string().contains("--list"));
    }
}
