//! A configuration that cannot work ends with exit code 2 and one message, before any worker starts.

mod addresses;
mod gpu;
mod numbers;
mod plugins;
mod settings;
mod sizes;
mod windows;

use std::process::Command;

use host_tests::program::run_to_end;

/// Runs the program until it ends. Returns its exit code and its output.
fn run(flags: &[&str]) -> (Option<i32>, String) {
    let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
    let ended = run_to_end("host", host.args(flags).args(["--port", "0"]));
    (ended.code(), ended.said())
}

fn refused(flags: &[&str], says: &[&str]) {
    let (code, said) = run(flags);
    println!("{flags:?}: {code:?}\n{said}");
    assert_eq!(code, Some(2), "{flags:?}: {said}");
    for part in says {
        assert!(said.contains(part), "{flags:?} does not say {part:?}: {said}");
    }
    assert!(!said.contains("worker ready") && !said.contains("panicked"), "{said}");
}
