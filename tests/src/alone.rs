//! Runs tests in processes of their own, because they look at state that a whole process shares.

use std::process::Command;

use crate::skip::skipped;

/// Variable with the name of the test that a process is for.
const ALONE: &str = "HOST_TEST_ALONE";

/// Runs a test's body in a process of its own: this test program again, with this test alone.
///
/// A test that takes a turn ([`take_turn`](crate::program::take_turn)) takes it before the call, because the other process shares
/// it. The body must be a closure in the test itself, because the closure's type names the test.
///
/// # Panics
/// When the test fails in the other process, with its output, or when the other process does not find it.
pub fn in_a_process_of_its_own<F: FnOnce()>(body: F) {
    // The type is `program::module::test::{{closure}}`. Another form names no test, which the run then reports.
    let closure = std::any::type_name::<F>();
    let test = closure.split_once("::{{closure}}").map_or(closure, |(test, _)| test);
    let name = test.split_once("::").map_or(test, |(_, name)| name);
    if std::env::var(ALONE).is_ok_and(|alone| alone == name) {
        return body();
    }
    let program = std::env::current_exe().expect("the path of this program");
    let output = Command::new(program)
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(ALONE, name)
        .output()
        .expect("this program runs again");
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    for what in said[0].lines().filter_map(|line| line.split_once("SKIPPED: ")) {
        skipped(what.1);
    }
    // A process that finds no test succeeds, too.
    let ran = said[0].contains("running 1 test");
    assert!(ran && output.status.success(), "{name}: {}\n{}{}", output.status, said[0], said[1]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_runs_once_and_in_another_process() {
        let mut here = false;
        in_a_process_of_its_own(|| here = true);
        assert_eq!(here, std::env::var_os(ALONE).is_some());
    }

    #[test]
    fn a_test_that_fails_there_fails_here() {
        if std::env::var_os(ALONE).is_some() {
            panic!("as it should");
        }
        let failed = std::panic::catch_unwind(|| in_a_process_of_its_own(|| {})).unwrap_err();
        let said = failed.downcast_ref::<String>().unwrap();
        assert!(said.contains("as it should"), "{said}");
    }

    fn no_test() {
        in_a_process_of_its_own(|| {});
    }

    #[test]
    fn what_is_no_test_does_not_pass() {
        let failed = std::panic::catch_unwind(no_test).unwrap_err();
        let said = failed.downcast_ref::<String>().unwrap();
        assert!(said.contains("running 0 tests"), "{said}");
    }
}
