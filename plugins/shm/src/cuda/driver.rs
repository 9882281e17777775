//! The functions of NVIDIA's driver that the plugin calls.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// An answer of the driver other than success, with what the driver was asked to do.
#[derive(Clone, Debug)]
pub struct Refused {
    /// The driver's number, or 0 where it was not asked.
    pub code: c_int,
    text: String,
}

impl Refused {
    /// An error without a number of the driver's.
    pub fn new(text: impl Into<String>) -> Self {
        Self { code: 0, text: text.into() }
    }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// Names an allocation to other processes of the machine.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcHandle(pub [u8; 64]);

/// A device's name that is the same in every process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uuid(pub [u8; 16]);

impl std::fmt::Display for Uuid {
    /// As `nvidia-smi -L` writes it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GPU")?;
        let mut bytes = self.0.iter();
        for group in [4, 2, 2, 2, 6] {
            f.write_str("-")?;
            for byte in bytes.by_ref().take(group) {
                write!(f, "{byte:02x}")?;
            }
        }
        Ok(())
    }
}

/// A pointer of the driver's own: a context, stream, event, module or function.
pub type Object = *mut c_void;

/// Answers of the driver that the plugin distinguishes.
pub const NOT_READY: c_int = 600;
pub const INVALID_CONTEXT: c_int = 201;
pub const PEER_ACCESS_ALREADY_ENABLED: c_int = 704;
pub const HOST_MEMORY_ALREADY_REGISTERED: c_int = 712;

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) = $symbol:literal;)*) => {
        /// The functions, each under the driver's name for it.
        #[allow(non_snake_case)]
        pub struct Driver {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            /// Kept as long as the process lives: the driver must not be unloaded.
            _library: std::mem::ManuallyDrop<Library>,
        }

        impl Driver {
            fn of(library: Library) -> Result<Self, Refused> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is that of the function in cuda.h.
                        *unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> c_int>($symbol) }.map_err(|_missing| {
                            let name = String::from_utf8_lossy($symbol);
                            Refused::new(format!("NVIDIA's driver is too old, it has no {name}"))
                        })?
                    },)*
                    _library: std::mem::ManuallyDrop::new(library),
                })
            }
        }
    };
}

functions! {
    cuInit: fn(c_uint) = b"cuInit";
    cuGetErrorString: fn(c_int, *mut *const c_char) = b"cuGetErrorString";
    cuDeviceGetCount: fn(*mut c_int) = b"cuDeviceGetCount";
    cuDeviceGet: fn(*mut c_int, c_int) = b"cuDeviceGet";
    cuDeviceGetUuid: fn(*mut Uuid, c_int) = b"cuDeviceGetUuid_v2";
    cuDeviceCanAccessPeer: fn(*mut c_int, c_int, c_int) = b"cuDeviceCanAccessPeer";
    cuDevicePrimaryCtxRetain: fn(*mut Object, c_int) = b"cuDevicePrimaryCtxRetain";
    cuDevicePrimaryCtxRelease: fn(c_int) = b"cuDevicePrimaryCtxRelease_v2";
    cuCtxPushCurrent: fn(Object) = b"cuCtxPushCurrent_v2";
    cuCtxPopCurrent: fn(*mut Object) = b"cuCtxPopCurrent_v2";
    cuCtxEnablePeerAccess: fn(Object, c_uint) = b"cuCtxEnablePeerAccess";
    cuPointerGetAttribute: fn(*mut c_void, c_int, u64) = b"cuPointerGetAttribute";
    cuMemGetAddressRange: fn(*mut u64, *mut usize, u64) = b"cuMemGetAddressRange_v2";
    cuIpcGetMemHandle: fn(*mut IpcHandle, u64) = b"cuIpcGetMemHandle";
    cuIpcOpenMemHandle: fn(*mut u64, IpcHandle, c_uint) = b"cuIpcOpenMemHandle_v2";
    cuIpcCloseMemHandle: fn(u64) = b"cuIpcCloseMemHandle";
    cuMemHostRegister: fn(*mut c_void, usize, c_uint) = b"cuMemHostRegister_v2";
    cuMemHostUnregister: fn(*mut c_void) = b"cuMemHostUnregister";
    cuMemHostAlloc: fn(*mut *mut c_void, usize, c_uint) = b"cuMemHostAlloc";
    cuMemFreeHost: fn(*mut c_void) = b"cuMemFreeHost";
    cuStreamCreate: fn(*mut Object, c_uint) = b"cuStreamCreate";
    cuStreamDestroy: fn(Object) = b"cuStreamDestroy_v2";
    cuEventCreate: fn(*mut Object, c_uint) = b"cuEventCreate";
    cuEventDestroy: fn(Object) = b"cuEventDestroy_v2";
    cuEventRecord: fn(Object, Object) = b"cuEventRecord";
    cuEventQuery: fn(Object) = b"cuEventQuery";
    cuMemcpyAsync: fn(u64, u64, usize, Object) = b"cuMemcpyAsync";
    cuModuleLoadData: fn(*mut Object, *const c_void) = b"cuModuleLoadData";
    cuModuleUnload: fn(Object) = b"cuModuleUnload";
    cuModuleGetFunction: fn(*mut Object, Object, *const c_char) = b"cuModuleGetFunction";
    cuLaunchKernel: fn(Object, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Object, *mut *mut c_void, *mut *mut c_void)
        = b"cuLaunchKernel";
}

/// The library's own name first. The other is a link to it in developers' packages.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

impl Driver {
    /// The process's driver, loaded and initialised at the first call.
    ///
    /// # Errors
    /// When there is none, it is too old, or it has no device.
    pub fn get() -> Result<&'static Self, Refused> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        // Several threads may load it at once. The loader counts that, and the library stays.
        let driver = Self::load()?;
        Ok(DRIVER.get_or_init(|| driver))
    }

    fn load() -> Result<Self, Refused> {
        // First the library that the process has loaded already, because the memory belongs to that one.
        const RTLD_NOLOAD: c_int = 4;
        let mut why = String::new();
        let tries = [RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL];
        let found = tries.into_iter().find_map(|flags| {
            NAMES.into_iter().find_map(|name| {
                // SAFETY: the driver's initialisers are those that every CUDA program runs.
                match unsafe { Library::open(Some(name), flags) } {
                    Ok(library) => Some(library),
                    Err(error) => {
                        why = error.to_string();
                        None
                    }
                }
            })
        });
        let library = found.ok_or_else(|| Refused::new(format!("there is no driver of NVIDIA's: {why}")))?;
        let driver = Self::of(library)?;
        // SAFETY: the first call, with the only flags there are.
        let started = unsafe { (driver.cuInit)(0) };
        driver.check(started, "start NVIDIA's driver")?;
        Ok(driver)
    }

    /// Turns an answer other than success into an error.
    pub fn check(&self, code: c_int, what: &str) -> Result<(), Refused> {
        if code == 0 {
            return Ok(());
        }
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: it writes one pointer.
        let known = unsafe { (self.cuGetErrorString)(code, &raw mut text) } == 0 && !text.is_null();
        let text = match known {
            // SAFETY: the driver's texts end with a zero, and stay.
            true => unsafe { CStr::from_ptr(text) }.to_string_lossy(),
            false => "an unknown error".into(),
        };
        Err(Refused { code, text: format!("cannot {what}: {text} (CUDA error {code})") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_writes_it() {
        let bytes = std::array::from_fn(|at| at as u8 * 17);
        assert_eq!(Uuid(bytes).to_string(), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
