//! `cargo xtask nightly kit`: plugins that keep their contract pass the conformance kit every time.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use host_tests::plugin_files::{self, TEST_PLUGINS};
use host_tests::{mooncake, nixl};

use crate::outcome::Outcome;
use crate::workspace::{Profile, Workspace};

/// Variable with the number of times that each plugin is tested.
const TIMES: &str = "KIT_TIMES";
/// Variable that names some of the plugins, separated by commas.
const ONLY: &str = "KIT_PLUGINS";
const USUAL_TIMES: u32 = 50;
/// For the plugins over NIXL and Mooncake, whose libraries take long to start and to end.
const TIMES_OVER_LIBRARIES: u32 = 10;

/// A plugin, or one of its configurations.
struct Subject {
    name: &'static str,
    plugin: &'static str,
    config: Option<String>,
    flags: &'static [&'static str],
    times: u32,
}

/// How often a subject passed.
struct Ran {
    name: &'static str,
    passed: u32,
    times: u32,
}

/// Tests each plugin so many times.
pub fn check(workspace: &Workspace) -> Outcome {
    match run_all(workspace) {
        Ok(ran) => outcome(&ran),
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}

fn outcome(ran: &[Ran]) -> Outcome {
    let counts: Vec<String> =
        ran.iter().map(|ran| format!("{} {} of {}", ran.name, ran.passed, ran.times)).collect();
    let counts = counts.join(", ");
    let all = !ran.is_empty() && ran.iter().all(|ran| ran.passed == ran.times);
    if all { Outcome::Passed(counts) } else { Outcome::Failed(counts) }
}

fn run_all(workspace: &Workspace) -> anyhow::Result<Vec<Ran>> {
    let times = match std::env::var(TIMES) {
        Ok(text) => Some(text.parse().with_context(|| format!("{TIMES}={text} is no number"))?),
        Err(_not_set) => None,
    };
    let only = std::env::var(ONLY).ok();
    let wanted = |name: &str| only.as_ref().is_none_or(|only| only.split(',').any(|one| one == name));
    let folder = tempfile::tempdir().context("there is no temporary folder")?;
    let subjects: Vec<Subject> =
        subjects(folder.path()).into_iter().filter(|subject| wanted(subject.name)).collect();
    ensure!(!subjects.is_empty(), "{ONLY} names no plugin that is tested here");
    workspace.build(Profile::Dev, &["host-plugin-test"])?;
    let kit = workspace.built(Profile::Dev).join("host-plugin-test");
    let run = |subject: &Subject| {
        let file = built(workspace, subject.plugin)?;
        let times = times.map_or(subject.times, |times: u32| times.min(subject.times));
        repeat(&kit, &file, subject, times, folder.path())
    };
    subjects.iter().map(run).collect()
}

/// The plugins and configurations to test. Storage tiers get folders in `folder`.
fn subjects(folder: &Path) -> Vec<Subject> {
    let plain = |plugin| Subject { name: plugin, plugin, config: None, flags: &[], times: USUAL_TIMES };
    let names = ["shm", "wire", "unsettled", "loopback", "map", "memory", "plain", "swa"];
    let mut subjects: Vec<Subject> = names.into_iter().map(plain).collect();
    let file_tier = |name, more: &str| {
        let limits = "segment_mib = 4\nsize_limit_mib = 64\nfree_floor_mib = 0";
        let config = Some(format!("dir = {:?}\n{limits}\n{more}\n", folder.join(name)));
        Subject { name, config, ..plain("hicache-file") }
    };
    subjects.extend([
        file_tier("hicache-file", ""),
        // One read or write under way at a time, and one batch.
        file_tier("hicache-file-one", "io = \"threads\"\nthreads = 1\nmax_batches = 1\nqueue_depth = 1"),
        // Each batch takes a third of a second.
        Subject {
            name: "slow",
            config: Some("delay_ms = 300".to_owned()),
            flags: &["--patience", "30"],
            ..plain("faulty-tier")
        },
    ]);
    for (name, config) in [("nixl", nixl::config()), ("mooncake", mooncake::config())] {
        match config {
            None => println!("{name} is not tested: its library is not on this machine"),
            Some(config) => {
                // Deadlines that no call reaches, on a busy machine neither.
                let config = format!("connect_timeout_ms = 60000\nfence_timeout_ms = 60000\n{config}");
                let (config, flags) = (Some(config), &["--patience", "30"][..]);
                subjects.push(Subject { config, flags, times: TIMES_OVER_LIBRARIES, ..plain(name) });
            }
        }
    }
    subjects
}

/// Builds a plugin and returns the path of its file.
fn built(workspace: &Workspace, plugin: &str) -> anyhow::Result<PathBuf> {
    let mut command = plugin_files::build(&workspace.target, Profile::Dev.name(), plugin);
    let status = command.status().context("cargo cannot be run")?;
    ensure!(status.success(), "{plugin} does not build; see above");
    let library = format!("libhost_plugin_{}.so", plugin.replace('-', "_"));
    let places = [workspace.built(Profile::Dev), workspace.target.join(TEST_PLUGINS).join("debug")];
    let file = places.into_iter().map(|place| place.join(&library)).find(|file| file.is_file());
    file.with_context(|| format!("{library} was built and is not there"))
}

fn repeat(kit: &Path, file: &Path, subject: &Subject, times: u32, folder: &Path) -> anyhow::Result<Ran> {
    let mut ran = Ran { name: subject.name, passed: 0, times };
    for turn in 1..=times {
        let mut command = Command::new(kit);
        command.args(subject.flags);
        if let Some(config) = &subject.config {
            let at = folder.join(format!("{}.toml", subject.name));
            std::fs::write(&at, config).with_context(|| format!("{} cannot be written", at.display()))?;
            command.arg("--plugin-config").arg(at);
        }
        let output = command.arg(file).output().context("the kit cannot be run")?;
        if output.status.success() {
            ran.passed += 1;
        } else {
            let said = format!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            println!("{}, time {turn}:\n{said}", subject.name);
        }
        if turn.is_multiple_of(10) && turn < times {
            println!("{:<18} {} of {turn} so far", subject.name, ran.passed);
        }
    }
    println!("{:<18} {} of {times}", subject.name, ran.passed);
    Ok(ran)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_time_that_did_not_pass_fails_the_check_with_all_counts() {
        let ran = |passed| Ran { name: "a", passed, times: 50 };
        assert_eq!(outcome(&[ran(50)]), Outcome::Passed("a 50 of 50".into()));
        assert_eq!(outcome(&[ran(50), ran(49)]), Outcome::Failed("a 50 of 50, a 49 of 50".into()));
        assert!(matches!(outcome(&[]), Outcome::Failed(_)), "nothing was tested");
    }
}
