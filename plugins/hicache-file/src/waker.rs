//! Descriptors that wake threads of the tier and of the host.

use std::os::fd::OwnedFd;

use host_plugin_api::{Error, ErrorCode, Result};
use rustix::event::{EventfdFlags, eventfd};

use crate::sync::atomic::{AtomicBool, Ordering};

/// Wakes one thread that waits in the kernel.
pub struct Waker {
    pub fd: OwnedFd,
    asleep: AtomicBool,
}

/// Makes a descriptor that is not readable.
pub fn new_event() -> Result<OwnedFd> {
    let text = |e| Error::new(ErrorCode::IO, format!("cannot create an eventfd: {e}"));
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(text)
}

/// Makes the descriptor readable.
pub fn signal(fd: &OwnedFd) {
    // Fails only when the count is full, near 2^64, and then the descriptor is readable already.
    let _readable_already = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Makes the descriptor not readable.
pub fn clear(fd: &OwnedFd) {
    let mut count = [0; 8];
    // Fails only when it is not readable.
    let _clear_already = rustix::io::read(fd, &mut count);
}

impl Waker {
    pub fn new() -> Result<Self> {
        Ok(Self { fd: new_event()?, asleep: AtomicBool::new(false) })
    }

    /// From here on every push wakes the thread, until `clear`.
    pub fn arm(&self) {
        self.asleep.store(true, Ordering::SeqCst);
    }

    pub fn clear(&self) {
        self.asleep.store(false, Ordering::SeqCst);
        clear(&self.fd);
    }

    /// Wakes the thread, if it may be asleep.
    pub fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            signal(&self.fd);
        }
    }
}
