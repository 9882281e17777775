//! Plugins as files: the product's, and those that only tests load.
//!
//! The crates in `tests/plugins` are plain libraries of the workspace. Their files are made apart from the product's, in
//! `TARGET/test-plugins`, so that a folder with the built program holds the product's plugins and no others.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::built::{BUILT, profile, repository};

/// The folder in the target folder that has the files of `tests/plugins`.
pub const TEST_PLUGINS: &str = "test-plugins";

/// The plugin's file. Where [`BUILT`] is set, it was built with this test. Else it is built now, once in a process, so that it is
/// never an old one.
///
/// # Panics
/// When it does not build.
#[must_use]
pub fn plugin(name: &str) -> PathBuf {
    static NOW: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let library = format!("libhost_plugin_{}.so", name.replace('-', "_"));
    let built = std::env::var_os(BUILT);
    let profile = built.as_ref().map_or_else(profile, PathBuf::from);
    let target = profile.parent().expect("a profile's folder lies in a target folder");
    let kind = profile.file_name().expect("a profile has a name");
    let file = match is_for_tests(name) {
        true => target.join(TEST_PLUGINS).join(kind).join(library),
        false => profile.join(library),
    };
    if built.is_none() {
        let mut now = NOW.lock().unwrap_or_else(PoisonError::into_inner);
        if !now.contains(name) {
            let kind =
                if kind == "debug" { "dev" } else { kind.to_str().expect("cargo's profiles are text") };
            let mut cargo = build(target, kind, name);
            let output = cargo.output().expect("cargo runs");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{cargo:?} failed, run it by hand:\n{said}");
            now.insert(name.to_owned());
        }
    }
    assert!(file.is_file(), "{} is missing, although it was built", file.display());
    file
}

/// A directory with copies of these plugins.
///
/// # Panics
/// As [`plugin`], and when nothing can be written.
#[must_use]
pub fn directory(names: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory for plugins");
    for name in names {
        let copied = std::fs::copy(plugin(name), directory.path().join(format!("{name}.so")));
        copied.expect("a plugin is copied");
    }
    directory
}

/// All plugins that only tests load.
///
/// # Panics
/// When the repository cannot be read.
#[must_use]
pub fn for_tests() -> Vec<String> {
    let folders = std::fs::read_dir(repository().join("tests/plugins")).expect("the repository can be read");
    let names = folders.map(|entry| entry.expect("the repository can be read").file_name());
    let mut names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
    names.retain(|name| is_for_tests(name));
    names.sort();
    names
}

fn is_for_tests(name: &str) -> bool {
    repository().join("tests/plugins").join(name).join("plugin.toml").is_file()
}

/// The command that makes a plugin's file in this target folder.
#[must_use]
pub fn build(target: &Path, profile: &str, name: &str) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    let is_for_tests = is_for_tests(name);
    match is_for_tests {
        true => cargo.args(["rustc", "--lib", "--crate-type", "cdylib"]),
        false => cargo.arg("build"),
    };
    let folder = if is_for_tests { target.join(TEST_PLUGINS) } else { target.to_owned() };
    cargo.args(["--quiet", "--profile", profile, "--package", &format!("host-plugin-{name}")]);
    cargo.current_dir(repository()).env("CARGO_TARGET_DIR", folder);
    cargo
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins_of_tests_are_made_apart_from_the_products() {
        let names = for_tests();
        assert!(names.contains(&"broken".to_owned()) && !names.contains(&"mark".to_owned()), "{names:?}");
        let folder = |name: &str| {
            let command = build(Path::new("/target"), "dev", name);
            let variables: Vec<_> = command.get_envs().collect();
            variables[0].1.unwrap().to_owned()
        };
        assert_eq!(folder("shm"), "/target");
        assert_eq!(folder("broken"), "/target/test-plugins");
    }
}
