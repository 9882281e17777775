//! Programs that tests write and run.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes a program by a shell. A descriptor in this process would be inherited for a moment by children that other tests start,
/// and no program can be run while it is open for writing.
pub fn write(path: &Path, text: &str) {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
    let mut shell = shell.spawn().unwrap();
    shell.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let status = shell.wait().unwrap();
    assert!(status.success(), "{} is not written: {status}", path.display());
}
