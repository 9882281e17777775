//! A pool in a GPU's memory.

use std::sync::Arc;

use host_core::KvLayout;
use host_core::transfer::PagesCopy;
use host_kernels::copy::Memory;
use host_kernels::cuda::{Array, CudaCopier, CudaError, CudaKernels, Device, total_memory};
use parking_lot::Mutex;

use super::copier::copy_out_on_device;
use super::{MemoryError, PageBuffer, PageCopyError};

/// Bytes of the host memory through which pages are looked at, unless one page is longer.
const LOOKED_AT: usize = 4 << 20;

/// Bytes of the memory of the device with this number.
///
/// # Errors
/// When there is no driver, it is too old, or there is no such device.
pub fn bytes_of_device(device: usize) -> Result<u64, CudaError> {
    total_memory(device).map(|bytes| bytes as u64)
}

/// A pool in a GPU's memory, and what reads and writes its pages.
pub(crate) struct DevicePool {
    memory: Array<u8>,
    kernels: Arc<CudaKernels>,
    look: Mutex<Look>,
}

/// What brings pages to the CPU, to be looked at.
struct Look {
    copier: CudaCopier,
    buffer: PageBuffer,
}

impl DevicePool {
    /// A zeroed pool.
    ///
    /// # Errors
    /// As [`KvMemory::on_device`](super::KvMemory::on_device).
    pub(super) fn new(layout: &KvLayout, device: &Arc<Device>) -> Result<Self, MemoryError> {
        let kernels = Arc::new(CudaKernels::load(device)?);
        let stream = device.stream()?;
        let mut memory = Array::new(device, layout.bytes())?;
        memory.zero(&stream)?;
        device.wait(&stream)?;
        let buffer = PageBuffer::of_device(device, LOOKED_AT.max(layout.shape.page_bytes()))?;
        let look = Mutex::new(Look { copier: kernels.on(stream), buffer });
        Ok(Self { memory, kernels, look })
    }

    pub(super) fn memory(&self) -> &Array<u8> {
        &self.memory
    }

    /// The pool for a copy.
    pub(super) fn as_memory(&self) -> Memory {
        Memory::device(self.memory.address(), self.memory.len())
    }

    /// What copies its pages in a stream of its own.
    pub(super) fn copier(&self) -> Result<CudaCopier, CudaError> {
        Ok(self.kernels.on(self.memory.device().stream()?))
    }

    /// Bytes of pages that can be looked at at once: those of one page at least.
    pub(crate) fn looked_at(&self) -> usize {
        self.look.lock().buffer.bytes()
    }

    /// Brings `bytes` bytes of pages to the CPU for `look`. One caller at a time.
    ///
    /// # Errors
    /// When the copy does not fit, or the driver fails.
    ///
    /// # Safety
    /// Nothing writes the pages that the copy reads until this returns.
    pub(crate) unsafe fn look<T>(
        &self,
        copy: &PagesCopy,
        bytes: usize,
        look: impl FnOnce(&[u8]) -> T,
    ) -> Result<T, PageCopyError> {
        let Look { copier, buffer } = &*self.look.lock();
        let target = buffer.device_part(&(0..bytes)).ok_or(PageCopyError::Outside)?;
        // SAFETY: the pool's memory and the buffer stay as they are until the copy was waited for. The caller keeps writers from
        // the pages, and the lock keeps others from the buffer.
        unsafe { copy_out_on_device(copier, copy, self.as_memory(), target) }?;
        // SAFETY: nothing writes the buffer under the lock but the copy, which is done.
        Ok(look(unsafe { buffer.bytes_at(0, bytes) }))
    }
}
