//! Finds the Mooncake that tests use.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::built::target;
use crate::program::take_turn;
use crate::skip::skipped;

/// An interpreter with Mooncake, and the libraries that have to be loaded before it.
#[derive(Clone, Debug)]
pub struct Installed {
    python: PathBuf,
    preload: Vec<PathBuf>,
}

/// The Mooncake that `MOONCAKE_PYTHON` and `MOONCAKE_PRELOAD` name, or that `cargo xtask test` installs in the target folder.
/// Without one the test is reported as skipped, with the reason. With one the test waits for its turn.
pub fn installed() -> Option<Installed> {
    static FOUND: OnceLock<Result<Installed, String>> = OnceLock::new();
    match FOUND.get_or_init(find) {
        Ok(installed) => {
            take_turn();
            Some(installed.clone())
        }
        Err(reason) => {
            skipped(&format!("Mooncake cannot be used ({reason}); `cargo xtask test` installs it"));
            None
        }
    }
}

/// The plugin's configuration with this Mooncake. The plugin uses 127.0.0.1 by default.
pub fn config() -> Option<String> {
    installed().map(|installed| installed.config())
}

impl Installed {
    /// The plugin's keys, a line each.
    pub fn config(&self) -> String {
        let quoted: Vec<String> =
            self.preload.iter().map(|path| format!("{:?}", path.display().to_string())).collect();
        format!(
            "backend = \"python\"\npython = {:?}\npreload = [{}]\n",
            self.python.display().to_string(),
            quoted.join(", ")
        )
    }

    /// The interpreter.
    pub fn python(&self) -> &Path {
        &self.python
    }

    /// A program that the package brings along.
    pub fn program(&self, name: &str) -> PathBuf {
        self.python.with_file_name(name)
    }

    /// The environment of Mooncake's own programs.
    pub fn environment(&self) -> Vec<(String, String)> {
        let mut folders: Vec<String> =
            self.preload.iter().filter_map(|path| Some(path.parent()?.display().to_string())).collect();
        folders.dedup();
        if folders.is_empty() { Vec::new() } else { vec![("LD_LIBRARY_PATH".to_owned(), folders.join(":"))] }
    }
}

fn find() -> Result<Installed, String> {
    let named = std::env::var_os("MOONCAKE_PYTHON").filter(|path| !path.is_empty());
    let listed = std::env::var_os("MOONCAKE_PRELOAD").unwrap_or_default();
    let installed = match named {
        Some(python) => {
            Installed { python: python.into(), preload: std::env::split_paths(&listed).collect() }
        }
        None => {
            let target = target();
            let verbs = ["libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1"];
            let found =
                verbs.iter().filter_map(|name| find_file(&target.join("verbs/root"), OsStr::new(name)));
            Installed { python: target.join("python/bin/python"), preload: found.collect() }
        }
    };
    let ask = "import ctypes, sys\n\
               for path in sys.argv[1:]: ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)\n\
               import mooncake.engine, mooncake.store";
    let python = installed.python.display().to_string();
    let output = Command::new(&installed.python)
        .args(["-I", "-c", ask])
        .args(&installed.preload)
        .stdin(Stdio::null())
        .output();
    let output = output.map_err(|error| format!("{python}: {error}"))?;
    if output.status.success() {
        return Ok(installed);
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(format!("{python}: {}", said.lines().last().unwrap_or("it said nothing")))
}

/// A file of this name in a folder or the folders in it.
fn find_file(folder: &Path, name: &OsStr) -> Option<PathBuf> {
    let path = folder.join(name);
    if path.exists() {
        return Some(path);
    }
    let folders = std::fs::read_dir(folder).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    folders.filter(|path| path.is_dir() && !path.is_symlink()).find_map(|path| find_file(&path, name))
}
