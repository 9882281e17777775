//! Mapped files.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A shared mapping of part of a file, unmapped on drop.
pub struct Mapping {
    map: NonNull<u8>,
    mapped: usize,
    /// Offset of the first requested byte within the mapping, which starts at a page.
    skip: usize,
    length: usize,
}

// SAFETY: the mapping stays until drop and is plain bytes; the protocol decides which side touches which byte when.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes at `offset`, all of which the file must have.
    pub fn new(fd: impl AsFd, offset: u64, length: usize, writable: bool) -> rustix::io::Result<Self> {
        let end = offset.checked_add(length as u64).ok_or(Errno::INVAL)?;
        if length == 0 || u64::try_from(fstat(&fd)?.st_size).unwrap_or(0) < end {
            return Err(Errno::INVAL);
        }
        let skip = (offset % rustix::param::page_size() as u64) as usize;
        let mapped = length + skip;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a fresh mapping at an address the kernel chooses overlaps nothing of ours.
        let map = unsafe {
            mmap(std::ptr::null_mut(), mapped, protection, MapFlags::SHARED, fd, offset - skip as u64)
        }?;
        let map = NonNull::new(map.cast::<u8>()).ok_or(Errno::NOMEM)?;
        Ok(Self { map, mapped, skip, length })
    }

    /// The first byte.
    pub fn base(&self) -> *mut u8 {
        // SAFETY: `skip` is less than `mapped`.
        unsafe { self.map.as_ptr().add(self.skip) }
    }

    pub fn length(&self) -> usize {
        self.length
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nothing borrows beyond the value's life.
        // An error would mean that the kernel lost the mapping; there is nothing to do about it.
        let _unmapped = unsafe { munmap(self.map.as_ptr().cast(), self.mapped) };
    }
}

/// Types that may lie in memory which another process writes.
///
/// # Safety
/// Every bit pattern is a value, everything is reached through atomics, and the alignment is at most a page's.
pub unsafe trait Shared {}

/// A `T` in a mapping of its own.
pub struct SharedPage<T> {
    mapping: Mapping,
    holds: std::marker::PhantomData<T>,
}

impl<T: Shared> SharedPage<T> {
    /// Zeroed, with the file behind it.
    pub fn create(name: &str) -> rustix::io::Result<(Self, OwnedFd)> {
        let fd = memfd_create(name, MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, size_of::<T>() as u64)?;
        Ok((Self::open(&fd, true)?, fd))
    }

    /// The one that another process created. A page opened without `writable` faults when it is stored to.
    pub fn open(fd: impl AsFd, writable: bool) -> rustix::io::Result<Self> {
        let mapping = Mapping::new(fd, 0, size_of::<T>(), writable)?;
        Ok(Self { mapping, holds: std::marker::PhantomData })
    }
}

impl<T: Shared> std::ops::Deref for SharedPage<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the mapping has the type's size at a page's alignment, and `Shared` promises the rest.
        unsafe { &*self.mapping.base().cast::<T>() }
    }
}
