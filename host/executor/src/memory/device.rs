//! A pool in a GPU's memory.

use std::sync::Arc;

use host_core::KvLayout;
use host_kernels::copy::Memory;
use host_kernels::cuda::digest::{self, DigestKernels};
use host_kernels::cuda::{Array, CudaCopier, CudaError, CudaKernels, CudaStream, Device, total_memory};
use parking_lot::Mutex;

use super::MemoryError;

/// Bytes of the memory of the device with this number.
///
/// # Errors
/// When there is no driver, it is too old, or there is no such device.
pub fn bytes_of_device(device: usize) -> Result<u64, CudaError> {
    total_memory(device).map(|bytes| bytes as u64)
}

/// A pool in a GPU's memory, and the kernels that copy and digest its pages.
pub(crate) struct DevicePool {
    memory: Array<u8>,
    kernels: Arc<CudaKernels>,
    digests: DigestKernels,
    /// The stream that digests are computed in.
    digests_in: Mutex<Arc<CudaStream>>,
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
        let digests = DigestKernels::new(device)?;
        Ok(Self { memory, kernels, digests, digests_in: Mutex::new(stream) })
    }

    pub(super) fn memory(&self) -> &Array<u8> {
        &self.memory
    }

    /// The pool for a copy.
    pub(super) fn as_memory(&self) -> Memory {
        Memory::device(self.memory.address(), self.memory.len())
    }

    /// A copier for the pool's pages, with a stream of its own.
    pub(super) fn copier(&self) -> Result<CudaCopier, CudaError> {
        Ok(self.kernels.on(self.memory.device().stream()?))
    }

    /// Address of its first byte.
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Digests of parts of pages. Nothing may write these pages meanwhile. Callers are served one at a time.
    ///
    /// # Errors
    /// When the device fails.
    pub(crate) fn digests(
        &self,
        pool: &digest::Pool,
        parts: &[digest::PagePart],
    ) -> Result<Vec<u64>, CudaError> {
        let stream = self.digests_in.lock();
        self.digests.digests(&stream, pool, parts)
    }
}
