//! Host memory that a GPU reads and writes in place.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;

use super::device::Device;
use super::{CudaError, refused};
use crate::copy::Memory;

/// A range of host memory that is registered with the driver as long as this value lives.
///
/// Kernels read and write it over the bus by its address on the device. Its pages are pinned: they stay in RAM.
#[derive(Debug)]
pub struct Registered {
    base: NonNull<u8>,
    bytes: usize,
    address: u64,
    device: Arc<Device>,
}

// SAFETY: the value holds addresses that only unsafe functions follow, and their callers vouch for the memory. The driver
// takes calls from any thread.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers `bytes` bytes from `base`, which are a mapping or the first bytes of one.
    ///
    /// # Errors
    /// When the driver refuses: memory that cannot be pinned, or that is registered already.
    ///
    /// # Safety
    /// The range is mapped, and stays so as long as the value lives.
    pub unsafe fn new(device: &Arc<Device>, base: NonNull<u8>, bytes: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller keeps the range mapped until `drop` has unregistered it.
        unsafe { sys::cuMemHostRegister_v2(base.as_ptr().cast(), bytes, flags) }
            .result()
            .map_err(refused(format!("pin {bytes} bytes of host memory")))?;
        let mut registered = Self { base, bytes, address: 0, device: Arc::clone(device) };
        // SAFETY: the range was just registered so that a device can map it, and the call writes one address.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut registered.address, base.as_ptr().cast(), 0) }
            .result()
            .map_err(refused("map pinned host memory on the device"))?;
        Ok(registered)
    }

    /// The range as the device sees it.
    #[must_use]
    pub fn memory(&self) -> Memory {
        Memory::device(self.address, self.bytes)
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: this value registered the range. An error means that the device is lost, and does not change the memory.
            let _lost = unsafe { sys::cuMemHostUnregister(self.base.as_ptr().cast()) };
        }
    }
}
