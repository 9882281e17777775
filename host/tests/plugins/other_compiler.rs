//! A plugin that another compiler built, with shuffled layouts of Rust types, loads and keeps its contract. So no type with Rust's
//! own layout crosses the boundary.

use std::path::Path;
use std::process::Command;

use host_tests::skip::skipped;

/// A command for `rustup run nightly`, if that toolchain is installed.
fn nightly(arguments: &[&str]) -> Option<Command> {
    let version = Command::new("rustup").args(["run", "nightly", "rustc", "--version"]).output();
    version.ok().filter(|version| version.status.success())?;
    let mut command = Command::new("rustup");
    command.args(["run", "nightly"]).args(arguments);
    // Cargo set these for the compiler that runs this test.
    for variable in ["RUSTUP_TOOLCHAIN", "RUSTC", "RUSTDOC", "CARGO", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"]
    {
        command.env_remove(variable);
    }
    Some(command)
}

#[test]
fn a_plugin_of_the_nightly_compiler_with_shuffled_layouts_keeps_its_contract() {
    let packages = ["wire", "memory", "plain"].map(|name| format!("host-plugin-{name}"));
    if nightly(&[]).is_none() {
        return skipped(
            "plugins built by another compiler: there is no nightly (`rustup toolchain install nightly`)",
        );
    }
    let test = std::env::current_exe().unwrap();
    let target = test.ancestors().nth(3).expect("tests lie in <target>/<profile>/deps").join("nightly");
    for package in &packages {
        let build =
            ["cargo", "rustc", "--quiet", "--offline", "--lib", "--crate-type", "cdylib", "--package"];
        let mut cargo = nightly(&[&build[..], &[package]].concat()).unwrap();
        cargo.current_dir(env!("CARGO_MANIFEST_DIR")).env("CARGO_TARGET_DIR", &target);
        cargo.env("RUSTFLAGS", "-Zrandomize-layout -Zlayout-seed=7");
        let built = cargo.output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let file = target.join("debug").join(format!("lib{}.so", package.replace('-', "_")));
        let (inspected, _) = host(&["plugins", "inspect"], &file);
        assert!(
            inspected.contains("-nightly"),
            "{package} is no plugin of the nightly compiler:\n{inspected}"
        );
        let (tested, passed) = host(&["plugins", "test", "--patience", "30"], &file);
        assert!(passed && tested.contains("\npass"), "{package}:\n{tested}");
    }
}

fn host(arguments: &[&str], file: &Path) -> (String, bool) {
    let output = Command::new(env!("CARGO_BIN_EXE_host")).args(arguments).arg(file).output().unwrap();
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success())
}
