//! Compares the ABI, as text, with the recorded ABI: it must not change by accident, nor without a new version.
//!
//! `plugin-api/abi.lock` lists every type that crosses the boundary, with what a plugin relies on. After an
//! intended change, raise the version in `plugin-api/Cargo.toml` (`docs/plugins/compatibility.md` says which part of it) and run
//!
//! ```text
//! HOST_ABI_LOCK=write cargo test -p host-plugin-api --test abi_lock
//! ```

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod dump;
mod rules;

use std::path::PathBuf;

use rules::{Change, Version, change, needed};

fn file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("abi.lock")
}

#[test]
fn the_abi_is_the_recorded_one_or_has_a_new_version() {
    let now = dump::abi();
    let recorded = std::fs::read_to_string(file()).unwrap_or_default();
    if recorded == now {
        return;
    }
    let write = std::env::var("HOST_ABI_LOCK").is_ok_and(|value| value == "write");
    let found = change(&recorded, &now);
    let current = Version::parse(host_plugin_api::VERSION).expect("a version");
    if let Some(before) = rules::version(&recorded) {
        let least = needed(before, found.kind());
        assert!(
            current >= least,
            "the ABI changed and its version did not change enough: it is {current}, {least} is needed.\n\
             {}\nThis belongs to the list \"{}\" of docs/plugins/compatibility.md. Raise `version` in \
             plugin-api/Cargo.toml, then run\n\n    HOST_ABI_LOCK=write cargo test -p host-plugin-api --test abi_lock\n\n\
             (While you still work on one change, `git checkout plugin-api/abi.lock` before writing it again.)",
            found.lines(),
            found.kind().list(),
        );
    }
    if write {
        std::fs::write(file(), now).unwrap();
        return;
    }
    panic!(
        "plugin-api/abi.lock is not what the code says.\n{}\nIf the change is intended and the version is high enough, run\n\n    \
         HOST_ABI_LOCK=write cargo test -p host-plugin-api --test abi_lock\n",
        found.lines()
    );
}

#[test]
fn an_appended_method_is_additive_and_asks_for_a_patch() {
    let recorded = dump::abi();
    let last = recorded.lines().find(|line| line.contains(": settled ")).expect("a method");
    let now = recorded.replace(last, &format!("{last}\n  99: appended function(x: u32) -> i32"));
    let found = change(&recorded, &now);
    assert_eq!(found.kind(), Change::Additive, "{}", found.lines());
    assert_eq!(needed(Version(0, 1, 1), Change::Additive), Version(0, 1, 2));
    assert_eq!(needed(Version(1, 4, 1), Change::Additive), Version(1, 5, 0));
}

#[test]
fn a_widened_field_breaks_and_asks_for_a_minor_version() {
    let recorded = dump::abi();
    let line = recorded.lines().find(|line| line.contains("target_generation: u32")).expect("a field");
    let now = recorded.replace(line, &line.replace("u32", "u64"));
    let found = change(&recorded, &now);
    assert_eq!(found.kind(), Change::Breaking, "{}", found.lines());
    assert!(found.lines().contains("target_generation: u64"), "{}", found.lines());
    assert_eq!(needed(Version(0, 1, 1), Change::Breaking), Version(0, 2, 0));
    assert_eq!(needed(Version(1, 4, 1), Change::Breaking), Version(2, 0, 0));
}

#[test]
fn a_method_that_moves_breaks() {
    let recorded = dump::abi();
    let lines: Vec<&str> = recorded.lines().collect();
    let at = lines.iter().position(|line| line.contains(": exists ")).expect("a method");
    // The names change places, the numbers stay.
    let (first, second) = (lines[at].split_once(": ").unwrap(), lines[at + 1].split_once(": ").unwrap());
    let moved = [format!("{}: {}", first.0, second.1), format!("{}: {}", second.0, first.1)];
    let now = recorded.replace(&lines[at..at + 2].join("\n"), &moved.join("\n"));
    assert_ne!(recorded, now);
    assert_eq!(change(&recorded, &now).kind(), Change::Breaking);
}

#[test]
fn everything_that_crosses_is_in_the_dump() {
    let now = dump::abi();
    for name in
        ["PluginRoot", "TransferLimits", "TierPage", "LayerGroup", "AbiError", "Notification", "Scanned"]
    {
        assert!(now.contains(&format!("\n{name}")), "{name} is not in the dump");
    }
    for part in [
        "note section .note.host",
        "capability page_writes",
        "error WOULD_BLOCK = -4",
        "constant tier::FOUND = 1",
    ] {
        assert!(now.contains(part), "{part:?} is not in the dump");
    }
}
