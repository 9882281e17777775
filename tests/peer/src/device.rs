//! Memory of a device, from NVIDIA's driver or, where there is no device, from its stand-in.

use std::ffi::{c_int, c_uint, c_void};

use host_plugin_api::{Address, Memory, MemoryKind};
use libloading::os::unix::Library;

/// Where a worker's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In host memory.
    Host,
    /// On the first device that the process has.
    Device,
}

/// Memory of the first device, given back on drop.
#[derive(Debug)]
pub struct DeviceMemory {
    /// Its first byte.
    pub address: Address,
    /// Its length.
    pub bytes: usize,
    driver: Library,
}

/// Offset of the memory in the driver's allocation, so that tests cover offsets.
const BEFORE: u64 = 512;

impl DeviceMemory {
    /// Allocates so many bytes.
    ///
    /// # Panics
    /// Without a driver and a device.
    pub fn new(bytes: usize) -> Self {
        let load = |name| {
            // SAFETY: the driver's initialisers are those that every CUDA program runs.
            unsafe { Library::open(Some(name), libloading::os::unix::RTLD_NOW) }
        };
        // The second name finds a library that a test has loaded by its path.
        let driver = load("libcuda.so.1").or_else(|_none| load("libcuda.so")).expect("a driver");
        let mut context: *mut c_void = std::ptr::null_mut();
        let mut address = 0u64;
        // SAFETY: the types are those of the functions in cuda.h, and each writes one value.
        unsafe {
            let init = driver.get::<unsafe extern "C" fn(c_uint) -> c_int>(b"cuInit").unwrap();
            let retain = b"cuDevicePrimaryCtxRetain";
            let retain =
                driver.get::<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int>(retain).unwrap();
            let set = driver.get::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuCtxSetCurrent").unwrap();
            let take =
                driver.get::<unsafe extern "C" fn(*mut u64, usize) -> c_int>(b"cuMemAlloc_v2").unwrap();
            assert_eq!(init(0), 0);
            assert_eq!(retain(&raw mut context, 0), 0);
            assert_eq!(set(context), 0);
            assert_eq!(take(&raw mut address, bytes + BEFORE as usize), 0);
        }
        Self { address: Address(address + BEFORE), bytes, driver }
    }

    /// Describes the memory for a registration.
    #[must_use]
    pub fn offer(&self, generation: u32) -> Memory {
        Memory {
            address: self.address,
            length: self.bytes as u64,
            kind: MemoryKind::VRAM,
            device: 0,
            fd: -1,
            generation,
            fd_offset: 0,
        }
    }

    /// Number of memories of other processes that this process has open, as the stand-in counts them.
    ///
    /// # Panics
    /// With NVIDIA's driver, which lacks this count.
    #[must_use]
    pub fn opened() -> usize {
        // SAFETY: a test has already loaded the library, and the function has no arguments.
        unsafe {
            let driver = Library::open(Some("libcuda.so"), libloading::os::unix::RTLD_NOW).unwrap();
            driver.get::<unsafe extern "C" fn() -> c_int>(b"fake_opened").unwrap()() as usize
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: the type is that of the function in cuda.h, and the driver returned the address. Memory that the test has not
        // deregistered is freed all the same, as when a host crashes.
        unsafe {
            let free = self.driver.get::<unsafe extern "C" fn(u64) -> c_int>(b"cuMemFree_v2").unwrap();
            assert_eq!(free(self.address.0 - BEFORE), 0);
        }
    }
}
