//! A worker that lost a thread ends, so that a supervisor can start it again. It does not stay registered as "live".

use std::process::Command;

use host_tests::plugin_files;
use host_tests::program::run_to_end;

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
    let mut worker = Command::new(env!("CARGO_BIN_EXE_host"));
    worker.args(["--role", "prefill", "--executor", "synthetic", "--router", "http://127.0.0.1:9"]);
    worker.args(["--plugins", "panicking", "--pool-pages", "64", "--plugins-dir"]).arg(plugins.path());
    let ended = run_to_end("a prefill worker", worker.arg("--config").arg(&file));
    println!("{ended}");
    assert_eq!(ended.code(), Some(1), "{ended}");
    ended.stderr
}
