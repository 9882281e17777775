//! `cargo xtask nightly asan`, `valgrind` and `miri`: check accesses to memory that is not allocated, or not written yet.

use std::process::Command;

use super::{is_there, outcome, print};
use crate::outcome::Outcome;
use crate::workspace::Workspace;

/// Crates whose tests run under ASan, with all that these load and start: crates with unsafe code, and crates that read bytes
/// from outside.
const UNDER_ASAN: &[&str] = &[
    "host-executor",
    "host-fuzzing",
    "host-gguf",
    "host-kernels",
    "host-memory",
    "host-ownership",
    "host-plugin-api",
    "host-plugin-hicache-file",
    "host-plugin-mooncake",
    "host-plugin-nixl",
    "host-plugin-panicking",
    "host-plugin-shm",
    "host-plugin-swa",
    "host-plugins",
    "host-tier-kit",
    "host-transfer-kit",
];

/// Test programs that run under valgrind: they run plugins as they are released, loaded from their files, which plugins built for
/// ASan are not. Programs that use io_uring are left out, because valgrind 3.19 does not know it.
const UNDER_VALGRIND: &[(&str, &[&str])] = &[
    ("host-memory", &["--lib"]),
    ("host-plugin-api", &["--lib"]),
    ("host-plugin-panicking", &["--test", "guard_contains_panics"]),
    ("host-plugin-shm", &["--lib", "--test", "loaded"]),
    ("host-tier-kit", &["--test", "keeps_the_contract"]),
    ("host-transfer-kit", &["--lib"]),
];

/// Test programs that run under Miri: they use no files, sockets or other processes.
const UNDER_MIRI: &[(&str, &str)] =
    &[("host-plugin-panicking", "guard_contains_panics"), ("host-kernels", "page_copy")];

pub fn asan(workspace: &Workspace) -> Outcome {
    let (Some(root), Some(host)) = (print("rustc", &["--print", "sysroot"]), host()) else {
        return Outcome::Failed("rustc names no sysroot".to_owned());
    };
    let libraries = format!("{root}/lib/rustlib/{host}/lib");
    let has_runtime = |name: &str| name.starts_with("librustc") && name.contains("_rt.asan.");
    let names = std::fs::read_dir(&libraries).into_iter().flatten().flatten().map(|entry| entry.file_name());
    if !names.into_iter().any(|name| name.to_str().is_some_and(has_runtime)) {
        return Outcome::Skipped(format!(
            "{libraries} has no AddressSanitizer; `rustup toolchain install stable` has one for Linux on x86-64 and ARM64"
        ));
    }
    let mut command = workspace.cargo(&["test", "--no-fail-fast", "--lib", "--bins", "--tests"]);
    UNDER_ASAN.iter().for_each(|package| {
        command.args(["--package", package]);
    });
    // The flag is not stable yet. Plugins that tests build are built with it, too, and take the runtime from the program that
    // loads them. Programs that cargo runs during the build are built without it.
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address -Clink-arg=-rdynamic");
    command.env("CARGO_UNSTABLE_TARGET_APPLIES_TO_HOST", "true").env("CARGO_TARGET_APPLIES_TO_HOST", "false");
    command.env("CARGO_TARGET_DIR", workspace.target.join("asan")).env_remove("BUILT_PLUGINS");
    let meant = workspace.root.join("tests/leaks.txt");
    command.env("LSAN_OPTIONS", format!("suppressions={}:print_suppressions=0", meant.display()));
    outcome(&mut command, &format!("no error and no leak in {} crates", UNDER_ASAN.len()))
}

pub fn valgrind(workspace: &Workspace) -> Outcome {
    if !is_there(Command::new("valgrind").arg("--version")) {
        return Outcome::Skipped(
            "there is no valgrind; install it with `apt-get install valgrind`".to_owned(),
        );
    }
    let Some(host) = host() else { return Outcome::Failed("rustc names no host".to_owned()) };
    let runner = format!("CARGO_TARGET_{}_RUNNER", host.to_uppercase().replace('-', "_"));
    for (package, programs) in UNDER_VALGRIND {
        let mut command = workspace.cargo(&["test", "--package", package]);
        command.args(*programs).env(&runner, "valgrind --quiet --error-exitcode=99 --leak-check=no");
        match outcome(&mut command, "") {
            Outcome::Passed(_) => {}
            other => return other,
        }
    }
    Outcome::Passed(format!("no error in the test programs of {} crates", UNDER_VALGRIND.len()))
}

pub fn miri(workspace: &Workspace) -> Outcome {
    if !is_there(Command::new("cargo").args(["+nightly", "miri", "--version"])) {
        return Outcome::Skipped(
            "there is no Miri; install it with `rustup toolchain install nightly --component miri,rust-src`"
                .to_owned(),
        );
    }
    for (package, program) in UNDER_MIRI {
        let mut command = Command::new("cargo");
        command.args(["+nightly", "miri", "test", "--package", package, "--test", program]);
        command.current_dir(&workspace.root).env("CARGO_TARGET_DIR", workspace.target.join("miri"));
        // The variables belong to the compiler that runs this, not to the named one. Leaks are ignored, because plugins live as
        // long as the process.
        command.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").env("MIRIFLAGS", "-Zmiri-ignore-leaks");
        match outcome(&mut command, "") {
            Outcome::Passed(_) => {}
            other => return other,
        }
    }
    Outcome::Passed(format!("no undefined behaviour in {} test programs", UNDER_MIRI.len()))
}

/// The compiler's name for this machine.
fn host() -> Option<String> {
    let said = print("rustc", &["-vV"])?;
    said.lines().find_map(|line| line.strip_prefix("host: ")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crate_that_is_named_is_there() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let lock = std::fs::read_to_string(format!("{root}/Cargo.lock")).unwrap();
        let named = UNDER_VALGRIND.iter().map(|(package, _)| *package);
        let named =
            named.chain(UNDER_MIRI.iter().map(|(package, _)| *package)).chain(UNDER_ASAN.iter().copied());
        for package in named.chain(["host-loom", "host-shuttle"]) {
            assert!(lock.contains(&format!("\nname = \"{package}\"\n")), "{package}");
        }
    }
}
