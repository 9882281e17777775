//! A GPU, its memory, and the kernels that are compiled for it.

use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaFunction, CudaModule, CudaStream, DeviceRepr, sys};

use super::cache::Cache;
use super::nvrtc::{Image, Nvrtc};
use super::{CudaError, Source, context, refused};

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

    /// Opens the device with another folder for compiled kernels, or with none.
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

    /// Its number, as the driver counts devices.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// Its compute capability: 90 for 9.0.
    #[must_use]
    pub fn capability(&self) -> i32 {
        self.capability
    }

    /// The peak rate of the GPU's memory in bytes per second: two transfers per clock, over the whole width of its bus. 0 on the
    /// stand-in, which tells neither.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn memory_rate(&self) -> Result<f64, CudaError> {
        let tell = |attribute| {
            let value = self.context.attribute(attribute).map_err(refused("tell the rate of its memory"))?;
            Ok(f64::from(value))
        };
        let kilohertz = tell(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
        let bits = tell(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?;
        Ok(kilohertz * 1e3 * 2.0 * bits / 8.0)
    }

    /// A new stream. Its work is not ordered with the work of other streams.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn stream(&self) -> Result<Arc<CudaStream>, CudaError> {
        self.context.new_stream().map_err(refused("make a stream"))
    }

    /// Waits until everything in this stream of the device is done.
    ///
    /// # Errors
    /// When something in it failed.
    pub fn wait(&self, stream: &CudaStream) -> Result<(), CudaError> {
        self.bind()?;
        stream.synchronize().map_err(refused("wait for what the device does"))
    }

    /// Loads these kernels for the device. Compiles them unless the cache has them from this version of NVRTC.
    ///
    /// # Errors
    /// When there is no NVRTC, NVRTC refuses the source, or the driver refuses the compiled kernels.
    pub fn module(&self, source: &Source) -> Result<Arc<CudaModule>, CudaError> {
        let nvrtc = Nvrtc::open(self.nvrtc.as_deref())?;
        let entry = self.cache.entry(source, self.capability, nvrtc.version()?);
        // A cached image that this driver refuses is compiled again.
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

    /// Makes this thread use the device. The functions of this module call it themselves.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(refused("use the device"))
    }
}

/// Waits for a stream when it is dropped, also after a panic: kernels that were launched go on writing.
#[derive(Debug)]
pub struct WaitsFor {
    device: Arc<Device>,
    stream: Arc<CudaStream>,
    waited: bool,
}

impl WaitsFor {
    /// A guard for the work that is put into this stream of the device from now on.
    #[must_use]
    pub fn new(device: &Arc<Device>, stream: &Arc<CudaStream>) -> Self {
        Self { device: Arc::clone(device), stream: Arc::clone(stream), waited: false }
    }

    /// Waits now.
    ///
    /// # Errors
    /// When something in the stream failed.
    pub fn wait(mut self) -> Result<(), CudaError> {
        self.waited = true;
        self.device.wait(&self.stream)
    }
}

impl Drop for WaitsFor {
    fn drop(&mut self) {
        if !self.waited {
            // The next call reports a failure.
            let _failed = self.device.wait(&self.stream);
        }
    }
}

/// A place in a stream that the host can wait for.
#[derive(Debug)]
pub struct Mark(CudaEvent);

impl Mark {
    /// A mark behind all work that was put into the stream so far.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn behind(stream: &CudaStream) -> Result<Self, CudaError> {
        stream.record_event(None).map(Self).map_err(refused("mark a place in a stream"))
    }

    /// Waits until the stream has reached the mark.
    ///
    /// # Errors
    /// When a kernel or a copy before it failed.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.0.synchronize().map_err(refused("wait for the device"))
    }
}

/// A kernel of a module.
///
/// # Errors
/// When the module has no kernel of this name.
pub(super) fn function(module: &Arc<CudaModule>, name: &str) -> Result<CudaFunction, CudaError> {
    module.load_function(name).map_err(refused(format!("find the kernel {name}")))
}

/// Memory from the driver. It is freed when its last array is dropped.
#[derive(Debug)]
struct Allocation {
    address: u64,
    /// Whether this is pinned memory of the host. Otherwise it is memory of the device.
    host: bool,
    device: Arc<Device>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: no array has this memory any more, and both calls wait for everything that uses it. An error means that
            // the device is lost, with its memory.
            let _freed = unsafe {
                match self.host {
                    true => sys::cuMemFreeHost(self.address as usize as *mut _),
                    false => sys::cuMemFree_v2(self.address),
                }
            };
        }
    }
}

/// An array in pinned memory of the host. The device copies from and to it by itself, and kernels may read and write it in place.
#[derive(Debug)]
pub struct Pinned<T> {
    length: usize,
    memory: Arc<Allocation>,
    element: PhantomData<T>,
}

impl<T: DeviceRepr + Copy + Default> Pinned<T> {
    /// Allocates `length` elements (at least one), all of them the default.
    ///
    /// # Errors
    /// When the system has no such memory left.
    pub fn new(device: &Arc<Device>, length: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let length = length.max(1);
        let bytes = length.saturating_mul(size_of::<T>());
        let mut address = std::ptr::null_mut();
        // SAFETY: the context is bound. The call writes one address.
        unsafe { sys::cuMemHostAlloc(&raw mut address, bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) }
            .result()
            .map_err(refused(format!("give {bytes} bytes of pinned memory")))?;
        let memory =
            Arc::new(Allocation { address: address.addr() as u64, host: true, device: Arc::clone(device) });
        let pinned = Self { length, memory, element: PhantomData };
        for at in 0..length {
            // SAFETY: the memory has `length` elements, and the driver aligns it to pages.
            unsafe { pinned.first().add(at).write(T::default()) };
        }
        Ok(pinned)
    }

    /// The first element.
    fn first(&self) -> *mut T {
        self.memory.address as usize as *mut T
    }

    /// Makes the array at least `length` elements long. If it was shorter, its content is lost.
    ///
    /// # Errors
    /// As [`Pinned::new`].
    pub fn reserve(&mut self, length: usize) -> Result<(), CudaError> {
        if length > self.length {
            *self = Self::new(&self.memory.device, length.next_power_of_two())?;
        }
        Ok(())
    }

    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Always false: there is at least one element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The same memory as an array for kernels. It has the same address on the device as here, because drivers of 64-bit systems
    /// have one address space.
    #[must_use]
    pub fn array(&self) -> Array<T> {
        Array {
            address: self.memory.address,
            length: self.length,
            memory: Arc::clone(&self.memory),
            element: PhantomData,
        }
    }

    /// The elements.
    ///
    /// # Safety
    /// No kernel or copy that writes them is under way as long as the slice is alive.
    #[must_use]
    pub unsafe fn elements(&self) -> &[T] {
        // SAFETY: the memory has as many elements, all of them written. The caller keeps the device out.
        unsafe { std::slice::from_raw_parts(self.first(), self.length) }
    }

    /// The elements, to write.
    ///
    /// # Safety
    /// No kernel or copy that reads or writes them is under way as long as the slice is alive.
    pub unsafe fn elements_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and the value is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.first(), self.length) }
    }
}

/// An array in a device's memory. Its elements are undefined until they are written.
///
/// Kernels read and write it in the order of one stream. If two streams use the same array, or arrays that share elements
/// ([`Array::part`]), the caller keeps them apart.
#[derive(Debug)]
pub struct Array<T> {
    address: u64,
    length: usize,
    memory: Arc<Allocation>,
    element: PhantomData<fn() -> T>,
}

impl<T: DeviceRepr + Copy> Array<T> {
    /// Allocates `length` elements (at least one).
    ///
    /// # Errors
    /// When the device has no memory left.
    pub fn new(device: &Arc<Device>, length: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let length = length.max(1);
        let bytes = length.saturating_mul(size_of::<T>());
        let mut address = 0;
        // SAFETY: the context is bound. The call writes one address.
        unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) }
            .result()
            .map_err(refused(format!("give {bytes} bytes of the device's memory")))?;
        let memory = Arc::new(Allocation { address, host: false, device: Arc::clone(device) });
        Ok(Self { address, length, memory, element: PhantomData })
    }

    /// Some of the elements as an array of their own, which shares them with this one.
    ///
    /// # Panics
    /// When the array does not have all of these elements.
    #[must_use]
    pub fn part(&self, first: usize, length: usize) -> Self {
        assert!(first.checked_add(length).is_some_and(|end| end <= self.length), "outside of the array");
        let address = self.address + (first * size_of::<T>()) as u64;
        Self { address, length, memory: Arc::clone(&self.memory), element: PhantomData }
    }

    /// The same elements as elements of another type of the same size.
    #[must_use]
    pub fn cast<U: DeviceRepr + Copy>(&self) -> Array<U> {
        const { assert!(size_of::<T>() == size_of::<U>()) };
        let (address, length) = (self.address, self.length);
        Array { address, length, memory: Arc::clone(&self.memory), element: PhantomData }
    }

    /// Address on the device.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no elements, as a part may.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.memory.device
    }

    /// Makes the array at least `length` elements long. If it was shorter, its content is lost.
    ///
    /// # Errors
    /// As [`Array::new`].
    pub fn reserve(&mut self, length: usize) -> Result<(), CudaError> {
        if length > self.length {
            *self = Self::new(&self.memory.device, length.next_power_of_two())?;
        }
        Ok(())
    }

    /// Makes all bytes 0, in the stream's order.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn zero(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        self.device().bind()?;
        // SAFETY: the array has as many bytes.
        unsafe { sys::cuMemsetD8Async(self.address, 0, self.length * size_of::<T>(), stream.cu_stream()) }
            .result()
            .map_err(refused("clear memory of the device"))
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
        self.device().bind()?;
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

    /// Copies the first elements of another array, of the device or pinned, in the stream's order.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Panics
    /// When either array is shorter.
    pub fn copy_from(
        &mut self,
        stream: &CudaStream,
        source: &Array<T>,
        length: usize,
    ) -> Result<(), CudaError> {
        assert!(length <= self.length && length <= source.length, "{length} elements into {}", self.length);
        self.device().bind()?;
        let bytes = length * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both arrays have `length` elements. Their memory lives until the stream has done the copy: freeing it waits.
        unsafe { sys::cuMemcpyAsync(self.address, source.address, bytes, stream.cu_stream()) }
            .result()
            .map_err(refused("copy between arrays"))
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
        self.device().bind()?;
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
