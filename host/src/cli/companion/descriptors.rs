//! Closes descriptors that a companion must not inherit, such as those that the supervisor was started with.

use std::os::fd::{BorrowedFd, RawFd};

use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

/// The first descriptor after standard input, output and error.
const FIRST: RawFd = 3;

/// Marks all descriptors but the standard ones to be closed when this process becomes another program.
///
/// No other thread may open or close any meanwhile.
///
/// # Errors
/// When the system does not say what is open.
pub fn close_on_exec() -> std::io::Result<()> {
    let entries = std::fs::read_dir("/proc/self/fd")?.collect::<std::io::Result<Vec<_>>>()?;
    let numbers = entries.iter().filter_map(|entry| entry.file_name().to_str()?.parse::<RawFd>().ok());
    for number in numbers.filter(|number| *number >= FIRST) {
        // SAFETY: it was open a moment ago, nothing here closes any but the listing itself, and that is answered with EBADF.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        if let Ok(flags) = fcntl_getfd(descriptor) {
            fcntl_setfd(descriptor, flags | FdFlags::CLOEXEC)?;
        }
    }
    Ok(())
}
