//! A descriptor that can be made readable.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsRawFd, OwnedFd};

/// An event descriptor, readable or not.
pub(super) struct Event(OwnedFd);

impl Event {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn fd(&self) -> i32 {
        self.0.as_raw_fd()
    }

    #[cfg(test)]
    pub(super) fn descriptor(&self) -> &OwnedFd {
        &self.0
    }

    /// Makes the descriptor readable.
    pub(super) fn set(&self) {
        // Writing fails only when the counter is full, and then the descriptor is readable already.
        let _full = rustix::io::write(&self.0, &1u64.to_ne_bytes()).is_err();
    }

    /// Makes the descriptor unreadable. Returns false if it was unreadable already.
    pub(super) fn take(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}
