//! A GPU, its memory, and the kernels that are compiled for it.

use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DeviceRepr, sys};

use super::cache::Cache;
use super::nvrtc::{Image, Nvrtc};
use super::{CudaError, context, refused};

/// CUDA C++ and how it is compiled.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Its file's name, for messages and for the cache of compiled kernels.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
    /// Options of NVRTC besides the architecture, such as `--fmad=false`.
    pub options: &'static [&'static str],
}

/// One GPU, in its primary context.
#[derive(Debug)]
pub struct Device {
    context: Arc<CudaContext>,
    capability: i32,
    nvrtc: Option<PathBuf>,
    cache: Cache,
}

impl Device {
    /// Opens the device with this number. `nvrtc` names NVRTC's library or a folder with it (as [`Nvrtc::open`]). Compiled
    /// kernels are kept in `host/kernels` in the user's cache directory.
    ///
    /// # Errors
    /// When there is no driver, it is too old, or there is no such device.
    pub fn open(ordinal: usize, nvrtc: Option<&Path>) -> Result<Arc<Self>, CudaError> {
        Self::with(ordinal, nvrtc, Cache::of_user())
    }

    /// The same with another folder for compiled kernels, or none.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with_cache(
        ordinal: usize,
        nvrtc: Option<&Path>,
        folder: Option<&Path>,
    ) -> Result<Arc<Self>, CudaError> {
        Self::with(ordinal, nvrtc, Cache::at(folder))
    }

    fn with(ordinal: usize, nvrtc: Option<&Path>, cache: Cache) -> Result<Arc<Self>, CudaError> {
        let context = context(ordinal)?;
        let (major, minor) = context.compute_capability().map_err(refused("tell the device's capability"))?;
        let (capability, nvrtc) = (major * 10 + minor, nvrtc.map(Path::to_owned));
        Ok(Arc::new(Self { context, capability, nvrtc, cache }))
    }

    /// The device's context.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Its compute capability: 90 for 9.0.
    #[must_use]
    pub fn capability(&self) -> i32 {
        self.capability
    }

    /// A new stream, whose work is in no order with that of other streams.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn stream(&self) -> Result<Arc<CudaStream>, CudaError> {
        self.context.new_stream().map_err(refused("make a stream"))
    }

    /// Compiles these kernels for the device, unless this NVRTC did so before, and loads them.
    ///
    /// # Errors
    /// When there is no NVRTC, it refuses the source, or the driver refuses what it made.
    pub fn module(&self, source: &Source) -> Result<Arc<CudaModule>, CudaError> {
        let nvrtc = Nvrtc::open(self.nvrtc.as_deref())?;
        let entry = self.cache.entry(source, self.capability, nvrtc.version()?);
        // What this driver does not take is compiled anew.
        if let Some(module) = entry.read().and_then(|image| self.load(source, image).ok()) {
            return Ok(module);
        }
        let image = nvrtc.compile_with(source.text, source.options, self.capability)?;
        entry.write(&image);
        self.load(source, image)
    }

    fn load(&self, source: &Source, image: Image) -> Result<Arc<CudaModule>, CudaError> {
        let module = match image {
            Image::Binary(binary) => cudarc::nvrtc::Ptx::from_binary(binary),
            Image::Assembly(text) => cudarc::nvrtc::Ptx::from_src(text),
        };
        self.context.load_module(module).map_err(refused(format!("load the kernels of {}", source.name)))
    }

    /// Makes this thread use the device. Every function here does so itself.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(refused("use the device"))
    }
}

/// A kernel of a module.
///
/// # Errors
/// When it has none of this name.
pub(super) fn function(module: &Arc<CudaModule>, name: &str) -> Result<CudaFunction, CudaError> {
    module.load_function(name).map_err(refused(format!("find the kernel {name}")))
}

/// An array in a device's memory. Its elements are undefined until they are written.
///
/// Kernels read and write it in the order of one stream. Two streams that use the same array are kept apart by the caller.
#[derive(Debug)]
pub struct Array<T> {
    address: u64,
    length: usize,
    device: Arc<Device>,
    element: PhantomData<T>,
}

// SAFETY: an address that only the driver follows, and a context that any thread may use.
unsafe impl<T: Send> Send for Array<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Array<T> {}

impl<T: DeviceRepr + Copy> Array<T> {
    /// Takes memory for `length` elements (at least one).
    ///
    /// # Errors
    /// When the device has none left.
    pub fn new(device: &Arc<Device>, length: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let length = length.max(1);
        let bytes = length.saturating_mul(size_of::<T>());
        let mut address = 0;
        // SAFETY: the context is bound. It writes one address.
        unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) }
            .result()
            .map_err(refused(format!("give {bytes} bytes of the device's memory")))?;
        Ok(Self { address, length, device: Arc::clone(device), element: PhantomData })
    }

    /// Address on the device.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Never: there is at least one element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Makes the array as long as `length`, if it is shorter. What it held is lost then.
    ///
    /// # Errors
    /// As [`Array::new`].
    pub fn reserve(&mut self, length: usize) -> Result<(), CudaError> {
        if length > self.length {
            *self = Self::new(&self.device, length.next_power_of_two())?;
        }
        Ok(())
    }

    /// Writes `source` to the array's first elements, and waits until `source` is not needed any more.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Panics
    /// When the array is shorter.
    pub fn upload(&mut self, stream: &CudaStream, source: &[T]) -> Result<(), CudaError> {
        assert!(source.len() <= self.length, "{} elements into {}", source.len(), self.length);
        self.device.bind()?;
        let bytes = size_of_val(source);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the target has room, and the source lives until the stream is waited for.
        unsafe { sys::cuMemcpyHtoDAsync_v2(self.address, source.as_ptr().cast(), bytes, stream.cu_stream()) }
            .result()
            .map_err(refused("copy to the device"))?;
        stream.synchronize().map_err(refused("wait for a copy to the device"))
    }

    /// Reads the array's first elements, and waits until they are there.
    ///
    /// # Errors
    /// When the driver refuses, or a kernel before it failed.
    ///
    /// # Panics
    /// When the array is shorter.
    pub fn download(&self, stream: &CudaStream, target: &mut [T]) -> Result<(), CudaError> {
        assert!(target.len() <= self.length, "{} elements out of {}", target.len(), self.length);
        self.device.bind()?;
        let bytes = size_of_val(target);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the source has as many bytes, and the target lives until the stream is waited for.
        unsafe {
            sys::cuMemcpyDtoHAsync_v2(target.as_mut_ptr().cast(), self.address, bytes, stream.cu_stream())
        }
        .result()
        .map_err(refused("copy from the device"))?;
        stream.synchronize().map_err(refused("wait for a copy from the device"))
    }
}

impl<T> Drop for Array<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the memory is this array's, and the call waits for everything that uses it. An error means that the
            // device is lost, with its memory.
            let _freed = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}
