//! Page copies in a GPU's memory, by NVIDIA's driver: the same copies as [`crate::copy::Copier`]'s, ordered in a stream.
//!
//! Nothing of CUDA is needed to build this. When [`CudaKernels::load`] is called it looks for the driver
//! (`libcuda.so.1`) and for NVRTC, NVIDIA's run-time compiler, and compiles the kernels in `page_copy.cu` for the device.
//! Where either is missing it says so, and the rest of the program goes on.
//!
//! A copy enqueues one launch for every few hundred pages of each block and returns. It allocates nothing, uploads
//! nothing and waits for nothing. The kernel moves 16 bytes at a time where rows, strides and addresses of both sides are
//! multiples of that, and 8, 4, 2 or 1 where they are not.

mod cache;
mod device;
pub mod digest;
pub mod exact;
mod launch;
mod nvrtc;

use std::path::Path;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg, sys};

use crate::copy::{CopyError, CopyPages, Memory, PagesCopy, plan};
use device::function;
pub use device::{Array, Device, Source};
use launch::{Width, launches};
pub use nvrtc::{Architecture, Image, Nvrtc};

/// The source of the kernels.
pub const SOURCE: &str = include_str!("cuda/page_copy.cu");

/// The driver interface that this is written against: 12.0.
const OLDEST_DRIVER: i32 = 12_000;

/// Why there are no kernels on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The driver's library is not there.
    #[error("no CUDA driver: libcuda.so.1 cannot be loaded; install NVIDIA's driver, or do without the GPU")]
    NoDriver,
    /// The driver is too old for what is called.
    #[error("the CUDA driver supports CUDA {}.{}, and 12.0 is needed: install driver 525 or newer", .0 / 1000, .0 % 1000 / 10)]
    OldDriver(i32),
    /// The driver refuses.
    #[error("the CUDA driver cannot {what}: {reason}")]
    Driver {
        /// The requested operation.
        what: String,
        /// What it said.
        reason: String,
    },
    /// The run-time compiler is not there.
    #[error("no NVRTC: none of {} can be loaded; install NVIDIA's nvidia-cuda-nvrtc and name its folder", .0.join(", "))]
    NoNvrtc(Vec<String>),
    /// The run-time compiler refuses.
    #[error("NVRTC cannot {what}: {reason}")]
    Nvrtc {
        /// The requested operation.
        what: &'static str,
        /// What it said, with its log.
        reason: String,
    },
}

fn refused(what: impl Into<String>) -> impl FnOnce(DriverError) -> CudaError {
    let what = what.into();
    move |error| CudaError::Driver { what, reason: format!("{error:?}") }
}

/// The kernels on one device, in its primary context.
pub struct CudaKernels {
    context: Arc<CudaContext>,
    /// By the logarithm of the bytes that they move at a time.
    functions: [CudaFunction; Width::ALL.len()],
}

impl CudaKernels {
    /// Compiles and loads the kernels for the device with this number. `nvrtc` names NVRTC's library or a folder with it
    /// (as [`Nvrtc::open`]).
    ///
    /// # Errors
    /// When there is no driver, no such device or no NVRTC, or when one of them refuses.
    pub fn load(device: usize, nvrtc: Option<&Path>) -> Result<Self, CudaError> {
        let device = Device::open(device, nvrtc)?;
        let module = device.module(&Source { name: "page_copy.cu", text: SOURCE, options: &[] })?;
        let [a, b, c, d, e] = Width::ALL.map(|width| function(&module, width.kernel()));
        Ok(Self { functions: [a?, b?, c?, d?, e?], context: Arc::clone(device.context()) })
    }

    /// The device's context.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// These kernels in this stream, which must be of the same context.
    #[must_use]
    pub fn on(self: &Arc<Self>, stream: Arc<CudaStream>) -> CudaCopier {
        CudaCopier { kernels: Arc::clone(self), stream }
    }
}

/// The device's primary context, once it is certain that asking for it cannot panic.
fn context(device: usize) -> Result<Arc<CudaContext>, CudaError> {
    // SAFETY: it loads the library and runs its initialisers, which is what a driver is installed for.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the library is there, every version of it has this function, and it writes one number.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(refused("tell its version"))?;
    if version < OLDEST_DRIVER {
        return Err(CudaError::OldDriver(version));
    }
    CudaContext::new(device).map_err(refused(format!("open device {device}")))
}

/// Copies pages of a device's memory, in one stream.
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
}

impl CopyPages for CudaCopier {
    /// As [`CopyPages::copy_memory`] says, with [`Memory::device`] memories of this copier's device. The copy is done when
    /// the stream has come to it. An error of the driver in between may leave it half done.
    unsafe fn copy_memory(
        &self,
        copy: &PagesCopy<'_>,
        source: Memory,
        target: Memory,
    ) -> Result<(), CopyError> {
        let strips = plan(copy, source, target)?;
        // All of them first: what cannot be launched is refused before anything is.
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
