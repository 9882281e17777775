//! Fixture plugins as files.

// Each test uses its part.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// The plugin's file: where `BUILT_PLUGINS` says that all were built with this test, and else in this build's folder, built
/// now so that it is never an old one.
pub fn plugin(name: &str) -> PathBuf {
    let library = format!("libhost_plugin_{}.so", name.replace('-', "_"));
    if let Some(folder) = std::env::var_os("BUILT_PLUGINS") {
        let file = Path::new(&folder).join(library);
        assert!(file.is_file(), "{} is missing, and BUILT_PLUGINS says that it is there", file.display());
        return file;
    }
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).expect("tests lie in <target>/<profile>/deps");
    let target = profile.parent().unwrap();
    let package = format!("host-plugin-{name}");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", &package]).env("CARGO_TARGET_DIR", target);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    let built = cargo.output().unwrap();
    let said = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "`cargo build --package {package}` failed, run it by hand:\n{said}");
    let file = profile.join(library);
    assert!(file.is_file(), "cargo built {package} but {} is missing", file.display());
    file
}

/// A directory with copies of these plugins.
pub fn directory(names: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in names {
        std::fs::copy(plugin(name), directory.path().join(format!("{name}.so"))).unwrap();
    }
    directory
}
