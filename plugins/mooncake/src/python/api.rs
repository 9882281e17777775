//! The part of CPython's stable ABI that is needed, looked up in a library at run time. Any CPython from 3.10 on has
//! these functions, and the build needs no CPython.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_longlong, c_ulonglong, c_void};
use std::path::Path;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::loader::whole;

/// A `PyObject *`.
pub type Handle = *mut c_void;

macro_rules! api {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions. None is missing.
        #[allow(non_snake_case)]
        pub struct Api { $(pub $name: unsafe extern "C" fn($($argument),*) -> $result,)* }

        impl Api {
            /// # Errors
            /// The first function that the library lacks.
            fn look_up(library: &Library) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the function's in CPython's documentation of its stable ABI.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> $result>(
                                stringify!($name).as_bytes(),
                            )
                        };
                        *found.map_err(|error| whole(&error))?
                    },)*
                })
            }
        }
    };
}

api! {
    Py_IsInitialized() -> c_int;
    Py_InitializeEx(c_int) -> ();
    PyEval_SaveThread() -> *mut c_void;
    PyGILState_Ensure() -> c_int;
    PyGILState_Release(c_int) -> ();
    PyImport_ImportModule(*const c_char) -> Handle;
    PyObject_GetAttrString(Handle, *const c_char) -> Handle;
    PyObject_CallObject(Handle, Handle) -> Handle;
    PyObject_Str(Handle) -> Handle;
    PyTuple_New(isize) -> Handle;
    PyTuple_SetItem(Handle, isize, Handle) -> c_int;
    PyList_New(isize) -> Handle;
    PyList_SetItem(Handle, isize, Handle) -> c_int;
    PySequence_Size(Handle) -> isize;
    PySequence_GetItem(Handle, isize) -> Handle;
    PyLong_FromUnsignedLongLong(c_ulonglong) -> Handle;
    PyLong_AsLongLong(Handle) -> c_longlong;
    PyLong_AsUnsignedLongLong(Handle) -> c_ulonglong;
    PyBool_FromLong(c_long) -> Handle;
    PyUnicode_FromStringAndSize(*const c_char, isize) -> Handle;
    PyUnicode_AsUTF8AndSize(Handle, *mut isize) -> *const c_char;
    PyErr_Occurred() -> Handle;
    PyErr_Clear() -> ();
    PyErr_Fetch(*mut Handle, *mut Handle, *mut Handle) -> ();
    PyErr_NormalizeException(*mut Handle, *mut Handle, *mut Handle) -> ();
    Py_IncRef(Handle) -> ();
    Py_DecRef(Handle) -> ();
}

impl Api {
    /// Looks up Python's functions: in this process, if it runs Python already, else in a library.
    ///
    /// The library stays loaded for good: threads, handlers and hooks of extension modules that it leaves behind would
    /// point into unmapped memory.
    ///
    /// # Errors
    /// What the loader says of each file.
    pub fn load(candidates: &[impl AsRef<Path>], executable: &str) -> Result<&'static Self, String> {
        let this = Library::this();
        if let Ok(api) = Self::look_up(&this)
            // SAFETY: it takes nothing, and may be called before anything is initialised.
            && unsafe { (api.Py_IsInitialized)() } != 0
        {
            return Ok(Box::leak(Box::new(api)));
        }
        let mut tried = String::new();
        for path in candidates {
            let path = path.as_ref();
            let bare = path.components().count() == 1;
            if !bare && !path.is_file() {
                continue;
            }
            // SAFETY: its constructors run. It is CPython's own library, as its interpreter names it. Extension modules look
            // its symbols up globally.
            match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) } {
                Err(error) => tried.push_str(&format!("\n    {}", whole(&error))),
                Ok(library) => {
                    let api = Self::look_up(&library);
                    let started = api.and_then(|api| api.start(&library, executable));
                    std::mem::forget(library);
                    return Ok(Box::leak(Box::new(started?)));
                }
            }
        }
        Err(tried)
    }

    /// Starts the interpreter, without its signal handlers, and releases its lock.
    fn start(self, library: &Library, executable: &str) -> Result<Self, String> {
        // SAFETY: as in `load`.
        if unsafe { (self.Py_IsInitialized)() } != 0 {
            return Ok(self);
        }
        // Python finds its own modules and those of a virtual environment by the name of the interpreter.
        // SAFETY: the type is the function's in CPython's documentation.
        let set_name = unsafe { library.get::<unsafe extern "C" fn(*const i32)>(b"Py_SetProgramName") };
        let Ok(set_name) = set_name else {
            return Err(
                "it has no Py_SetProgramName, which CPython dropped in 3.15: use an older one".to_owned()
            );
        };
        // Isolated, as the probe was, so that modules are found where the probe found them.
        // SAFETY: the type is the variable's in CPython's documentation.
        let Ok(isolated) = (unsafe { library.get::<*mut c_int>(b"Py_IsolatedFlag") }) else {
            return Err("it has no Py_IsolatedFlag, which CPython drops in 3.15: use an older one".to_owned());
        };
        let wide: Vec<i32> = executable.chars().map(|c| c as i32).chain([0]).collect();
        // SAFETY: the name is ended by a zero and is never freed, as Python asks. These are the first calls of the start, made
        // once: the caller holds the lock of the only code that starts Python. Nothing reads the variable before the start.
        unsafe {
            **isolated = 1;
            set_name(Vec::leak(wide).as_ptr());
            (self.Py_InitializeEx)(0);
            (self.PyEval_SaveThread)();
        }
        Ok(self)
    }
}

/// A name as C takes it. The names here have no zero bytes in them.
pub fn c_name(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}

/// Text of a C string that Python owns.
///
/// # Safety
/// `text` is null, or a string that ends in a zero and lives as long as the call.
pub unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
