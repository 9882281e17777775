//! Tests that cannot run here say so in their output, and `cargo xtask test` repeats it in its summary.

use std::io::Write;

/// Says on standard output, past the harness, that something was not tested.
///
/// # Panics
/// When the output is closed.
pub fn skipped(what: &str) {
    // One write, so that tests beside this one do not come in between.
    let line = format!("\nSKIPPED: {what}\n");
    let mut output = std::io::stdout().lock();
    output.write_all(line.as_bytes()).and_then(|()| output.flush()).expect("the tests' output is read");
}
