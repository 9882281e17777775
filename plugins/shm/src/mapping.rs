//! Mapped files.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
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

// SAFETY: the mapping stays until drop and is plain bytes. The protocol decides which side touches which byte when.
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
        // An error would mean that the kernel lost the mapping. There is nothing to do about it.
        let _unmapped = unsafe { munmap(self.map.as_ptr().cast(), self.mapped) };
    }
}

/// Types that may lie in memory which another process writes.
///
/// # Safety
/// Every bit pattern is a value, everything is reached through atomics, and the alignment is at most a page's.
pub unsafe trait Shared {}

/// Which processes may map a page so that they can store to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Writers {
    /// The one that created it, and no other, whatever descriptors of it they get or open.
    Creator,
    /// Every one that has a descriptor.
    All,
}

/// Whether no process can shrink the file, which would make every access to the lost part fatal.
pub fn cannot_shrink(fd: impl AsFd) -> bool {
    fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

/// A `T` in a mapping of its own.
pub struct SharedPage<T> {
    mapping: Mapping,
    holds: std::marker::PhantomData<T>,
}

impl<T: Shared> SharedPage<T> {
    /// Makes a zeroed page, and the file behind it, whose size is fixed.
    pub fn create(name: &str, writers: Writers) -> rustix::io::Result<(Self, OwnedFd)> {
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, size_of::<T>() as u64)?;
        let page = Self::open(&fd, true)?;
        if writers == Writers::Creator {
            // The mapping made above stays writable.
            match fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE) {
                // Linux before 5.1. Peers are processes of the same user, and well-behaved ones do not store to it.
                Err(Errno::INVAL) => {}
                sealed => sealed?,
            }
        }
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((page, fd))
    }

    /// Opens a page that another process created. A store to a page that was opened without `writable` faults.
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicU64, Ordering};

    use rustix::fs::{Mode, OFlags, open};

    use super::*;

    struct Word(AtomicU64);

    // SAFETY: an atomic only.
    unsafe impl Shared for Word {}

    /// Opens the file again, as a process with a descriptor can, with all rights that the system grants.
    fn reopened(fd: &OwnedFd) -> OwnedFd {
        open(format!("/proc/self/fd/{}", fd.as_raw_fd()), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .unwrap()
    }

    #[test]
    fn no_process_can_change_the_size_of_a_page() {
        for writers in [Writers::Creator, Writers::All] {
            let (page, fd) = SharedPage::<Word>::create("test", writers).unwrap();
            for fd in [&fd, &reopened(&fd)] {
                for size in [0, 1 << 16] {
                    assert_eq!(ftruncate(fd, size), Err(Errno::PERM));
                }
                assert_eq!(fcntl_add_seals(fd, SealFlags::WRITE), Err(Errno::PERM));
                assert!(cannot_shrink(fd));
            }
            page.0.store(7, Ordering::SeqCst);
        }
        assert!(!cannot_shrink(memfd_create("test", MemfdFlags::CLOEXEC).unwrap()));
    }

    #[test]
    fn a_page_of_its_creator_is_read_by_others_and_written_by_none() {
        let (page, fd) = SharedPage::<Word>::create("test", Writers::Creator).unwrap();
        let other = reopened(&fd);
        assert_eq!(SharedPage::<Word>::open(&other, true).err(), Some(Errno::PERM));
        assert_eq!(rustix::io::pwrite(&other, &[1], 0), Err(Errno::PERM));
        let read = SharedPage::<Word>::open(&other, false).unwrap();
        page.0.store(7, Ordering::SeqCst);
        assert_eq!(read.0.load(Ordering::SeqCst), 7);

        let (page, fd) = SharedPage::<Word>::create("test", Writers::All).unwrap();
        SharedPage::<Word>::open(reopened(&fd), true).unwrap().0.store(8, Ordering::SeqCst);
        assert_eq!(page.0.load(Ordering::SeqCst), 8);
    }
}
