//! Memory of a device, as a host has it: of the stand-in for NVIDIA's driver, where there is no device.

use std::ffi::{c_int, c_uint, c_void};

use host_plugin_api::{Address, Memory, MemoryKind};
use libloading::os::unix::Library;

/// Where a worker's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the host.
    Host,
    /// On the first device that the process has.
    Device,
}

/// Memory of the first device, given back on drop.
#[derive(Debug)]
pub struct DeviceMemory {
    /// Its first byte.
    pub address: Address,
    /// How long it is.
    pub bytes: usize,
    driver: Library,
}

/// Bytes between the start of what the driver gave and the memory, so that the offset counts.
const BEFORE: u64 = 512;

impl DeviceMemory {
    /// Takes so many bytes.
    ///
    /// # Panics
    /// Without a driver and a device.
    pub fn new(bytes: usize) -> Self {
        let load = |name| {
            // SAFETY: the driver's initialisers are those that every CUDA program runs.
            unsafe { Library::open(Some(name), libloading::os::unix::RTLD_NOW) }
        };
        // What a test has loaded by its path is found by the second name.
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

    /// The memory, to be registered.
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

    /// How much memory of other processes this one has open, on the stand-in.
    ///
    /// # Panics
    /// With NVIDIA's driver.
    #[must_use]
    pub fn opened() -> usize {
        // SAFETY: what a test has loaded already, and a function of no arguments.
        unsafe {
            let driver = Library::open(Some("libcuda.so"), libloading::os::unix::RTLD_NOW).unwrap();
            driver.get::<unsafe extern "C" fn() -> c_int>(b"fake_opened").unwrap()() as usize
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: the type is that of the function in cuda.h, and the memory was given by it. What the test does not
        // deregister before is freed all the same, as by a host that crashes.
        unsafe {
            let free = self.driver.get::<unsafe extern "C" fn(u64) -> c_int>(b"cuMemFree_v2").unwrap();
            assert_eq!(free(self.address.0 - BEFORE), 0);
        }
    }
}
