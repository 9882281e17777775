//! The KV pool of one rank, in host memory or in a GPU's.
//!
//! An executor on the CPU reads and writes rows of a pool in host memory. Everything else that touches pages works with both
//! kinds: copies between a pool and host memory ([`PageCopier`]), digests ([`crate::digest::parts`]), and the place of a pool
//! for its registration ([`KvMemory::location`]).

mod buffer;
mod copier;
mod device;

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use host_core::{KvLayout, PageId};
use host_kernels::cuda::{Array, CudaError, Device};
use host_memory::SharedMemory;

pub use buffer::PageBuffer;
pub use copier::{PageCopier, PageCopyError};
pub(crate) use device::DevicePool;
pub use device::bytes_of_device;

/// Why memory could not be allocated.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The system refuses.
    #[error("{0}")]
    Host(#[from] std::io::Error),
    /// A GPU's driver refuses.
    #[error("{0}")]
    Device(#[from] CudaError),
}

/// Where a pool lies, to register it with a transfer plugin.
#[derive(Debug)]
pub struct Location<'a> {
    /// The address of its first byte, in this process or on the device.
    pub address: u64,
    /// The bytes of the pool.
    pub bytes: usize,
    /// The file behind host memory.
    pub fd: Option<BorrowedFd<'a>>,
    /// The number of the device whose memory it is, `None` for host memory.
    pub device: Option<u32>,
}

/// Keeps a pool's memory alive as long as this value lives.
#[derive(Clone)]
#[expect(dead_code, reason = "held for its drop")]
pub struct Held(Pool);

/// A pool's memory.
#[derive(Clone)]
enum Pool {
    Host(Arc<SharedMemory>),
    Device(Arc<DevicePool>),
}

/// A rank's KV pool: memory and the layout that gives it meaning.
///
/// Calls that name a row are for pools in host memory ([`KvMemory::host`]) and panic for other pools. An executor that uses these
/// calls makes such a pool in [`Executor::pool`](crate::Executor::pool), and [checks](KvMemory::expect_host) once for each batch
/// that it was given one.
///
/// One value is like a `Vec` of rows: `&mut` writes, `&` reads. Only [`share`](KvMemory::share) makes another value of the same
/// pool. It is unsafe, because its caller makes a promise that the compiler cannot check. There is no `Clone`:
///
/// ```compile_fail,E0599
/// # use host_core::{Dtype, KvLayout, KvShape, layout::KvOrder};
/// # let (dtype, head_dim, value_dim) = (Dtype::F32, 4, 4);
/// # let shape = KvShape { pages: 1, heads: 1, layers: 1, page_tokens: 1, head_dim, value_dim, dtype };
/// let kv = host_executor::KvMemory::new(KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim)).unwrap();
/// let other = kv.clone();
/// ```
///
/// ```compile_fail,E0133
/// # use host_core::{Dtype, KvLayout, KvShape, layout::KvOrder};
/// # let (dtype, head_dim, value_dim) = (Dtype::F32, 4, 4);
/// # let shape = KvShape { pages: 1, heads: 1, layers: 1, page_tokens: 1, head_dim, value_dim, dtype };
/// let kv = host_executor::KvMemory::new(KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim)).unwrap();
/// let other = kv.share();
/// ```
pub struct KvMemory {
    pool: Pool,
    layout: KvLayout,
    first_head: usize,
}

#[cold]
fn no_rows() -> ! {
    panic!("rows of a KV pool in a device's memory cannot be read or written in place")
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
        Ok(Self { pool: Pool::Host(memory), layout, first_head })
    }

    /// A zeroed pool as of [`for_heads`](Self::for_heads), in the memory of a GPU.
    ///
    /// # Errors
    /// When the device has no memory left, there is no NVRTC for the kernels that copy pages, or the driver refuses.
    pub fn on_device(layout: KvLayout, first_head: usize, device: &Arc<Device>) -> Result<Self, MemoryError> {
        let pool = Pool::Device(Arc::new(DevicePool::new(&layout, device)?));
        Ok(Self { pool, layout, first_head })
    }

    /// Another value of the same pool, for another thread.
    ///
    /// # Safety
    /// As long as either value lives, no row is written through one while it is read or written through the other, or while a
    /// slice of it from the other is alive. In a worker the scheduler's page accounting ensures this. It gives a page to one batch,
    /// copy or transfer at a time, and lets a transfer read layers of a batch's page only after the executor has reported that it
    /// writes them no more.
    #[must_use]
    pub unsafe fn share(&self) -> Self {
        Self { pool: self.pool.clone(), layout: self.layout, first_head: self.first_head }
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

    /// The memory of a pool in host memory. Callers that touch its bytes keep the promise of [`share`](KvMemory::share).
    #[must_use]
    pub fn host(&self) -> Option<&Arc<SharedMemory>> {
        match &self.pool {
            Pool::Host(memory) => Some(memory),
            Pool::Device(_) => None,
        }
    }

    /// The memory of a pool in a GPU's memory. Callers that touch its bytes keep the promise of [`share`](KvMemory::share).
    #[must_use]
    pub fn device(&self) -> Option<&Array<u8>> {
        self.device_pool().map(|pool| pool.memory())
    }

    pub(crate) fn device_pool(&self) -> Option<&DevicePool> {
        match &self.pool {
            Pool::Host(_) => None,
            Pool::Device(pool) => Some(pool),
        }
    }

    /// Checks that rows can be read and written in place.
    ///
    /// # Errors
    /// When the pool lies in a device's memory.
    pub fn expect_host(&self) -> Result<(), crate::ExecutorError> {
        match self.pool {
            Pool::Host(_) => Ok(()),
            Pool::Device(_) => Err(crate::ExecutorError::Failed(
                "it computes in host memory, and was given a KV pool in a device's memory".to_owned(),
            )),
        }
    }

    /// Where the pool lies, to register it.
    #[must_use]
    pub fn location(&self) -> Location<'_> {
        let bytes = self.layout.bytes();
        match &self.pool {
            Pool::Host(memory) => Location {
                address: memory.address().as_ptr().addr() as u64,
                bytes: memory.bytes(),
                fd: Some(memory.fd()),
                device: None,
            },
            Pool::Device(pool) => Location {
                address: pool.memory().address(),
                bytes: bytes.max(1),
                fd: None,
                // No machine has that many devices.
                device: Some(u32::try_from(pool.memory().device().ordinal()).unwrap_or(u32::MAX)),
            },
        }
    }

    /// A value that keeps the pool's memory alive.
    #[must_use]
    pub fn hold(&self) -> Held {
        Held(self.pool.clone())
    }

    /// Address of one row of a pool in host memory. `kv` is 0 for K and 1 for V. The row is always inside the pool.
    ///
    /// # Panics
    /// When the shape has no such row, or the pool lies in a device's memory.
    #[must_use]
    #[inline]
    pub fn row(&self, page: PageId, head: usize, layer: usize, kv: usize, token: usize) -> NonNull<u8> {
        let Pool::Host(memory) = &self.pool else { no_rows() };
        let offset = self.layout.row(page.0 as usize, head, layer, kv, token);
        // SAFETY: `KvLayout::row` panics on an index outside the shape, and the mapping covers the whole shape.
        unsafe { memory.address().add(offset) }
    }

    /// The row's bytes, to read.
    ///
    /// # Panics
    /// As [`row`](KvMemory::row).
    #[must_use]
    #[inline]
    pub fn read_row(&self, page: PageId, head: usize, layer: usize, kv: usize, token: usize) -> &[u8] {
        let length = self.layout.shape.row_bytes(kv);
        // SAFETY: the row lies inside the mapping. Through this value nothing writes it while the slice borrows from it, and
        // through others nothing does by the promise of `share`.
        unsafe { std::slice::from_raw_parts(self.row(page, head, layer, kv, token).as_ptr(), length) }
    }

    /// K and V of one head in one layer of a page, to read. `None` if they are not one piece of memory in the order K/V, token.
    ///
    /// # Panics
    /// As [`row`](KvMemory::row).
    #[must_use]
    pub fn read_head(&self, page: PageId, head: usize, layer: usize) -> Option<&[u8]> {
        let shape = self.layout.shape;
        let [keys, values] = &self.layout.sides;
        let apart = values.start != keys.start + keys.row * shape.page_tokens;
        if apart || keys.token != keys.row || values.token != values.row {
            return None;
        }
        let first = self.row(page, head, layer, 0, 0);
        // SAFETY: 2 x page_tokens rows follow each other from the first, as the strides say, and all lie inside the mapping.
        // Nothing writes them meanwhile, as in `read_row`.
        Some(unsafe { std::slice::from_raw_parts(first.as_ptr(), shape.block_bytes()) })
    }

    /// The row's bytes, to write.
    ///
    /// # Panics
    /// As [`row`](KvMemory::row).
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
        // SAFETY: the row lies inside the mapping. The slice borrows this value alone, and through others nothing reads or writes
        // the row meanwhile, by the promise of `share`.
        unsafe { std::slice::from_raw_parts_mut(self.row(page, head, layer, kv, token).as_ptr(), length) }
    }
}
