//! What the program says of the NIXL and Mooncake plugins with their libraries, and without.

use std::process::Command;

use host_tests::program::Ended;
use host_tests::{nixl, plugin_files};
use serde_json::Value;

#[test]
fn the_conformance_kit_passes_on_the_real_library() {
    let Some(library) = nixl::library() else { return };
    // Another test runs the tier's cases.
    let pages = tempfile::tempdir().unwrap();
    let config = pages.path().join("config.toml");
    // Deadlines that no call reaches, on a busy machine neither.
    let deadlines = "connect_timeout_ms = 60000\nfence_timeout_ms = 60000\n";
    let storage = format!("[storage]\ndirectory = {:?}", pages.path().display().to_string());
    std::fs::write(&config, format!("{deadlines}{storage}")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "test", "--patience", "30", "--plugin-config"])
        .args([&config, &plugin_files::plugin("nixl")])
        .env("NIXL_LIBRARY", library)
        .output();
    let kit = Ended::from(output.unwrap());
    // The case with several machines cannot run on one machine.
    let skipped: Vec<&str> = kit.stdout.lines().filter(|line| line.starts_with("skip")).collect();
    assert!(kit.status.success() && skipped.len() == 1, "{kit}");
    assert!(skipped.iter().any(|line| line.contains("transfer-multi-host")), "{kit}");
}

#[test]
fn of_a_plugin_with_several_roles_those_that_open_are_tested_and_measured() {
    let Some(config) = nixl::config() else { return };
    let (directory, file) = (tempfile::tempdir().unwrap(), plugin_files::plugin("nixl"));
    let path = directory.path().join("config.toml");
    // If the library is found without being named, the configuration needs nothing else.
    std::fs::write(&path, &config).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "bench", "--json", "--plugin-config"])
        .args([&path, &file])
        .output();
    let bench = Ended::from(output.unwrap());
    let all: Value = serde_json::from_str(&bench.stdout).unwrap_or_else(|_| panic!("{bench}"));
    let calls = all["measured"]["calls"].as_array().unwrap();
    assert!(calls.len() == 3 && calls.iter().all(|call| call["role"] == "transfer"), "{all}");
    assert_eq!(all["measured"]["skipped"][0]["role"], "tier", "{all}");
    assert!(
        all["measured"]["skipped"][0]["reason"].as_str().unwrap().contains("[plugin.nixl.storage]"),
        "{all}"
    );
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args([
            "plugins",
            "test",
            "--json",
            "--patience",
            "30",
            "--case",
            "config-defaults",
            "--case",
            "tier-data",
            "--case",
            "manifest-matches",
        ])
        .arg(&file)
        .env("NIXL_LIBRARY", nixl::library().unwrap())
        .output();
    let kit = Ended::from(output.unwrap());
    let reports: Value = serde_json::from_str(&kit.stdout).unwrap_or_else(|_| panic!("{kit}"));
    let statuses: Vec<&str> =
        reports.as_array().unwrap().iter().map(|r| r["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["pass", "skip", "skip"], "{reports}");
}

#[test]
fn without_the_library_check_says_where_it_looked_and_listing_needs_none() {
    let directory = plugin_files::directory(&["nixl"]);
    let host = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_host"))
            .args(["plugins"])
            .args(arguments)
            .args(["--plugins-dir".as_ref(), directory.path().as_os_str()])
            .env("NIXL_LIBRARY", "/nowhere/libnixl_capi.so")
            .output();
        let ended = Ended::from(output.unwrap());
        (ended.code().unwrap(), ended.said())
    };
    let (code, said) = host(&["check", "--executor", "synthetic", "--plugins", "nixl"]);
    assert_eq!(code, 2, "{said}");
    for part in ["nixl", "/nowhere/libnixl_capi.so: there is no such file", "pip install"] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
    let (code, said) = host(&["list"]);
    assert!(code == 0 && said.contains("nixl"), "{said}");
}

#[test]
fn without_mooncake_check_says_all_that_it_tried_and_listing_needs_none() {
    let directory = plugin_files::directory(&["mooncake"]);
    let host = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_host"))
            .args(["plugins"])
            .args(arguments)
            .args(["--plugins-dir".as_ref(), directory.path().as_os_str()])
            .env("MOONCAKE_PYTHON", "/nowhere/python")
            .output();
        let ended = Ended::from(output.unwrap());
        (ended.code().unwrap(), ended.said())
    };
    let (code, said) = host(&["check", "--executor", "synthetic", "--plugins", "mooncake"]);
    assert_eq!(code, 2, "{said}");
    for part in ["libtransfer_engine.so", "cannot run /nowhere/python", "pip install", "MOONCAKE_TE_LIBRARY"]
    {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
    let (code, said) = host(&["list"]);
    assert!(code == 0 && said.contains("mooncake"), "{said}");
}
