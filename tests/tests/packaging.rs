//! Tests the crate that plugins of third parties depend on, packed as a registry would deliver it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The target folder for packed and generated crates. It is kept between runs, because most of a build is `abi_stable`.
fn target() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(3).expect("tests lie in <target>/<profile>/deps").join("generated-plugins")
}

fn cargo(at: &Path, arguments: &[&str]) -> String {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(at).args(arguments).arg("--offline").env("CARGO_TARGET_DIR", target());
    let output = cargo.output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "cargo {arguments:?} in {}: {said}", at.display());
    said
}

#[test]
fn the_plugin_api_packs_and_the_packed_crate_builds_and_passes_its_tests_alone() {
    cargo(root(), &["package", "-p", "host-plugin-api", "--allow-dirty"]);
    let manifest = std::fs::read_to_string(root().join("plugin-api/Cargo.toml")).unwrap();
    let manifest: toml::Table = manifest.parse().unwrap();
    let version = manifest["package"]["version"].as_str().unwrap();
    // The crate is unpacked in a folder without a workspace around it.
    let elsewhere = tempfile::tempdir().unwrap();
    let name = format!("host-plugin-api-{version}");
    let archive = target().join("package").join(format!("{name}.crate"));
    let unpacked = Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(elsewhere.path()).status();
    assert!(unpacked.unwrap().success());
    let packed = elsewhere.path().join(name);
    for file in ["LICENSE-APACHE", "LICENSE-MIT"] {
        let ours = std::fs::read(root().join(file)).unwrap();
        assert_eq!(std::fs::read(packed.join(file)).unwrap(), ours, "{file} of the packed crate");
    }
    let said = cargo(&packed, &["test"]);
    assert!(
        said.contains("(line ") && said.contains("Doc-tests"),
        "the README's example was not run: {said}"
    );
}

#[test]
fn every_crate_says_its_licence_and_what_it_is() {
    let metadata = cargo(root(), &["metadata", "--format-version", "1", "--no-deps", "--quiet"]);
    let metadata: serde_json::Value =
        serde_json::from_str(metadata.lines().find(|line| line.starts_with('{')).unwrap()).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 10, "{} packages", packages.len());
    for package in packages {
        assert_eq!(package["license"], "Apache-2.0 OR MIT", "{}", package["name"]);
        assert!(package["description"].as_str().is_some_and(|text| !text.is_empty()), "{}", package["name"]);
    }
}
