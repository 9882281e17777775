//! Memory that is backed by a file.

use std::ops::Deref;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::mapping::Mapping;

/// A mapping with a file descriptor behind it, so that a transfer backend can share it with another process.
///
/// The file's size is sealed. Otherwise the other process could shrink the file, and the next access here to the removed part
/// would end this process.
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
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, bytes as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
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

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn no_process_can_change_the_size_of_the_file() {
        let memory = SharedMemory::new("test", 4096).unwrap();
        for size in [0, 4095, 8192] {
            assert_eq!(ftruncate(memory.fd(), size), Err(Errno::PERM), "{size}");
        }
        let other = Mapping::of(&memory.fd(), 4096).unwrap();
        // SAFETY: this test alone has the memory, and no reference to a byte of it.
        unsafe { other.write(0, &[7]) };
        // SAFETY: nothing writes it any more.
        assert_eq!(unsafe { memory.bytes_at(0, 1) }, [7]);
    }
}
