//! A worker that lost a thread ends, so that a supervisor can start it again; it does not linger as "live".

use std::process::Command;

use host_tests::plugin_files;

#[test]
fn a_worker_whose_transfer_plugin_panics_ends_with_an_error() {
    let plugins = plugin_files::directory(&["panicking"]);
    let config = plugins.path().join("host.toml");
    std::fs::write(&config, "[plugin.panicking]\nin = \"poll\"\n").unwrap();
    // A worker that lives on is ended, and its exit code (124) fails the test.
    let output = Command::new("timeout")
        .args(["60", env!("CARGO_BIN_EXE_host"), "--role", "prefill", "--executor", "synthetic"])
        .args(["--plugins", "panicking", "--plugins-dir"])
        .arg(plugins.path())
        .arg("--config")
        .arg(&config)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    println!("{said}");
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("transfer plugin has failed") && said.contains("PANICKED"), "{said}");
    assert!(said.contains("transfer thread has ended"), "{said}");
}
