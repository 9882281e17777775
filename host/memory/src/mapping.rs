//! Memory that is mapped for pages of KV: a rank's pool, or its host memory.

use std::ptr::NonNull;

use rustix::fd::AsFd;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// A mapping of memory, zeroed at creation and unmapped on drop.
///
/// The scheduler keeps the accesses of several parties (executor, transfer backend, storage, a peer process) apart: it
/// gives every page one owner at a time. A page has two users at once in one case only: the transfer backend reads layers
/// that the executor has reported as done, while the executor writes other layers.
///
/// The compiler cannot check this protocol. So the methods that access the bytes are unsafe, and each caller says which part of
/// the protocol makes its access safe:
///
/// ```compile_fail,E0133
/// let memory = host_memory::Mapping::private(4096).unwrap();
/// memory.write(0, &[1]);
/// ```
///
/// ```compile_fail,E0133
/// let memory = host_memory::Mapping::private(4096).unwrap();
/// memory.bytes_at(0, 1);
/// ```
///
/// ```compile_fail,E0133
/// let memory = host_memory::Mapping::private(4096).unwrap();
/// memory.read(0, &mut [0]);
/// ```
///
/// ```
/// let memory = host_memory::Mapping::private(4096).unwrap();
/// // SAFETY: nothing else has this memory.
/// unsafe {
///     memory.write(1, &[7, 8]);
///     assert_eq!(memory.bytes_at(0, 4), [0, 7, 8, 0]);
/// }
/// ```
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping stays valid for the life of the value and is plain bytes. The methods that access them are unsafe.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

const RIGHTS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl Mapping {
    /// Maps `bytes` bytes (at least one) for this process alone, in huge pages where the system gives them on request
    /// (`/sys/kernel/mm/transparent_hugepage/enabled`). A device that reads or writes the memory then has one piece to know of
    /// instead of 512.
    ///
    /// # Errors
    /// When the system has no memory to give.
    pub fn private(bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes.max(1);
        // SAFETY: a fresh mapping at an address the kernel chooses overlaps nothing of ours.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, RIGHTS, MapFlags::PRIVATE) }?;
        let mapping = Self::around(base, bytes)?;
        // SAFETY: the range is the new mapping, and the advice does not change its bytes.
        // A kernel without huge pages refuses the advice. The mapping is usable all the same.
        let _small = unsafe { madvise(base, bytes, Advice::LinuxHugepage) };
        Ok(mapping)
    }

    /// Maps the first `bytes` bytes (at least one) of a file, which must have that many.
    pub(super) fn of(file: &impl AsFd, bytes: usize) -> std::io::Result<Self> {
        // SAFETY: as in `private`.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, RIGHTS, MapFlags::SHARED, file, 0) }?;
        Self::around(base, bytes)
    }

    fn around(base: *mut std::ffi::c_void, bytes: usize) -> std::io::Result<Self> {
        let base =
            NonNull::new(base.cast::<u8>()).ok_or_else(|| std::io::Error::other("mmap gave address 0"))?;
        Ok(Self { base, bytes })
    }

    /// Address of the first byte.
    #[must_use]
    pub fn address(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Safety
    /// Nothing else reads or writes the range meanwhile, in this process or another, and no reference to a byte of it is alive.
    ///
    /// # Panics
    /// When the range lies outside the memory.
    pub unsafe fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset.checked_add(bytes.len()).is_some_and(|end| end <= self.bytes), "outside the memory");
        // SAFETY: the range was just checked, and the caller has exclusive access to it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr().add(offset), bytes.len()) }
    }

    /// Fills `bytes` from the memory at `offset`.
    ///
    /// # Safety
    /// Nothing writes the range meanwhile, in this process or another.
    ///
    /// # Panics
    /// When the range lies outside the memory.
    pub unsafe fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(offset.checked_add(bytes.len()).is_some_and(|end| end <= self.bytes), "outside the memory");
        // SAFETY: the range was just checked. The caller keeps writers out, and `bytes` is borrowed exclusively.
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.as_ptr().add(offset), bytes.as_mut_ptr(), bytes.len());
        }
    }

    /// Bytes from `offset` on, to read in place.
    ///
    /// # Safety
    /// Nothing writes the range as long as the slice is alive, in this process or another.
    ///
    /// # Panics
    /// When the range lies outside the memory.
    #[must_use]
    pub unsafe fn bytes_at(&self, offset: usize, length: usize) -> &[u8] {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.bytes), "outside the memory");
        // SAFETY: the range was just checked, and the caller keeps writers out.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), length) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of our own mapping, and nothing borrows from it past the value's life.
        // An error would mean that the kernel lost the mapping. It cannot be handled here.
        let _unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
