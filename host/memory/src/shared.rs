//! Memory with a file behind it.

use std::ops::Deref;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::mapping::Mapping;

/// A mapping with a file descriptor behind it, so that a transfer backend can share it with another process.
pub struct SharedMemory {
    mapping: Mapping,
    fd: OwnedFd,
}

impl SharedMemory {
    /// Maps `bytes` bytes (at least one).
    ///
    /// # Errors
    /// When the system has no memory, or no descriptors, to give.
    pub fn new(name: &str, bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes.max(1);
        let fd = memfd_create(name, MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, bytes as u64)?;
        Ok(Self { mapping: Mapping::of(&fd, bytes)?, fd })
    }

    /// The file behind the memory.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Deref for SharedMemory {
    type Target = Mapping;

    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}
