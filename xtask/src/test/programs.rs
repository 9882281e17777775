//! The test programs of the workspace: built in one go with everything that they load and start.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use host_tests::plugin_files;

use crate::workspace::Workspace;

/// Tests that run libraries and programs of other projects (NIXL, Mooncake, moto): the tests in modules of this name, and all
/// tests of a program whose name begins with it.
const EXTERNAL: &str = "external";

/// A test program.
#[derive(Clone, Debug)]
pub struct Program {
    /// Package and file, as in `host/walk`.
    pub name: String,
    /// The executable.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Its package's folder, in which it runs.
    pub folder: PathBuf,
    /// Whether its tests are of the group that runs other projects' libraries and programs, one at a time.
    pub is_external: bool,
}

/// Builds all crates, plugins and test programs of the workspace, and returns the test programs.
///
/// One call of cargo, so that every crate is built with one set of features, once.
///
/// # Errors
/// When something does not build.
pub fn build(workspace: &Workspace) -> anyhow::Result<Vec<Program>> {
    let what = ["build", "--workspace", "--lib", "--bins", "--examples", "--tests"];
    let mut command = workspace.cargo(&what);
    command.args(["--features", super::FEATURES, "--message-format=json-render-diagnostics"]);
    let mut child = command.stdout(Stdio::piped()).spawn().context("cargo cannot be run")?;
    let mut programs = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line.context("the output of cargo build cannot be read")?;
            let Ok(message) = serde_json::from_str::<serde_json::Value>(&line) else { continue };
            programs.extend(program(&message));
        }
    }
    let status = child.wait().context("cargo build cannot be waited for")?;
    ensure!(status.success(), "the workspace does not build; see above");
    // Plugins of tests get a folder of their own, so that no folder of the product has them.
    for plugin in plugin_files::for_tests() {
        let status = plugin_files::build(&workspace.target, "dev", &plugin).status();
        ensure!(
            status.context("cargo cannot be run")?.success(),
            "the plugin {plugin} does not build; see above"
        );
    }
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

/// The test program that a message of cargo describes.
fn program(message: &serde_json::Value) -> Option<Program> {
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let text = |value: &serde_json::Value| value.as_str().map(PathBuf::from);
    let path = text(&message["executable"])?;
    let folder = text(&message["manifest_path"])?.parent()?.to_owned();
    let package = folder.file_name()?.to_str()?.to_owned();
    let target = message["target"]["name"].as_str()?;
    let kind = message["target"]["kind"][0].as_str()?;
    let name = if kind == "test" { format!("{package}/{target}") } else { format!("{package} ({kind})") };
    let is_external = kind == "test" && target.starts_with(EXTERNAL);
    Some(Program { name, path, arguments: Vec::new(), folder, is_external })
}

impl Program {
    /// This program with its tests that are taken. It comes in two parts when some of these are of the external group and others
    /// are not. Empty when no test is taken.
    ///
    /// # Errors
    /// When its tests cannot be listed.
    pub fn with(self, is_taken: impl Fn(&str) -> bool) -> anyhow::Result<Vec<Self>> {
        let tests = self.tests()?;
        let is_external = |test: &str| self.is_external || test.split("::").any(|module| module == EXTERNAL);
        let part = |external: bool| {
            let chosen = |test: &&String| is_taken(test) && is_external(test) == external;
            let mut arguments: Vec<String> = tests.iter().filter(chosen).cloned().collect();
            if arguments.is_empty() {
                return None;
            }
            if arguments.len() == tests.len() {
                arguments.clear();
            } else {
                arguments.push("--exact".to_owned());
            }
            let name = match external && !self.is_external {
                true => format!("{}, external", self.name),
                false => self.name.clone(),
            };
            Some(Self { name, arguments, is_external: external, ..self.clone() })
        };
        Ok([part(true), part(false)].into_iter().flatten().collect())
    }

    /// The names of its tests, with their modules.
    fn tests(&self) -> anyhow::Result<Vec<String>> {
        let mut list = Command::new(&self.path);
        list.args(["--list", "--format", "terse"]).current_dir(&self.folder).stdin(Stdio::null());
        let output = list.output().with_context(|| format!("{} cannot be run", self.path.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "{} lists no tests: {}", self.path.display(), output.status);
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_of_cargo_name_test_programs_and_their_group() {
        let message = |kind: &str, name: &str, test: bool| {
            json!({
                "reason": "compiler-artifact",
                "profile": { "test": test },
                "executable": "/target/debug/deps/some-1234",
                "manifest_path": "/somewhere/host/Cargo.toml",
                "target": { "name": name, "kind": [kind] },
            })
        };
        let of = |kind, name, test| program(&message(kind, name, test));
        let found = |kind, name| of(kind, name, true).map(|program| (program.name, program.is_external));
        assert_eq!(found("test", "external"), Some(("host/external".to_owned(), true)));
        assert_eq!(found("test", "external_nixl"), Some(("host/external_nixl".to_owned(), true)));
        assert_eq!(found("test", "transfer"), Some(("host/transfer".to_owned(), false)));
        assert_eq!(found("bin", "external"), Some(("host (bin)".to_owned(), false)));
        assert!(of("test", "transfer", false).is_none(), "a program that is no test");
        assert!(program(&json!({ "reason": "build-finished", "success": true })).is_none());
    }
    #[test]
    fn a_program_with_tests_of_the_external_group_is_run_in_two_parts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("transfer");
        let list = "staging::external::over_nixl: test\nstaging::over_shm: test\nwalk::externals: test\n";
        crate::executable::write(&path, &format!("#!/bin/sh\ncat <<'END'\n{list}END\n"));
        let parts = |is_external, word: &str| {
            let folder = folder.path().to_owned();
            let program = Program {
                name: "host/transfer".into(),
                path: path.clone(),
                arguments: vec![],
                folder,
                is_external,
            };
            let parts = program.with(|test| test.contains(word)).unwrap().into_iter();
            parts.map(|part| (part.name, part.arguments.join(" "), part.is_external)).collect::<Vec<_>>()
        };
        let part =
            |name: &str, arguments: &str, is_external| (name.to_owned(), arguments.to_owned(), is_external);
        let external = part("host/transfer, external", "staging::external::over_nixl --exact", true);
        let rest = part("host/transfer", "staging::over_shm walk::externals --exact", false);
        assert_eq!(parts(false, ""), [external.clone(), rest]);
        assert_eq!(parts(false, "nixl"), [external]);
        assert_eq!(parts(true, ""), [part("host/transfer", "", true)]);
        assert_eq!(parts(false, "nothing"), []);
    }
}
