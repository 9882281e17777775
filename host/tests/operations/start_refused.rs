//! A configuration that cannot work ends with exit code 2 and one message, before any worker starts.

mod addresses;
mod gpu;
mod numbers;
mod plugins;
mod settings;
mod sizes;
mod windows;

use std::process::Command;

/// Runs the program until it ends. Returns its exit code and its output.
fn run(flags: &[&str]) -> (Option<i32>, String) {
    // `timeout` ends a server that starts in spite of the error. Its exit code (124) fails the test.
    let host = env!("CARGO_BIN_EXE_host");
    let output =
        Command::new("timeout").args(["60", host]).args(flags).args(["--port", "0"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), said + &String::from_utf8_lossy(&output.stdout))
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
