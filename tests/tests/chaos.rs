//! Runs a few of the live faults of `cargo xtask chaos`, with each change.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::process::Command;

use host_tests::built::{BUILT, profile, target};

/// The numbers in a row of the report's table.
fn numbers(report: &str, row: &str) -> Vec<u64> {
    let line = report.lines().find(|line| line.starts_with(row));
    let line = line.unwrap_or_else(|| panic!("the report has no row {row:?}:\n{report}"));
    line.split('|').filter_map(|cell| cell.trim().parse().ok()).collect()
}

#[test]
fn faults_on_real_processes_lose_nothing() {
    if std::env::var_os(BUILT).is_none() {
        // Cargo builds no program of another package with a test.
        for what in [["-p", "host", "--bin", "host"], ["-p", "host-tests", "--example", "chaos"]] {
            let mut cargo = Command::new(env!("CARGO"));
            let kind = profile().file_name().unwrap().to_str().unwrap().replace("debug", "dev");
            cargo.args(["build", "--quiet", "--profile", &kind]).args(what).env("CARGO_TARGET_DIR", target());
            assert!(cargo.status().unwrap().success(), "{cargo:?} failed");
        }
    }
    strike(
        "synthetic",
        &["greedy", "drawn without a seed", "of several candidates", "completions of a text"],
    );
    strike(
        "cpu",
        &[
            "chats",
            "chats held to a JSON schema",
            "held to a regular expression",
            "chats that must call a tool",
        ],
    );
}

/// Injects twelve faults, while clients send requests of these kinds among others.
fn strike(executor: &str, kinds: &[&str]) {
    let mut chaos = Command::new(profile().join("examples/chaos"));
    chaos.args(["--faults", "12", "--seed", "1", "--clients", "4", "--transfer", "corrupting"]);
    chaos.args(["--executor", executor]);
    let output = chaos.output().unwrap();
    let report =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}:\n{report}", output.status);
    let [faults, equal, _asked_again, wrong, lost] = numbers(&report, "| all, in ")[..] else {
        panic!("the last row has other columns:\n{report}")
    };
    assert!(faults >= 10 && equal > 0, "{report}");
    assert_eq!((wrong, lost), (0, 0), "{report}");
    for kind in kinds {
        let answered = numbers(&report, &format!("| {kind} |"));
        assert!(answered.iter().sum::<u64>() > 0, "{kind}: {answered:?}\n{report}");
    }
    for count in ["leaks: 0", "processes that ended unasked: 0"] {
        assert!(report.lines().any(|line| line == count), "{report}");
    }
}
