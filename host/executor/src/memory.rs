//! The KV pool of one rank, as an executor sees it.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use host_core::{KvLayout, PageId};
use host_memory::SharedMemory;

/// A rank's KV pool: memory and the layout that gives it meaning.
///
/// One value is like a `Vec` of rows: `&mut` writes, `&` reads. Another value of the same pool is made by
/// [`share`](KvMemory::share) alone, which asks for the promise that a compiler cannot check. There is no `Clone`:
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
    memory: Arc<SharedMemory>,
    layout: KvLayout,
    first_head: usize,
    device: Option<Arc<host_kernels::cuda::Array<u8>>>,
}

impl KvMemory {
    /// Interim.
    pub fn on_device(
        layout: KvLayout,
        first_head: usize,
        device: &Arc<host_kernels::cuda::Device>,
    ) -> Result<Self, host_kernels::cuda::CudaError> {
        let mut pool = host_kernels::cuda::Array::new(device, layout.bytes())?;
        pool.zero(&*device.stream()?)?;
        let mut kv = Self::for_heads(layout, first_head).unwrap();
        kv.device = Some(Arc::new(pool));
        Ok(kv)
    }
    /// Interim.
    pub fn device_address(&self) -> Option<u64> {
        self.device.as_ref().map(|d| d.address())
    }
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
        Ok(Self { memory, layout, first_head, device: None })
    }

    /// Another value of the same pool, for another thread.
    ///
    /// # Safety
    /// As long as either value lives, no row is written through one while it is read or written through the other, or while a
    /// slice of it from the other is alive. In a worker that is the scheduler's page accounting: it gives a page to one batch, copy
    /// or transfer at a time, and lets a transfer read layers of a batch's page only once the executor has said that it writes
    /// them no more.
    #[must_use]
    pub unsafe fn share(&self) -> Self {
        Self { memory: self.memory.clone(), layout: self.layout, first_head: self.first_head, device: self.device.clone() }
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

    /// The memory, to register with a transfer backend. What touches its bytes keeps the promise of [`share`](KvMemory::share).
    #[must_use]
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Address of one row. `kv` is 0 for K and 1 for V. The row is always inside the pool.
    #[must_use]
    #[inline]
    pub fn row(&self, page: PageId, head: usize, layer: usize, kv: usize, token: usize) -> NonNull<u8> {
        let offset = self.layout.row(page.0 as usize, head, layer, kv, token);
        // SAFETY: `KvLayout::row` panics on an index outside the shape, and the mapping covers the whole shape.
        unsafe { self.memory.address().add(offset) }
    }

    /// The row's bytes, to read.
    #[must_use]
    #[inline]
    pub fn read_row(&self, page: PageId, head: usize, layer: usize, kv: usize, token: usize) -> &[u8] {
        let length = self.layout.shape.row_bytes(kv);
        // SAFETY: the row lies inside the mapping. Through this value nothing writes it while the slice borrows from it, and
        // through others nothing does by the promise of `share`.
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
        // SAFETY: 2 x page_tokens rows follow each other from the first, as the strides say, and all lie inside the mapping.
        // Nothing writes them meanwhile, as in `read_row`.
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
        // SAFETY: the row lies inside the mapping. The slice borrows this value alone, and through others nothing reads or writes
        // the row meanwhile, by the promise of `share`.
        unsafe { std::slice::from_raw_parts_mut(self.row(page, head, layer, kv, token).as_ptr(), length) }
    }
}
