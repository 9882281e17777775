//! The conformance kit passes plugins that keep their contract, and names the right case for each that does not.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "plugin_support/fixture.rs"]
mod fixture;

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// The exit code, and every case's name, status and text.
fn test(file: &Path, more: &[&str]) -> (i32, Vec<(String, String, String)>) {
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "test", "--json"])
        .args(more)
        .arg(file)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let reports: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
    let text = |report: &Value, key: &str| report[key].as_str().unwrap().to_owned();
    let reports = reports.as_array().unwrap().iter();
    let reports = reports.map(|r| (text(r, "case"), text(r, "status"), text(r, "text"))).collect();
    (output.status.code().unwrap(), reports)
}

/// The reports that are neither pass nor skip.
fn broken(reports: &[(String, String, String)]) -> Vec<&(String, String, String)> {
    reports.iter().filter(|(_, status, _)| status != "pass" && status != "skip").collect()
}

#[test]
fn plugins_that_keep_their_contract_pass() {
    for name in ["shm", "wire", "loopback", "memory", "plain"] {
        let (code, reports) = test(&fixture::plugin(name), &[]);
        assert_eq!(broken(&reports), [] as [&(String, String, String); 0], "{name}");
        let skipped: Vec<_> = reports.iter().filter(|(_, status, _)| status == "skip").collect();
        assert!(code == 0 && skipped.is_empty() && reports.len() > 8, "{name}: {code} {skipped:?}");
    }
}

#[test]
fn what_cannot_be_checked_is_skipped_with_the_reason() {
    let (code, reports) = test(&fixture::plugin("null"), &[]);
    assert_eq!(code, 0, "{reports:?}");
    let data = reports.iter().find(|(case, ..)| case == "transfer-data").unwrap();
    assert_eq!(data.1, "skip");
    assert!(data.2.contains("declares no page_writes"), "{}", data.2);
    assert!(!reports.iter().any(|(case, ..)| case.starts_with("tier-")), "{reports:?}");
}

#[test]
fn each_defect_fails_the_case_that_is_about_it_and_no_other() {
    let original = std::fs::read(fixture::plugin("broken")).unwrap();
    let mark = b"HOST-DEFECT=none........................";
    let at = original.windows(mark.len()).position(|window| window == mark).expect("the mark");
    let directory = tempfile::tempdir().unwrap();
    for (defect, expected, says) in [
        ("none", None, ""),
        ("wrong-capabilities", Some("transfer-capabilities"), "no notification came"),
        ("leaks-thread", Some("lifecycle"), "left 20 threads and 0 descriptors behind"),
        ("loses-completion", Some("transfer-completions"), "1 never completed, the first is number 40"),
        ("repeats-completion", Some("transfer-repeats"), "submission 40 completed 2 times"),
        ("allocates-on-submit", Some("transfer-hot-allocations"), "200 calls of submit allocated 200 times"),
        ("blocks-in-poll", Some("transfer-hot-blocking"), "in 200 rounds poll gave up the processor"),
        ("panics", Some("transfer-panics"), "submit of nothing made the plugin panic"),
        ("corrupts-byte", Some("transfer-data"), "inside a write, is "),
    ] {
        let mut bytes = original.clone();
        bytes[at + 12..at + mark.len()].fill(b'.');
        bytes[at + 12..at + 12 + defect.len()].copy_from_slice(defect.as_bytes());
        let file = directory.path().join(format!("{defect}.so"));
        std::fs::write(&file, bytes).unwrap();
        let (code, reports) = test(&file, &[]);
        let found = broken(&reports);
        let cases: Vec<_> = found.iter().map(|(case, ..)| case.as_str()).collect();
        assert_eq!(cases, Vec::from_iter(expected), "{defect}: {found:?}");
        assert_eq!(code, if expected.is_some() { 2 } else { 0 }, "{defect}");
        assert!(found.iter().all(|(_, _, text)| text.contains(says)), "{defect}: {found:?}");
    }
}

#[test]
fn crashes_and_hangs_end_one_case_only() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("text.so");
    std::fs::write(&file, "not a plugin").unwrap();
    let (code, reports) = test(&file, &["--case", "manifest"]);
    assert_eq!(code, 2);
    assert_eq!(reports.len(), 1);
    assert!(reports[0].2.contains("is not an ELF shared object"), "{reports:?}");

    let panicking = fixture::plugin("panicking");
    let config = directory.path().join("config.toml");
    std::fs::write(&config, "in = \"abort\"").unwrap();
    let config = config.to_str().unwrap();
    let (code, reports) =
        test(&panicking, &["--plugin-config", config, "--case", "manifest", "--case", "config"]);
    assert_eq!(code, 2);
    let statuses: Vec<_> = reports.iter().map(|(case, status, _)| (case.as_str(), status.as_str())).collect();
    assert_eq!(statuses, [("manifest", "pass"), ("config", "crash")], "{reports:?}");
    assert!(reports[1].2.contains("signal: 6"), "{reports:?}");

    std::fs::write(config, "in = \"hang\"").unwrap();
    let arguments = ["--plugin-config", config, "--time-limit", "1", "--case", "config"];
    let (_, reports) = test(&panicking, &arguments);
    assert_eq!(reports[0].1, "timeout", "{reports:?}");
}

#[test]
fn cases_are_named_on_the_command_line_and_unknown_names_are_refused() {
    let (_, reports) = test(&fixture::plugin("memory"), &["--case", "tier-data"]);
    assert_eq!(reports.iter().map(|(case, ..)| case.as_str()).collect::<Vec<_>>(), ["tier-data"]);
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "test", "--case", "nonsense", "x.so"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("no case starts with \"nonsense\""), "{said}");
}
