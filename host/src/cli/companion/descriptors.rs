//! Closes descriptors that a companion must not inherit, for instance those that the supervisor inherited.

use std::os::fd::{BorrowedFd, RawFd};

use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

/// The first descriptor after standard input, output and error.
const FIRST: RawFd = 3;

/// Marks all descriptors except the standard ones to be closed when this process executes another program.
///
/// No other thread may open or close descriptors meanwhile.
///
/// # Errors
/// When the list of open descriptors cannot be read.
pub fn close_on_exec() -> std::io::Result<()> {
    let entries = std::fs::read_dir("/proc/self/fd")?.collect::<std::io::Result<Vec<_>>>()?;
    let numbers = entries.iter().filter_map(|entry| entry.file_name().to_str()?.parse::<RawFd>().ok());
    for number in numbers.filter(|number| *number >= FIRST) {
        // SAFETY: the descriptor was open a moment ago. Since then only the listing itself was closed, and for that the call
        // returns EBADF.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        if let Ok(flags) = fcntl_getfd(descriptor) {
            fcntl_setfd(descriptor, flags | FdFlags::CLOEXEC)?;
        }
    }
    Ok(())
}
