//! Launches kernels that may start before the preceding kernel has ended.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig};
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, DeviceRepr, sys};

use crate::cuda::device::function;
use crate::cuda::{CudaError, Device, refused};

/// A kernel of this folder.
///
/// Each kernel calls `griddepcontrol.wait`, where the device has it (compute capability 9.0), before it reads the output of the
/// preceding kernel. So its launch and its first instructions overlap the end of that kernel.
///
/// Products, norms, rotations and decode's attention let the next kernel start before they have waited themselves. A product
/// then loads weights while the kernels before it still run. So a kernel's first instructions may overlap several kernels. The other
/// kernels, which are `embed`, `copy_words`, prefill's attention and `argmax`, wait first: all kernels before them are done when
/// the next one starts.
#[derive(Debug)]
pub(super) struct Kernel {
    function: CudaFunction,
    name: &'static str,
    /// Whether the kernel itself waits for the preceding one.
    waits: bool,
    device: Arc<Device>,
}

/// Thread blocks, threads and shared memory of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    /// Thread blocks.
    pub(super) grid: [usize; 3],
    /// Threads of a thread block.
    pub(super) threads: u32,
    /// Bytes of shared memory of a thread block, besides what the kernel declares.
    pub(super) shared: u32,
}

/// A pointer to a value that a launch passes to the kernel.
pub(super) fn argument<T: DeviceRepr>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

impl Kernel {
    /// The kernel of this name, which may use `shared` bytes of shared memory besides what it declares.
    ///
    /// # Errors
    /// When the module has no such kernel, or the device does not have that much memory.
    pub(super) fn new(
        device: &Arc<Device>,
        module: &Arc<CudaModule>,
        name: &'static str,
        shared: u32,
    ) -> Result<Self, CudaError> {
        let function = function(module, name)?;
        if shared > 0 {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = i32::try_from(shared).unwrap_or(i32::MAX);
            function
                .set_attribute(attribute, bytes)
                .map_err(refused(format!("give {name} {bytes} bytes of shared memory")))?;
        }
        Ok(Self { function, name, waits: device.capability() >= 90, device: Arc::clone(device) })
    }

    /// Enqueues the kernel. Does nothing if the grid is empty.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Safety
    /// `arguments` point to the kernel's parameters, in their order and of their types. The kernel reads and writes only arrays
    /// that live until the stream has executed it.
    pub(super) unsafe fn launch(
        &self,
        stream: &CudaStream,
        geometry: Geometry,
        arguments: &[*mut c_void],
    ) -> Result<(), CudaError> {
        if geometry.grid.contains(&0) {
            return Ok(());
        }
        self.device.bind()?;
        let mut attribute = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        // The driver refuses a grid that is too large.
        let [x, y, z] = geometry.grid.map(|blocks| u32::try_from(blocks).unwrap_or(u32::MAX));
        let config = CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: geometry.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: geometry.shared,
            hStream: stream.cu_stream(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(self.waits),
        };
        // SAFETY: the context is bound, the function lives as long as this, and the driver copies the parameters, which the
        // caller vouches for.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function.cu_function(),
                arguments.as_ptr().cast_mut(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(refused(format!("launch {}", self.name)))
    }
}
