//! Plugins that are missing, are no plugins, or lack a capability.

use std::path::Path;

use host_tests::plugin_files;

use super::refused;

/// A synthetic server with plugins from a directory.
fn with_plugins(directory: &Path, plugins: &str, says: &[&str]) {
    let directory = directory.display().to_string();
    refused(&["--executor", "synthetic", "--plugins-dir", &directory, "--plugins", plugins], says);
}

#[test]
fn an_unknown_plugin_is_answered_with_what_was_found_where() {
    let directory = plugin_files::directory(&["shm"]);
    let place = directory.path().display().to_string();
    with_plugins(directory.path(), "nosuch", &["nosuch", "shm", &place]);
    with_plugins(directory.path(), "shm,nosuch,neither", &["nosuch", "neither"]);
}

#[test]
fn a_file_that_is_no_plugin_is_refused_with_its_reason() {
    let good = plugin_files::plugin("shm");
    let whole = std::fs::read(good).unwrap();
    let cases: [(&str, &[u8], &str); 4] = [
        ("text", b"this is not a library", "ELF"),
        ("empty", b"", "empty"),
        ("truncated", &whole[..3000], "cut off"),
        ("truncated later", &whole[..500_000], "cut off"),
    ];
    for (name, bytes, says) in cases {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("shm.so"), bytes).unwrap();
        println!("{name}");
        with_plugins(directory.path(), "shm", &["shm.so", says]);
    }
}

#[test]
fn a_plugin_of_another_api_version_is_refused_with_both_versions() {
    let mut bytes = std::fs::read(plugin_files::plugin("shm")).unwrap();
    let ours = host_plugin_api::VERSION;
    let from = format!("[api]\nversion = \"{ours}\"").into_bytes();
    let at = bytes.windows(from.len()).position(|window| window == from).expect("the manifest's API version");
    bytes[at..at + from.len()].copy_from_slice(b"[api]\nversion = \"7.0.0\"");
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("shm.so"), bytes).unwrap();
    with_plugins(directory.path(), "shm", &["7.0.0", ours, "shm"]);
}

#[test]
fn a_missing_capability_is_refused_with_the_plugin_that_has_it() {
    let directory = plugin_files::directory(&["shm", "null"]);
    // The fixture `null` declares less than a supervised server with prefill and decode needs.
    with_plugins(directory.path(), "null", &["null", "shm", "because"]);
}

#[test]
fn a_second_plugin_for_what_only_one_can_do_is_refused_with_the_way_out() {
    let directory = plugin_files::directory(&["shm", "loopback", "plain", "swa"]);
    with_plugins(directory.path(), "shm,loopback", &["shm, loopback are named", "--transfer NAME"]);
    with_plugins(
        directory.path(),
        "shm,plain,swa",
        &["\"swa\" would never be called", "its role is allocator"],
    );
}

#[test]
fn a_set_without_a_plugin_a_key_or_a_value_is_refused_with_the_form() {
    for pair in ["dir=/x", "hicache-file.dir", "hicache-file", "=x", "hicache-file.=x"] {
        refused(&["--executor", "synthetic", "--set", pair], &["--set", pair]);
    }
    let directory = plugin_files::directory(&["shm", "memory"]);
    let place = directory.path().display().to_string();
    refused(
        &[
            "--executor",
            "synthetic",
            "--plugins-dir",
            &place,
            "--plugins",
            "shm,memory",
            "--set",
            "memory.nosuch=1",
        ],
        &["memory", "nosuch"],
    );
    refused(
        &["--executor", "synthetic", "--plugins-dir", &place, "--set", "nosuch.key=1"],
        &["--set \"nosuch.key=1\"", "correct the name"],
    );
}
