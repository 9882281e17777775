//! The workflow that `host plugins new` writes is valid, its commands exist, and each makes what the next ones need.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use saphyr::{LoadableYamlNode, Yaml};

/// Programs that runners of workflows have and a machine for tests may lack.
const OF_RUNNERS: [&str; 4] = ["gh", "minisign", "rustup", "sudo"];

/// Makes a project in this language, and returns the text of its workflow.
fn made(at: &Path, language: &str) -> String {
    let new = ["plugins", "new", "acme-store", "--role", "tier", "--lang", language, "--path"];
    let output = Command::new(env!("CARGO_BIN_EXE_host")).args(new).arg(at).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read_to_string(at.join(".github/workflows/ci.yml")).unwrap()
}

/// The text at a key.
fn text<'a>(node: &'a Yaml<'_>, key: &str) -> Option<&'a str> {
    node.as_mapping_get(key)?.as_str()
}

/// The steps of a job.
fn steps<'a, 'text>(document: &'a Yaml<'text>, job: &str) -> Vec<&'a Yaml<'text>> {
    let jobs = document.as_mapping_get("jobs").expect("jobs");
    let job = jobs.as_mapping_get(job).unwrap_or_else(|| panic!("no job {job}"));
    assert!(text(job, "runs-on").is_some_and(|image| image.starts_with("ubuntu-")), "{job:?}");
    job.as_mapping_get("steps").and_then(Yaml::as_sequence).expect("steps").iter().collect()
}

/// The script of a step, with the values of the first entry of the matrix.
fn commands(step: &Yaml<'_>, matrix: &BTreeMap<&str, String>) -> Option<String> {
    let filled = text(step, "run")?.to_owned();
    Some(
        matrix
            .iter()
            .fold(filled, |text, (name, value)| text.replace(&format!("${{{{ matrix.{name} }}}}"), value)),
    )
}

#[test]
fn workflows_are_valid_and_their_commands_exist() {
    for language in ["rust", "c", "cpp"] {
        let folder = tempfile::tempdir().unwrap();
        let project = folder.path().join("acme-store");
        let workflow = made(&project, language);
        let documents = Yaml::load_from_str(&workflow).unwrap_or_else(|error| panic!("{language}: {error}"));
        let document = &documents[0];
        for key in ["name", "on", "permissions", "jobs"] {
            assert!(document.as_mapping_get(key).is_some(), "{language}: no {key}");
        }
        let oldest = if language == "rust" { oldest_compiler(&project) } else { "gcc".to_owned() };
        assert!(workflow.contains(&oldest), "{language}: {oldest} builds");
        let matrix =
            BTreeMap::from([("toolchain", oldest), ("cc", "gcc".to_owned()), ("cxx", "g++".to_owned())]);
        let build = steps(document, "build");
        let release = steps(document, "release");
        for step in build.iter().chain(&release) {
            let Some(script) = commands(step, &matrix) else {
                // An action of the platform, at a version.
                let action =
                    text(step, "uses").unwrap_or_else(|| panic!("{language}: {step:?} does nothing"));
                assert!(action.starts_with("actions/") && action.contains('@'), "{action}");
                continue;
            };
            assert!(!script.contains("${{"), "{language}: {script:?} has a value of no matrix");
            exist(&script);
        }

        // The file that is built must be the file that is tested and released.
        let built = if language == "rust" { "target/release" } else { "build" };
        let file = format!("{built}/libacme_store.so");
        let uploads = build.iter().find_map(|step| text(step.as_mapping_get("with")?, "path"));
        assert_eq!(uploads, Some(file.as_str()), "{language}");
        let all: Vec<String> = build.iter().filter_map(|step| commands(step, &matrix)).collect();
        assert!(all.iter().any(|script| script.contains(&format!("./host-plugin-test {file}"))), "{all:?}");
        let signs = release.iter().filter_map(|step| text(step, "run"));
        let signs: Vec<&str> = signs.filter(|script| script.contains("libacme_store.so")).collect();
        assert_eq!(signs.len(), 2, "one signs and one releases: {signs:?}");
        if language != "rust" {
            let make = all.iter().find(|script| script.starts_with("make ")).expect("a build");
            let output =
                Command::new("sh").args(["-c", make]).current_dir(&project).env_remove("MAKEFLAGS").output();
            let output = output.unwrap();
            assert!(output.status.success(), "{make}: {}", String::from_utf8_lossy(&output.stderr));
            assert!(project.join(&file).is_file(), "{make} makes no {file}");
        }
    }
}

/// The compiler that the crate names.
fn oldest_compiler(project: &Path) -> String {
    let manifest: toml::Table = std::fs::read_to_string(project.join("Cargo.toml")).unwrap().parse().unwrap();
    manifest["package"]["rust-version"].as_str().unwrap().to_owned()
}

/// Checks that a shell accepts the script and that each line begins with a program.
fn exist(script: &str) {
    let parsed = Command::new("bash").args(["-n", "-c", script]).output().unwrap();
    assert!(parsed.status.success(), "{script}: {}", String::from_utf8_lossy(&parsed.stderr));
    for line in script.lines() {
        let program = line.split_whitespace().next().expect("a command in each line");
        let here = || {
            let found = Command::new("bash").args(["-c", "type -- \"$1\"", "-", program]).output().unwrap();
            found.status.success()
        };
        // The line before has downloaded the kit.
        let is_kit = program == "./host-plugin-test" && script.contains("-o host-plugin-test");
        let is_asked_for = ["curl", "make"].contains(&program);
        assert!(
            OF_RUNNERS.contains(&program) || is_kit || is_asked_for || here(),
            "{program:?} of {line:?} is no command"
        );
    }
}
