//! NVIDIA's run-time compiler, loaded from the place where it is installed.
//!
//! cudarc does not load it, because cudarc looks for it by name only, once per process, and panics if it is missing. The
//! functions that are used here are the same in CUDA 12 and 13.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;

use super::CudaError;

/// The target of a compilation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Machine code of the devices with this compute capability (90 for 9.0).
    Binary(i32),
    /// Assembly that the driver compiles for devices from this compute capability on.
    Assembly(i32),
}

/// Compiled kernels.
pub enum Image {
    /// Machine code.
    Binary(Vec<u8>),
    /// PTX.
    Assembly(String),
}

type Program = *mut c_void;
type Get<T> = unsafe extern "C" fn(Program, *mut T) -> c_int;

/// The compiler.
#[derive(Debug)]
pub struct Nvrtc {
    library: Library,
    path: PathBuf,
}

/// Where NVIDIA's packages put the library, inside a folder that the operator names.
const FOLDERS: [&str; 6] = ["", "lib64", "lib", "nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "cuda_nvrtc/lib"];
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

impl Nvrtc {
    /// Loads the library at `path`. If `path` is a folder, looks where NVIDIA's packages put the library in it. Without a path,
    /// looks where the system's loader looks, and where CUDA's installer puts it.
    ///
    /// # Errors
    /// When no library can be loaded. The error names all that was tried.
    pub fn open(path: Option<&Path>) -> Result<Self, CudaError> {
        let candidates: Vec<PathBuf> = match path {
            Some(folder) if folder.is_dir() => {
                let place = |inner| NAMES.iter().map(move |name| folder.join(inner).join(name));
                FOLDERS.into_iter().flat_map(place).filter(|path| path.is_file()).collect()
            }
            Some(file) => vec![file.to_owned()],
            None => {
                let installed = NAMES.map(|name| Path::new("/usr/local/cuda/lib64").join(name));
                NAMES.map(PathBuf::from).into_iter().chain(installed).collect()
            }
        };
        let mut tried = Vec::new();
        for path in candidates {
            // SAFETY: it runs the library's initialisers. Another library than NVRTC leads to an error at the first function
            // that it lacks.
            match unsafe { Library::new(&path) } {
                Ok(library) => return Ok(Self { library, path }),
                Err(error) => {
                    let reason =
                        std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string);
                    tried.push(format!("{} ({reason})", path.display()));
                }
            }
        }
        if let (Some(folder), true) = (path, tried.is_empty()) {
            tried.push(format!("{} in {}", NAMES.join(" or "), folder.display()));
        }
        Err(CudaError::NoNvrtc(tried))
    }

    /// The path at which it was found.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version: 12 and 9 for CUDA 12.9.
    ///
    /// # Errors
    /// When the library is not NVRTC.
    pub fn version(&self) -> Result<(i32, i32), CudaError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the signature of `nvrtcVersion`.
        let call: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
            unsafe { self.get(c"nvrtcVersion")? };
        // SAFETY: it writes the two numbers.
        self.check("tell its version", unsafe { call(&mut major, &mut minor) })?;
        Ok((major, minor))
    }

    /// Compute capabilities that it can compile for, ascending.
    ///
    /// # Errors
    /// When the library is not NVRTC.
    pub fn capabilities(&self) -> Result<Vec<i32>, CudaError> {
        let mut count = 0;
        // SAFETY: the signature of `nvrtcGetNumSupportedArchs`.
        let size: unsafe extern "C" fn(*mut c_int) -> c_int =
            unsafe { self.get(c"nvrtcGetNumSupportedArchs")? };
        // SAFETY: it writes one number.
        self.check("count what it compiles for", unsafe { size(&mut count) })?;
        let mut list = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the signature of `nvrtcGetSupportedArchs`.
        let fill: unsafe extern "C" fn(*mut c_int) -> c_int = unsafe { self.get(c"nvrtcGetSupportedArchs")? };
        // SAFETY: it writes as many numbers as it counted.
        self.check("tell what it compiles for", unsafe { fill(list.as_mut_ptr()) })?;
        list.sort_unstable();
        Ok(list)
    }

    /// Compiles for a device. If the compiler knows the device, the result is machine code, which old drivers can read, too.
    /// Otherwise it is assembly for the latest older device that the compiler knows.
    ///
    /// # Errors
    /// When the compiler knows neither, or the source does not compile.
    pub fn compile_for(&self, source: &str, capability: i32) -> Result<Image, CudaError> {
        self.compile_with(source, &[], capability)
    }

    /// As [`compile_for`](Self::compile_for), with more options. If they name an architecture, such as
    /// `--gpu-architecture=sm_90a`, it takes the place of the device's own.
    ///
    /// # Errors
    /// As there.
    pub fn compile_with(&self, source: &str, options: &[&str], capability: i32) -> Result<Image, CudaError> {
        let known = self.capabilities()?;
        match known.iter().rev().find(|known| **known <= capability) {
            Some(&known) if known == capability => {
                self.compile_to(source, options, Architecture::Binary(capability))
            }
            Some(&known) => self.compile_to(source, options, Architecture::Assembly(known)),
            None => Err(CudaError::Nvrtc {
                what: "compile for this device",
                reason: format!(
                    "its compute capability {capability} is below the oldest, {:?}",
                    known.first()
                ),
            }),
        }
    }

    /// Compiles CUDA C++.
    ///
    /// # Errors
    /// When the source does not compile, with the compiler's log.
    pub fn compile(&self, source: &str, architecture: Architecture) -> Result<Image, CudaError> {
        self.compile_to(source, &[], architecture)
    }

    fn compile_to(
        &self,
        source: &str,
        options: &[&str],
        architecture: Architecture,
    ) -> Result<Image, CudaError> {
        let text = CString::new(source)
            .map_err(|error| CudaError::Nvrtc { what: "read the source", reason: error.to_string() })?;
        let option = match architecture {
            Architecture::Binary(capability) => format!("--gpu-architecture=sm_{capability}"),
            Architecture::Assembly(capability) => format!("--gpu-architecture=compute_{capability}"),
        };
        let named = options.iter().any(|option| option.starts_with("--gpu-architecture"));
        let default = (!named).then_some(option.as_str());
        let options = default.into_iter().chain(options.iter().copied());
        // No option has a zero byte.
        let options: Vec<CString> = options.map(|option| CString::new(option).unwrap_or_default()).collect();
        let program = OpenProgram::new(self, &text)?;
        program.compile(&options)?;
        Ok(match architecture {
            Architecture::Binary(_) => Image::Binary(program.output(c"nvrtcGetCUBINSize", c"nvrtcGetCUBIN")?),
            Architecture::Assembly(_) => {
                Image::Assembly(text_of(&program.output(c"nvrtcGetPTXSize", c"nvrtcGetPTX")?))
            }
        })
    }

    /// A function of the library.
    ///
    /// # Safety
    /// `T` is a function pointer with the signature that NVRTC documents for this name.
    unsafe fn get<T: Copy>(&self, name: &CStr) -> Result<T, CudaError> {
        // SAFETY: the caller vouches for the type.
        unsafe { self.library.get::<T>(name.to_bytes_with_nul()) }.map(|symbol| *symbol).map_err(|error| {
            CudaError::Nvrtc { what: "be used", reason: format!("{}: {error}", self.path.display()) }
        })
    }

    fn check(&self, what: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the signature of `nvrtcGetErrorString`.
        let call: unsafe extern "C" fn(c_int) -> *const c_char = unsafe { self.get(c"nvrtcGetErrorString")? };
        // SAFETY: it returns a constant string for every number.
        let reason = unsafe { CStr::from_ptr(call(code)) }.to_string_lossy().into_owned();
        Err(CudaError::Nvrtc { what, reason })
    }
}

/// A program of the compiler, destroyed on drop.
struct OpenProgram<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl<'a> OpenProgram<'a> {
    fn new(nvrtc: &'a Nvrtc, source: &CStr) -> Result<Self, CudaError> {
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        // SAFETY: the signature of `nvrtcCreateProgram`.
        let create: Create = unsafe { nvrtc.get(c"nvrtcCreateProgram")? };
        let (none, mut program) = (std::ptr::null(), std::ptr::null_mut());
        // SAFETY: the strings end in zero bytes and are copied. No headers are given.
        let code = unsafe { create(&mut program, source.as_ptr(), c"page_copy.cu".as_ptr(), 0, none, none) };
        nvrtc.check("take the source", code)?;
        Ok(Self { nvrtc, program })
    }

    fn compile(&self, options: &[CString]) -> Result<(), CudaError> {
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        // SAFETY: the signature of `nvrtcCompileProgram`.
        let compile: Compile = unsafe { self.nvrtc.get(c"nvrtcCompileProgram")? };
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(options.len()).unwrap_or(0);
        // SAFETY: that many options, which end in zero bytes.
        let code = unsafe { compile(self.program, count, options.as_ptr()) };
        match self.nvrtc.check("compile the kernels", code) {
            Err(CudaError::Nvrtc { what, reason }) => {
                let log = self.output(c"nvrtcGetProgramLogSize", c"nvrtcGetProgramLog").unwrap_or_default();
                Err(CudaError::Nvrtc { what, reason: format!("{reason}: {}", text_of(&log).trim()) })
            }
            result => result,
        }
    }

    /// The output of a pair of functions, of which `size` gives the length and `fill` the bytes.
    fn output(&self, size: &CStr, fill: &CStr) -> Result<Vec<u8>, CudaError> {
        let mut length = 0;
        // SAFETY: the signature of every such function for a size.
        let size: Get<usize> = unsafe { self.nvrtc.get(size)? };
        // SAFETY: the program lives as long as this. The call writes one number.
        self.nvrtc.check("tell the size of its output", unsafe { size(self.program, &mut length) })?;
        let mut bytes = vec![0_u8; length];
        // SAFETY: the signature of every such function for bytes, which C calls characters.
        let fill: Get<u8> = unsafe { self.nvrtc.get(fill)? };
        // SAFETY: it writes as many bytes as `size` said.
        self.nvrtc.check("give its output", unsafe { fill(self.program, bytes.as_mut_ptr()) })?;
        Ok(bytes)
    }
}

impl Drop for OpenProgram<'_> {
    fn drop(&mut self) {
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
        // SAFETY: the signature of `nvrtcDestroyProgram`.
        if let Ok(destroy) = unsafe { self.nvrtc.get::<Destroy>(c"nvrtcDestroyProgram") } {
            // SAFETY: the program is not used after this. A failure is ignored.
            unsafe { destroy(&mut self.program) };
        }
    }
}

/// Text that the compiler ends with a zero byte.
fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}
