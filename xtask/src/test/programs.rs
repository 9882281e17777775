//! The test programs of the workspace: built in one go with everything that they load and start.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, ensure};

use crate::workspace::Workspace;

/// Files with the fixtures of other projects' libraries and programs: NIXL, Mooncake, moto.
const EXTERNAL: [&str; 3] = ["plugin_support/nixl.rs", "plugin_support/mooncake.rs", "plugin_support/s3.rs"];

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
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

/// The test program that a message of cargo's tells of.
fn program(message: &serde_json::Value) -> Option<Program> {
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let text = |value: &serde_json::Value| value.as_str().map(PathBuf::from);
    let (path, source) = (text(&message["executable"])?, text(&message["target"]["src_path"])?);
    let folder = text(&message["manifest_path"])?.parent()?.to_owned();
    let package = folder.file_name()?.to_str()?.to_owned();
    let target = message["target"]["name"].as_str()?;
    let kind = message["target"]["kind"][0].as_str()?;
    let name = if kind == "test" { format!("{package}/{target}") } else { format!("{package} ({kind})") };
    let is_external = kind == "test" && names_external(&source);
    Some(Program { name, path, arguments: Vec::new(), folder, is_external })
}

fn names_external(source: &Path) -> bool {
    let text = std::fs::read_to_string(source).unwrap_or_default();
    EXTERNAL.iter().any(|file| text.contains(file))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_of_cargo_name_test_programs_and_their_group() {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/tests");
        let message = |kind: &str, file: &str, test: bool| {
            json!({
                "reason": "compiler-artifact",
                "profile": { "test": test },
                "executable": "/target/debug/deps/some-1234",
                "manifest_path": "/somewhere/host/Cargo.toml",
                "target": { "name": "some", "kind": [kind], "src_path": tests.join(file) },
            })
        };
        let of = |kind, file, test| program(&message(kind, file, test));
        let found = |kind, file| of(kind, file, true).map(|program| (program.name, program.is_external));
        assert_eq!(found("test", "nixl_walk.rs"), Some(("host/some".to_owned(), true)));
        assert_eq!(found("test", "walk.rs"), Some(("host/some".to_owned(), false)));
        assert_eq!(found("bin", "walk.rs"), Some(("host (bin)".to_owned(), false)));
        assert!(of("test", "walk.rs", false).is_none(), "a program that is no test");
        assert!(program(&json!({ "reason": "build-finished", "success": true })).is_none());
    }
}
