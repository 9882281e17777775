//! A worker that lost a thread ends, so that a supervisor can start it again. It does not stay registered as "live".

use std::process::Command;

use host_tests::plugin_files;

#[test]
fn a_worker_whose_transfer_plugin_panics_ends_with_an_error() {
    let said = last_words_of_a_worker("[plugin.panicking]\nin = \"poll\"\n");
    let says = "plugin \"panicking\": poll answered PANICKED (";
    assert!(said.contains(says) && said.contains("so this worker ends"), "{said}");
    assert!(said.contains("transfer thread has ended"), "{said}");
}

/// Runs a prefill worker with the transfer plugin `panicking` until it ends with exit code 1. Returns its standard error.
pub fn last_words_of_a_worker(config: &str) -> String {
    let plugins = plugin_files::directory(&["panicking"]);
    let file = plugins.path().join("host.toml");
    std::fs::write(&file, config).unwrap();
    // `timeout` ends a worker that does not end by itself. Its exit code (124) fails the test.
    let output = Command::new("timeout")
        .args(["300", env!("CARGO_BIN_EXE_host"), "--role", "prefill", "--executor", "synthetic"])
        .args(["--router", "http://127.0.0.1:9", "--plugins", "panicking", "--pool-pages", "64"])
        .arg("--plugins-dir")
        .arg(plugins.path())
        .arg("--config")
        .arg(&file)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    println!("{said}");
    assert_eq!(output.status.code(), Some(1), "{said}");
    said
}
