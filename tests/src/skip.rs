//! Reports of skipped tests. Tests print them, and `cargo xtask test` repeats them in its summary.

use std::io::Write;

/// Reports on standard output that something was not tested. The harness does not capture it.
///
/// # Panics
/// When the output is closed.
pub fn skipped(what: &str) {
    // One write, so that tests beside this one do not come in between.
    let line = format!("\nSKIPPED: {what}\n");
    let mut output = std::io::stdout().lock();
    output.write_all(line.as_bytes()).and_then(|()| output.flush()).expect("the tests' output is read");
}
