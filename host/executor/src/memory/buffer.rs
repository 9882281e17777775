//! Host memory that pages of a pool are copied to and from.

use std::ops::{Deref, Range};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use host_kernels::copy::Memory;
use host_kernels::cuda::{Device, Registered};
use host_memory::{Mapping, SharedMemory};

use super::{KvMemory, MemoryError};

/// Host memory that pages of a pool are copied to and from.
///
/// For a pool in a GPU's memory the buffer is pinned once, when it is made. The GPU reads and writes it in place.
pub struct PageBuffer {
    /// Declared before the memory, so that it is dropped first.
    registered: Option<Registered>,
    memory: Kind,
}

enum Kind {
    Private(Mapping),
    Shared(SharedMemory),
}

impl PageBuffer {
    /// Memory of this process alone, for copies of this pool's pages.
    ///
    /// # Errors
    /// When the system has no memory left, or a device's driver does not pin it.
    pub fn private(pool: &KvMemory, bytes: usize) -> Result<Self, MemoryError> {
        Self::registered(Kind::Private(Mapping::private(bytes)?), pool.device().map(|memory| memory.device()))
    }

    /// Memory with a file behind it, so that it can be shared with other processes.
    ///
    /// # Errors
    /// As [`private`](Self::private).
    pub fn shared(pool: &KvMemory, name: &str, bytes: usize) -> Result<Self, MemoryError> {
        let memory = Kind::Shared(SharedMemory::new(name, bytes)?);
        Self::registered(memory, pool.device().map(|memory| memory.device()))
    }
    fn registered(memory: Kind, device: Option<&Arc<Device>>) -> Result<Self, MemoryError> {
        let mut buffer = Self { registered: None, memory };
        if let Some(device) = device {
            // SAFETY: the mapping is this value's, and is unmapped after the registration was dropped.
            buffer.registered = Some(unsafe { Registered::new(device, buffer.address(), buffer.bytes()) }?);
        }
        Ok(buffer)
    }

    /// The file behind shared memory.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.memory {
            Kind::Private(_) => None,
            Kind::Shared(memory) => Some(memory.fd()),
        }
    }

    /// A part of the buffer, with its address for the CPU.
    pub(super) fn host_part(&self, part: &Range<usize>) -> Option<Memory> {
        let length = self.inside(part)?;
        // SAFETY: the part begins inside the mapping, as was just checked.
        let base = unsafe { self.address().add(part.start) };
        Some(Memory::new(base.as_ptr(), length))
    }

    /// A part of the buffer, with its address on the device that it is registered with.
    pub(super) fn device_part(&self, part: &Range<usize>) -> Option<Memory> {
        let length = self.inside(part)?;
        self.registered.as_ref()?.memory().part(part.start, length)
    }

    fn inside(&self, part: &Range<usize>) -> Option<usize> {
        part.end.checked_sub(part.start).filter(|_| part.end <= self.bytes())
    }
}

impl Deref for PageBuffer {
    type Target = Mapping;

    fn deref(&self) -> &Mapping {
        match &self.memory {
            Kind::Private(memory) => memory,
            Kind::Shared(memory) => memory,
        }
    }
}
