//! A storage tier that cannot take the model's values: `host plugins check` reports it, and a server ends with the same sentence.

use std::process::Command;

use host_tests::plugin_files;

use super::run;

/// Flags with a page so large that one head of it is longer than the tier `memory` takes.
fn too_large(directory: &str) -> Vec<&str> {
    let plugins = ["--plugins-dir", directory, "--page-size", "1024"];
    ["--executor", "synthetic"].into_iter().chain(plugins).collect()
}

const SAYS: &str = "plugin \"memory\" stores values of at most 65536 bytes, and this model's have 1052672 (one KV head of a page of \
    1024 tokens, and its seal): --page-size 63 has 65536 bytes and fits";

#[test]
fn a_tier_that_the_models_values_do_not_fit_is_refused_by_check() {
    let plugins = plugin_files::directory(&["shm", "memory"]);
    let directory = plugins.path().display().to_string();
    let check = |more: &[&str]| {
        let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
        let output = host.args(["plugins", "check"]).args(too_large(&directory)).args(more).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    for role in [&[][..], &["--role", "aggregated"], &["--role", "decode", "--router", "http://127.0.0.1:9"]]
    {
        let (code, said) = check(&[role, &["--plugins", "shm,memory"]].concat());
        assert_eq!(code, Some(2), "{role:?}: {said}");
        assert_eq!(said.matches(SAYS).count(), 1, "{role:?}: {said}");
        // The page quotes this message, with dots instead of the numbers.
        let page = include_str!("../../../../docs/plugins/debugging.md");
        let quoted = page.lines().find(|line| line.starts_with("| `plugin \"memory\" stores")).unwrap();
        let parts = quoted.split('`').nth(1).unwrap().split("..");
        assert!(
            parts.into_iter().all(|part| said.contains(part)),
            "the page quotes {quoted}, and not {said}"
        );
    }
    // A smaller page is accepted.
    let smaller = ["plugins", "check", "--executor", "synthetic", "--plugins-dir", &directory];
    let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
    let output = host.args(smaller).args(["--page-size", "63", "--plugins", "shm,memory"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn check_opens_plugins_and_says_what_one_says_that_does_not_open() {
    let plugins = plugin_files::directory(&["panicking", "hicache-file", "shm"]);
    let directory = plugins.path().display().to_string();
    let file = plugins.path().join("host.toml");
    let check = |config: &str, named: &str| {
        std::fs::write(&file, config).unwrap();
        let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
        host.args(["plugins", "check", "--executor", "synthetic", "--plugins-dir", &directory]);
        // A worker that is started by hand needs fewer capabilities of its plugin.
        host.args(["--role", "prefill", "--router", "http://127.0.0.1:9", "--plugins", named]);
        let output = host.arg("--config").arg(&file).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (place, says) in [
        ("open", "did not open: PANICKED: the plugin panicked: told to panic while opening"),
        (
            "endpoint",
            "plugin \"panicking\" offers no endpoint: PANICKED: the plugin panicked: told to panic in endpoint",
        ),
    ] {
        let (code, said) = check(&format!("[plugin.panicking]\nin = \"{place}\"\n"), "panicking");
        assert!(code == Some(2) && said.contains(says), "{place}: {code:?} {said}");
    }
    // The check makes the store that a worker would make, and does not change a store that exists.
    let pages = tempfile::tempdir().unwrap();
    let config = format!("[plugin.hicache-file]\ndir = {:?}\n", pages.path().join("pages"));
    assert_eq!(check(&config, "shm,hicache-file"), (Some(0), String::new()));
    let nowhere = format!("[plugin.hicache-file]\ndir = {:?}\n", plugins.path().join("shm.so/pages"));
    let (code, said) = check(&nowhere, "shm,hicache-file");
    assert!(code == Some(2) && said.contains("shm.so/pages"), "{code:?} {said}");
}

#[test]
fn a_server_whose_tier_the_models_values_do_not_fit_ends_at_once_with_one_message() {
    let plugins = plugin_files::directory(&["shm", "memory"]);
    let directory = plugins.path().display().to_string();
    for more in [&["--plugins", "shm,memory"][..], &["--role", "aggregated", "--plugins", "memory"]] {
        let (code, said) = run(&[&too_large(&directory), more].concat());
        assert_eq!(code, Some(2), "{more:?}: {said}");
        assert_eq!(said.matches(SAYS).count(), 1, "{more:?}: {said}");
        assert!(said.matches("role=\"prefill\"").count() <= 1, "it was started again: {said}");
        assert!(!said.contains("worker ready") && !said.contains("panicked"), "{said}");
    }
}
