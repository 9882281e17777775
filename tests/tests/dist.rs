//! Tests a release: its archive runs from any folder, on a system that has only the C library.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::Command;

/// The command itself tries the archive: under another name, in a root without anything else, the program lists its plugins and
/// answers a request over shm, split over processes.
#[test]
fn an_archive_serves_in_a_bare_root_and_names_what_it_is_made_of() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let test = std::env::current_exe().unwrap();
    let target = test.ancestors().nth(3).expect("tests lie in <target>/<profile>/deps");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root).args(["xtask", "dist"]).env("CARGO_TARGET_DIR", target);
    // With programs that were built with this test, nothing is built: another build would choose other features, and build
    // everything again.
    match std::env::var_os("BUILT_PLUGINS") {
        Some(folder) => cargo.arg("--built").arg(folder),
        None => cargo.arg("--dev"),
    };
    let output = cargo.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let archive = said.lines().find_map(|line| line.strip_prefix("made ")?.split(" (").next()).unwrap();
    let listed = Command::new("tar").arg("-tf").arg(archive).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let has =
        |path: &str| listed.lines().any(|line| line.split_once('/').is_some_and(|(_, rest)| rest == path));
    for path in [
        "bin/host",
        "bin/host-plugin-test",
        "lib/host/plugins/nixl.so",
        "share/doc/host/README.md",
        "share/doc/host/SECURITY.md",
        "share/doc/host/LICENSE-APACHE",
        "share/doc/host/LICENSE-MIT",
        "share/doc/host/THIRD-PARTY.md",
        "share/doc/host/docs/install.md",
    ] {
        assert!(has(path), "{path} is not among\n{listed}");
    }
    let folder = archive.trim_end_matches(".tar.gz");
    let others = std::fs::read_to_string(Path::new(folder).join("share/doc/host/THIRD-PARTY.md")).unwrap();
    for name in ["| tokio | ", "| abi_stable | ", "Permission is hereby granted"] {
        assert!(others.contains(name), "{name}");
    }
    assert!(!others.contains("| tempfile | "), "what only tests use is not in a release");
}
