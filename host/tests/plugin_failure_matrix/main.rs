//! Every way known to us in which a plugin file can fail, each in a process of its own: the outcome is a sentence that
//! says what to do, never a signal.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../plugin_support/damaged.rs"]
mod damaged;
#[path = "../plugin_support/fixture.rs"]
mod fixture;
mod table;
#[path = "../plugin_support/variant.rs"]
mod variant;
mod versions;

use std::path::Path;
use std::process::Command;

use host_plugin_api::{Opening, Tag};
use host_plugins::{Catalog, Policy, open_transfer};
use table::{MALFORMED, ROWS, Row};

/// Finds the only plugin of a directory as the host would, opens it, uses it, and says how that went.
#[test]
#[ignore = "the other process of the tests below"]
fn child() {
    let Ok(directory) = std::env::var("DIRECTORY") else { return };
    let policy = Policy { panic_abort: std::env::var("MAY_ABORT").is_ok(), ..Policy::default() };
    let catalog = Catalog::scan_with(policy, [&directory]);
    for file in catalog.unusable() {
        println!("@ {} | {}", file.reason.reason(), file.reason);
    }
    let Some(entry) = catalog.entries().first() else {
        if catalog.unusable().is_empty() {
            println!("@ not_found | {}", catalog.find("x").unwrap_err());
        }
        return;
    };
    if let Ok(then) = std::env::var("AFTER_SCAN") {
        assert!(Command::new("sh").args(["-c", &then]).current_dir(&directory).status().unwrap().success());
    }
    let open = || open_transfer(entry, &Opening { name: "test".into(), config: String::new() });
    let backend = match open() {
        Ok(backend) => backend,
        Err(error) => return println!("@ {} | {error}", error.reason()),
    };
    if let Ok(then) = std::env::var("AFTER_LOAD") {
        assert!(Command::new("sh").args(["-c", &then]).current_dir(&directory).status().unwrap().success());
        match open() {
            Ok(_again) => println!("@ again opened"),
            Err(error) => println!("@ again {} | {error}", error.reason()),
        }
    }
    assert_eq!(backend.settled(Tag(1)), 1);
    backend.shutdown(1000).unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let from = if maps.contains("/memfd:") { "sealed memory" } else { "its place" };
    println!("@ opened from {from}, api {}", entry.manifest.api.version);
}

/// What another process says that loads what is in the directory; it must end by itself.
fn load(name: &str, directory: &Path, environment: &[(&str, &str)]) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env("DIRECTORY", directory)
        .env_remove(MALFORMED)
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {}\n{text}{errors}", output.status);
    text.lines().filter_map(|line| Some(line.split_once("@ ")?.1)).collect::<Vec<_>>().join("\n")
}

fn check(name: &str, said: &str, says: &[&str]) {
    println!("{name:<52} {said}");
    for part in says {
        assert!(said.contains(part), "{name}: {part:?} is not in: {said}");
    }
    assert!(said.lines().all(|line| line.len() < 1000), "{name}: a sentence is shorter: {said}");
}

#[test]
fn every_row_of_the_table_ends_in_its_sentence() {
    for Row { name, make, environment, says } in ROWS {
        let directory = tempfile::tempdir().unwrap();
        make(directory.path());
        check(name, &load(name, directory.path(), environment), says);
    }
}

#[test]
fn files_of_another_user_are_refused() {
    let directory = fixture::directory(&["null"]);
    let file = directory.path().join("null.so");
    // Only root may give files away, and only root's tests can see this.
    if std::os::unix::fs::chown(&file, Some(4242), None).is_ok() {
        let said = load("another user", directory.path(), &[]);
        check("another user's file", &said, &["permissions |", "belongs to user 4242", "chown it"]);
    }
}

/// A constructor that aborts runs before anybody can check anything, so it is looked for in another process.
#[test]
fn a_file_that_aborts_while_it_is_loaded_ends_one_case_of_the_kit() {
    let file = fixture::plugin("malformed");
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "test", "--case", "load"])
        .arg(&file)
        .env(MALFORMED, "aborts on load")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.starts_with("crash    load"), "{said}");
}
