//! Every way known to us in which a plugin file can fail, each in a process of its own: the outcome is a sentence that
//! says what to do, never a signal.

mod damaged;
mod table;
mod versions;

use std::path::Path;

use host_test_peer::process::{Role, command, said};
use host_tests::plugin_files;
use host_tests::skip::skipped;
use table::{MALFORMED, ROWS, Row};

/// The output of another process that loads the plugins in the directory. The process must end by itself.
fn load(name: &str, directory: &Path, environment: &[(&str, &str)]) -> String {
    let mut user = command(Role::Use);
    user.arg(directory).env_remove(MALFORMED).envs(environment.iter().copied());
    said(name, &mut user)
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
    let directory = plugin_files::directory(&["null"]);
    let file = directory.path().join("null.so");
    // Only root may change the owner of a file, so other users skip this test.
    if let Err(error) = std::os::unix::fs::chown(&file, Some(4242), None) {
        return skipped(&format!("files of another user: none can be given away: {error}"));
    }
    let said = load("another user", directory.path(), &[]);
    check("another user's file", &said, &["permissions |", "belongs to user 4242", "chown it"]);
}
