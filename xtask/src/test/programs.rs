//! The test programs of the workspace: built in one go with everything that they load and start.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use host_tests::plugin_files;

use crate::workspace::Workspace;

/// What the names of programs begin with whose tests run libraries and programs of other projects: NIXL, Mooncake, moto.
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
    /// Whether it has tests of the group that runs other projects' libraries and programs, one at a time.
    pub is_external: bool,
}

/// Builds all crates, plugins and test programs of the workspace and says which test programs there are.
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
    // In a folder of their own, so that no folder of the product has them.
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

/// The test program that a message of cargo's tells of.
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
    /// The names of its tests, with their modules.
    ///
    /// # Errors
    /// When it cannot be run.
    pub fn tests(&self) -> anyhow::Result<Vec<String>> {
        let mut list = Command::new(&self.path);
        list.args(["--list", "--format", "terse"]).current_dir(&self.folder).stdin(Stdio::null());
        let output = list.output().with_context(|| format!("{} cannot be run", self.path.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
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
}
