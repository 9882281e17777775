//! Copies of pages between a pool and host memory.

use std::ops::Range;
use std::sync::Arc;

use host_core::transfer::{self, PagesCopy};
use host_kernels::copy::{self as kernels, Copier, CopyError, CopyPages, Memory};
use host_kernels::cuda::CudaCopier;

use super::{KvMemory, MemoryError, PageBuffer, Pool};

/// Why pages were not copied. Nothing was copied, except perhaps after an error of a device's driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageCopyError {
    /// The part lies outside of the buffer.
    #[error("a slot lies outside of its memory")]
    Outside,
    /// The buffer was made for a pool of another kind.
    #[error("host memory that the device cannot reach")]
    NotRegistered,
    /// The copy is refused.
    #[error(transparent)]
    Copy(#[from] CopyError),
}

/// Copies pages between one pool and host memory. Each thread that copies has a copier of its own.
pub struct PageCopier {
    pool: Pool,
    engine: Engine,
}

enum Engine {
    /// On the CPU.
    Cpu(Arc<Copier>),
    /// On the pool's device, in a stream of this copier's own.
    Device(CudaCopier),
}

/// The direction of a copy.
#[derive(Clone, Copy)]
enum Way {
    ToBuffer,
    ToPool,
}

impl KvMemory {
    /// A copier for this pool's pages. It copies with `cpu`, or on the device that the pool lies on.
    ///
    /// # Errors
    /// When a device's driver refuses.
    pub fn copier(&self, cpu: &Arc<Copier>) -> Result<PageCopier, MemoryError> {
        let engine = match &self.pool {
            Pool::Host(_) => Engine::Cpu(cpu.clone()),
            Pool::Device(pool) => Engine::Device(pool.copier()?),
        };
        Ok(PageCopier { pool: self.pool.clone(), engine })
    }
}

impl PageCopier {
    /// Copies pages of the pool to a part of a buffer, and returns when the copy is done. The copy's offsets count from the start
    /// of the pool and of the part.
    ///
    /// # Errors
    /// When anything lies outside of its memory, or a device's driver fails.
    ///
    /// # Safety
    /// Until it returns, nothing writes the bytes that are read, and nothing else touches the bytes that are written. In a worker
    /// the page accounting ensures this, as for [`KvMemory::share`].
    pub unsafe fn copy_out(
        &self,
        copy: &PagesCopy,
        buffer: &PageBuffer,
        part: Range<usize>,
    ) -> Result<(), PageCopyError> {
        // SAFETY: as the caller promises.
        unsafe { self.copy(copy, buffer, &part, Way::ToBuffer) }
    }

    /// Copies pages from a part of a buffer to the pool, and returns when the copy is done.
    ///
    /// # Errors
    /// As [`copy_out`](Self::copy_out).
    ///
    /// # Safety
    /// As [`copy_out`](Self::copy_out).
    pub unsafe fn copy_in(
        &self,
        copy: &PagesCopy,
        buffer: &PageBuffer,
        part: Range<usize>,
    ) -> Result<(), PageCopyError> {
        // SAFETY: as the caller promises.
        unsafe { self.copy(copy, buffer, &part, Way::ToPool) }
    }

    unsafe fn copy(
        &self,
        copy: &PagesCopy,
        buffer: &PageBuffer,
        part: &Range<usize>,
        way: Way,
    ) -> Result<(), PageCopyError> {
        let host = buffer.host_part(part).ok_or(PageCopyError::Outside)?;
        match (&self.pool, &self.engine) {
            (Pool::Host(memory), Engine::Cpu(copier)) => {
                let pool = Memory::new(memory.address().as_ptr(), memory.bytes());
                // SAFETY: pool and buffer are mapped as long as `self` and `buffer` are borrowed. The caller vouches for the rest.
                unsafe { run(&**copier, copy, pool, host, way) }
            }
            (Pool::Device(memory), Engine::Device(copier)) => {
                let buffer = buffer.device_part(part).ok_or(PageCopyError::NotRegistered)?;
                // SAFETY: the device's memory is the pool's, the buffer is registered, and both stay so until the stream was waited
                // for. The caller vouches for the rest.
                unsafe { run_and_wait(copier, copy, memory.as_memory(), buffer, way) }
            }
            _ => Err(PageCopyError::NotRegistered),
        }
    }
}

/// # Safety
/// As [`CopyPages::copy_memory`].
unsafe fn run_and_wait(
    copier: &CudaCopier,
    copy: &PagesCopy,
    pool: Memory,
    buffer: Memory,
    way: Way,
) -> Result<(), PageCopyError> {
    // SAFETY: as the caller promises.
    let ran = unsafe { run(copier, copy, pool, buffer, way) };
    // This also waits for launches before an error.
    copier.wait()?;
    ran
}

/// # Safety
/// As [`CopyPages::copy_memory`].
unsafe fn run(
    copier: &impl CopyPages,
    copy: &PagesCopy,
    pool: Memory,
    buffer: Memory,
    way: Way,
) -> Result<(), PageCopyError> {
    let blocks: Vec<kernels::PageBlock> = copy.blocks().iter().map(block).collect();
    let copy = kernels::PagesCopy { pages: copy.pages(), blocks: &blocks };
    let (source, target) = match way {
        Way::ToBuffer => (pool, buffer),
        Way::ToPool => (buffer, pool),
    };
    // SAFETY: as the caller promises.
    Ok(unsafe { copier.copy_memory(&copy, source, target) }?)
}

fn block(planned: &transfer::PageBlock) -> kernels::PageBlock {
    let dimension = |dimension: transfer::Dimension| kernels::Dimension {
        extent: dimension.extent,
        source: dimension.source,
        target: dimension.target,
    };
    kernels::PageBlock {
        run: planned.run,
        source: planned.source,
        target: planned.target,
        source_page: planned.source_page,
        target_page: planned.target_page,
        dims: planned.dims.map(dimension),
    }
}
