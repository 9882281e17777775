//! Programs that tests write and run.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes a program. A shell does it: with a descriptor in this process, children that other tests start would have it for
/// a moment, and no program runs that is open for writing anywhere.
pub fn write(path: &Path, text: &str) {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
    let mut shell = shell.spawn().unwrap();
    shell.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let status = shell.wait().unwrap();
    assert!(status.success(), "{} is not written: {status}", path.display());
}
