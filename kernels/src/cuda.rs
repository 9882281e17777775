//! Page copies in a GPU's memory, through NVIDIA's driver: the same copies as [`crate::copy::Copier`]'s, ordered in a stream.
//!
//! The build needs nothing of CUDA. [`Device::open`] looks for the driver (`libcuda.so.1`), and [`CudaKernels::load`]
//! for NVRTC, NVIDIA's run-time compiler, with which it compiles the kernels in `page_copy.cu` for the device.
//! If either is missing, the call returns an error, and the rest of the program can go on.
//!
//! A copy enqueues one launch for every few hundred pages of each block and returns. It allocates no memory on the device,
//! uploads nothing and does not wait. The kernel moves 16 bytes at a time if rows, strides and addresses of both sides are
//! multiples of 16 bytes, and otherwise 8, 4, 2 or 1.

pub mod batch;
mod cache;
mod device;
pub mod digest;
pub mod exact;
mod graph;
mod launch;
mod nvrtc;
mod registered;
mod source;
pub mod tensor;

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, DriverError, LaunchConfig, PushKernelArg, result, sys};

use crate::copy::{CopyError, CopyPages, Memory, PagesCopy, plan};
pub use cudarc::driver::CudaStream;
use device::function;
pub use device::{Array, Device, Mark, Pinned, WaitsFor};
pub use graph::Graph;
use launch::{Width, launches};
pub use nvrtc::{Architecture, Image, Nvrtc};
pub use registered::Registered;
pub use source::Source;

/// The source of the kernels.
pub const SOURCE: &str = include_str!("cuda/page_copy.cu");
/// The source of the kernels, with the compiler's options.
const PAGE_COPY: Source = Source { name: "page_copy.cu", text: SOURCE, options: &[] };

/// The oldest driver interface that has all functions used here: 12.0.
const OLDEST_DRIVER: i32 = 12_000;

/// Why there are no kernels on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The driver's library is not there.
    #[error("no CUDA driver: libcuda.so.1 cannot be loaded; install NVIDIA's driver, or do without the GPU")]
    NoDriver,
    /// The driver is too old for the functions that are called.
    #[error("the CUDA driver supports CUDA {}.{}, and 12.0 is needed: install driver 525 or newer", .0 / 1000, .0 % 1000 / 10)]
    OldDriver(i32),
    /// The driver refuses an operation.
    #[error("the CUDA driver cannot {what}: {reason}")]
    Driver {
        /// The requested operation.
        what: String,
        /// The driver's answer.
        reason: String,
    },
    /// This process cannot use the device any more.
    #[error("the GPU is lost for this process, which could not {what}: {reason}; it must be started again")]
    Lost {
        /// The requested operation.
        what: String,
        /// The answer of the driver.
        reason: String,
    },
    /// The device lacks instructions that the kernels need.
    #[error("{what} need a GPU of compute capability {needed:?}, and this one has {found}")]
    Capability {
        /// The kernels.
        what: &'static str,
        /// Compute capabilities that have the instructions: 90 for 9.0.
        needed: &'static [i32],
        /// The device's compute capability.
        found: i32,
    },
    /// The run-time compiler is not there.
    #[error("no NVRTC: none of {} can be loaded; install NVIDIA's nvidia-cuda-nvrtc and name its folder", .0.join(", "))]
    NoNvrtc(Vec<String>),
    /// The run-time compiler refuses an operation.
    #[error("NVRTC cannot {what}: {reason}")]
    Nvrtc {
        /// The requested operation.
        what: &'static str,
        /// The compiler's answer, with its log.
        reason: String,
    },
}

fn refused(what: impl Into<String>) -> impl FnOnce(DriverError) -> CudaError {
    let what = what.into();
    move |error| {
        let reason = format!("{error:?}");
        if is_lost(error.0) { CudaError::Lost { what, reason } } else { CudaError::Driver { what, reason } }
    }
}

/// Whether an error is permanent: after it, every call of this process fails, and the process cannot trust its memory on the
/// device. NVIDIA's documentation says so of each of these codes ("leaves the process in an inconsistent state"), or the device
/// itself is gone.
fn is_lost(code: sys::CUresult) -> bool {
    use sys::CUresult as R;
    matches!(
        code,
        R::CUDA_ERROR_ECC_UNCORRECTABLE
            | R::CUDA_ERROR_ASSERT
            | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | R::CUDA_ERROR_DEINITIALIZED
            | R::CUDA_ERROR_EXTERNAL_DEVICE
            | R::CUDA_ERROR_HARDWARE_STACK_ERROR
            | R::CUDA_ERROR_ILLEGAL_ADDRESS
            | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | R::CUDA_ERROR_INVALID_PC
            | R::CUDA_ERROR_LAUNCH_FAILED
            | R::CUDA_ERROR_LAUNCH_TIMEOUT
            | R::CUDA_ERROR_MISALIGNED_ADDRESS
            | R::CUDA_ERROR_SYSTEM_NOT_READY
            | R::CUDA_ERROR_UNKNOWN
    )
}

/// The kernels on one device, in its primary context.
#[derive(Debug)]
pub struct CudaKernels {
    device: Arc<Device>,
    /// Indexed by the logarithm of the bytes that a kernel moves at a time.
    functions: [CudaFunction; Width::ALL.len()],
}

impl CudaKernels {
    /// Compiles and loads the kernels for this device.
    ///
    /// # Errors
    /// When there is no NVRTC, or when it or the driver refuses.
    pub fn load(device: &Arc<Device>) -> Result<Self, CudaError> {
        let module = device.module(&PAGE_COPY)?;
        let [a, b, c, d, e] = Width::ALL.map(|width| function(&module, width.kernel()));
        Ok(Self { functions: [a?, b?, c?, d?, e?], device: Arc::clone(device) })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The device's context.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        self.device.context()
    }

    /// These kernels in this stream, which must be of the same context.
    #[must_use]
    pub fn on(self: &Arc<Self>, stream: Arc<CudaStream>) -> CudaCopier {
        CudaCopier { kernels: Arc::clone(self), stream }
    }
}

/// The device's primary context. Checks first that asking for it cannot panic.
fn context(device: usize) -> Result<Arc<CudaContext>, CudaError> {
    driver()?;
    CudaContext::new(device).map_err(refused(format!("open device {device}")))
}

/// Loads the driver, and checks that calling it cannot panic.
fn driver() -> Result<(), CudaError> {
    // SAFETY: it loads the library and runs its initialisers. The driver is installed for that purpose.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the library is there, every version of it has this function, and it writes one number.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(refused("tell its version"))?;
    if version < OLDEST_DRIVER { Err(CudaError::OldDriver(version)) } else { Ok(()) }
}

/// Bytes of the memory of the device with this number. Allocates none of it.
///
/// # Errors
/// When there is no driver, it is too old, or there is no such device.
pub fn total_memory(device: usize) -> Result<usize, CudaError> {
    driver()?;
    let ordinal = i32::try_from(device).unwrap_or(i32::MAX);
    let total = || {
        result::init()?;
        let found = result::device::get(ordinal)?;
        // SAFETY: the driver has just said that this is a device.
        unsafe { result::device::total_mem(found) }
    };
    total().map_err(refused(format!("open device {device}")))
}

/// Copies pages of a device's memory, in one stream.
#[derive(Debug)]
pub struct CudaCopier {
    kernels: Arc<CudaKernels>,
    stream: Arc<CudaStream>,
}

impl CudaCopier {
    /// The stream that the copies are ordered in.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Waits until every copy so far is done.
    ///
    /// # Errors
    /// When the driver says that one of them failed.
    pub fn wait(&self) -> Result<(), CopyError> {
        self.kernels.device.wait(&self.stream).map_err(|error| CopyError::Device(error.to_string()))
    }
}

impl CopyPages for CudaCopier {
    /// As [`CopyPages::copy_memory`] says, with [`Memory::device`] memories of this copier's device. The copy is done when
    /// the stream has executed it. An error of the driver between two launches leaves it partly done.
    unsafe fn copy_memory(
        &self,
        copy: &PagesCopy<'_>,
        source: Memory,
        target: Memory,
    ) -> Result<(), CopyError> {
        let strips = plan(copy, source, target)?;
        // All launches are prepared first, so that a copy that cannot be launched is refused before the first launch.
        let all: Result<Vec<_>, _> =
            strips.iter().map(|strip| launches(strip, copy.pages, source, target)).collect();
        for launches in all? {
            for launch in launches {
                let config = LaunchConfig {
                    grid_dim: (launch.blocks, 1, 1),
                    block_dim: (launch::THREADS, 1, 1),
                    shared_mem_bytes: 0,
                };
                let function = &self.kernels.functions[launch.width as usize];
                let mut builder = self.stream.launch_builder(function);
                builder.arg(&*launch.copy);
                // SAFETY: the kernel takes one `PageCopy`, and touches only rows that the plan found inside both memories.
                // The caller vouches for the memories.
                unsafe { builder.launch(config) }
                    .map_err(|error| CopyError::Device(refused("launch a page copy")(error).to_string()))?;
            }
        }
        Ok(())
    }
}
