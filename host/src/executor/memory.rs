//! The KV pool of one rank, as an executor sees it.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use host_core::{KvLayout, PageId};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Anonymous memory with a file descriptor behind it, so that a transfer backend can share it with another process.
///
/// Zeroed at creation, unmapped on drop. Reads and writes by several parties (executor, transfer backend, a peer
/// process) are kept apart by the scheduler, which gives every page one owner at a time. One page has two users at once in
/// one case: the transfer backend reads layers that the executor has said are done, while the executor writes others.
pub struct SharedMemory {
    base: NonNull<u8>,
    bytes: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping stays valid for the life of the value and is plain bytes; who may touch which page when is the
// scheduler's page accounting, not the thread.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps `bytes` bytes (at least one).
    ///
    /// # Errors
    /// When the system has no memory, or no descriptors, to give.
    pub fn new(name: &str, bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes.max(1);
        let fd = memfd_create(name, MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, bytes as u64)?;
        // SAFETY: a fresh mapping at an address the kernel chooses overlaps nothing of ours.
        let base = unsafe {
            mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0)
        }?;
        let base =
            NonNull::new(base.cast::<u8>()).ok_or_else(|| std::io::Error::other("mmap gave address 0"))?;
        Ok(Self { base, bytes, fd })
    }

    /// First byte.
    #[must_use]
    pub fn address(&self) -> NonNull<u8> {
        self.base
    }

    /// Length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Panics
    /// When the range lies outside the memory.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset.checked_add(bytes.len()).is_some_and(|end| end <= self.bytes), "outside the memory");
        // SAFETY: the range was just checked; the caller's protocol gives it this range alone.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr().add(offset), bytes.len()) }
    }

    /// Copies out of the memory, from `offset`.
    ///
    /// # Panics
    /// When the range lies outside the memory.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(offset.checked_add(bytes.len()).is_some_and(|end| end <= self.bytes), "outside the memory");
        // SAFETY: the range was just checked; whoever writes it has announced that it is done.
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.as_ptr().add(offset), bytes.as_mut_ptr(), bytes.len());
        }
    }

    /// Bytes from `offset` on, to read in place.
    ///
    /// # Panics
    /// When the range lies outside the memory.
    #[must_use]
    pub fn bytes_at(&self, offset: usize, length: usize) -> &[u8] {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.bytes), "outside the memory");
        // SAFETY: the range was just checked; whoever writes it has announced that it is done, and does not begin again
        // before the caller has let go.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), length) }
    }

    /// The file behind the memory.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: base and length are those of our own mapping, and nothing borrows from it past the value's life.
        // An error here would mean that the kernel lost the mapping; there is nothing to do about it.
        let _unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// A rank's KV pool: memory and the layout that gives it meaning.
#[derive(Clone)]
pub struct KvMemory {
    memory: Arc<SharedMemory>,
    layout: KvLayout,
    first_head: usize,
}

impl KvMemory {
    /// A zeroed pool of this layout, for a rank that holds all of a model's KV heads, or the first ones.
    ///
    /// # Errors
    /// When the system has no memory to give.
    pub fn new(layout: KvLayout) -> std::io::Result<Self> {
        Self::for_heads(layout, 0)
    }

    /// A zeroed pool whose head 0 is the model's KV head `first_head`, as of [`host_core::heads::rank_heads`].
    ///
    /// # Errors
    /// When the system has no memory to give.
    pub fn for_heads(layout: KvLayout, first_head: usize) -> std::io::Result<Self> {
        let memory = Arc::new(SharedMemory::new("host-kv", layout.bytes())?);
        Ok(Self { memory, layout, first_head })
    }

    /// The KV heads that the pool holds, counted over the whole model. In every other call, head 0 is the first of these.
    #[must_use]
    pub fn heads(&self) -> Range<usize> {
        self.first_head..self.first_head + self.layout.shape.heads
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// The memory, to register with a transfer backend.
    #[must_use]
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Address of one row; `kv` is 0 for K and 1 for V. Always inside the pool.
    #[must_use]
    #[inline]
    pub fn row(&self, page: PageId, head: usize, layer: usize, kv: usize, token: usize) -> NonNull<u8> {
        let offset = self.layout.row(page.0 as usize, head, layer, kv, token);
        // SAFETY: `KvLayout::row` panics on an index outside the shape, and the mapping covers the whole shape.
        unsafe { self.memory.base.add(offset) }
    }

    /// The row's bytes, to read.
    #[must_use]
    #[inline]
    pub fn read_row(&self, page: PageId, head: usize, layer: usize, kv: usize, token: usize) -> &[u8] {
        let length = self.layout.shape.row_bytes(kv);
        // SAFETY: the row lies inside the mapping; the scheduler lets nobody write a page that a batch or a transfer reads,
        // except the batch's own new rows, which the executor writes before it reads them or says that they are done.
        unsafe { std::slice::from_raw_parts(self.row(page, head, layer, kv, token).as_ptr(), length) }
    }

    /// K and V of one head in one layer of a page, to read, where they are one piece of memory in the order K/V, token.
    #[must_use]
    pub fn read_head(&self, page: PageId, head: usize, layer: usize) -> Option<&[u8]> {
        let shape = self.layout.shape;
        let [keys, values] = &self.layout.sides;
        let apart = values.start != keys.start + keys.row * shape.page_tokens;
        if apart || keys.token != keys.row || values.token != values.row {
            return None;
        }
        let first = self.row(page, head, layer, 0, 0);
        // SAFETY: 2 x page_tokens rows follow each other from the first, as the strides say, and all lie inside the mapping;
        // the scheduler lets nobody write this layer of the page while somebody reads it.
        Some(unsafe { std::slice::from_raw_parts(first.as_ptr(), shape.block_bytes()) })
    }

    /// The row's bytes, to write.
    #[must_use]
    #[inline]
    pub fn write_row(
        &mut self,
        page: PageId,
        head: usize,
        layer: usize,
        kv: usize,
        token: usize,
    ) -> &mut [u8] {
        let length = self.layout.shape.row_bytes(kv);
        // SAFETY: the row lies inside the mapping, and the scheduler gave this page to the batch being computed; others
        // read only rows of layers that the executor has said it writes no more.
        unsafe { std::slice::from_raw_parts_mut(self.row(page, head, layer, kv, token).as_ptr(), length) }
    }
}
