//! Mooncake Store's C library (`libmooncake_store.so`, its `store_c.h`), loaded when an instance opens and never unloaded.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::client::{Client, LOCAL_BUFFER_BYTES, Library, Setup, Span};
use crate::loader::whole;

/// `mooncake_replicate_config_t`. The tier stores one replica of each value, which is what a null pointer asks for.
enum ReplicateConfig {}

/// A client of Mooncake's.
type Handle = *mut c_void;

macro_rules! symbols {
    ($($field:ident = $name:literal: $kind:ty;)*) => {
        /// The functions that are called, by the names of `store_c.h` without their start.
        struct Symbols { $($field: $kind,)* }

        /// The symbols that a library must have.
        pub const NAMES: &[&str] = &[$($name),*];

        impl Symbols {
            /// # Safety
            /// The library must be Mooncake Store's, so that its symbols are what its header says.
            unsafe fn find(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the caller vouches for the library.
                Ok(Self { $($field: unsafe { *library.get::<$kind>($name.as_bytes())? },)* })
            }
        }
    };
}

symbols! {
    create = "mooncake_store_create": unsafe extern "C" fn() -> Handle;
    destroy = "mooncake_store_destroy": unsafe extern "C" fn(Handle);
    setup = "mooncake_store_setup": unsafe extern "C" fn(
        Handle, *const c_char, *const c_char, u64, u64, *const c_char, *const c_char, *const c_char) -> c_int;
    put = "mooncake_store_batch_put_from": unsafe extern "C" fn(
        Handle, *mut *const c_char, *mut *mut c_void, *const usize, usize, *const ReplicateConfig, *mut c_int) -> c_int;
    get = "mooncake_store_batch_get_into": unsafe extern "C" fn(
        Handle, *mut *const c_char, *mut *mut c_void, *const usize, usize, *mut i64) -> c_int;
    exist = "mooncake_store_batch_is_exist": unsafe extern "C" fn(
        Handle, *mut *const c_char, usize, *mut c_int) -> c_int;
    remove = "mooncake_store_remove": unsafe extern "C" fn(Handle, *const c_char, c_int) -> c_int;
    register = "mooncake_store_register_buffer": unsafe extern "C" fn(Handle, *mut c_void, usize) -> c_int;
    unregister = "mooncake_store_unregister_buffer": unsafe extern "C" fn(Handle, *mut c_void) -> c_int;
}

/// The loaded library.
pub struct CLibrary {
    path: PathBuf,
    symbols: Arc<Symbols>,
}

impl CLibrary {
    /// Loads the library. The system's loader looks for a bare file name.
    ///
    /// # Errors
    /// What the loader says.
    pub fn load(path: &Path) -> Result<Self, String> {
        // SAFETY: the operator that names a library vouches for it. Its constructors are Mooncake's own.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| whole(&error))?;
        // SAFETY: a library with these names in it is Mooncake Store's.
        let symbols = unsafe { Symbols::find(&library) }.map_err(|error| whole(&error))?;
        // Never unloaded: its threads and handlers of signals would outlive it.
        std::mem::forget(library);
        Ok(Self { path: path.to_owned(), symbols: Arc::new(symbols) })
    }
}

impl Library for CLibrary {
    fn connect(&self, setup: &Setup) -> Result<Box<dyn Client>, String> {
        let text = |text: &str| CString::new(text).map_err(|_zero| format!("{text:?} contains a zero byte"));
        let host = text(&setup.local_hostname)?;
        let metadata = text(&setup.metadata_server)?;
        let protocol = text(&setup.protocol)?;
        let device = text(&setup.device_name)?;
        let master = text(&setup.master_server_address)?;
        // SAFETY: no arguments.
        let handle = unsafe { (self.symbols.create)() };
        if handle.is_null() {
            return Err("mooncake_store_create gave nothing".to_owned());
        }
        let client = CClient { handle, symbols: self.symbols.clone() };
        // SAFETY: a new handle, and texts that live through the call, after which none is used.
        let code = unsafe {
            (self.symbols.setup)(
                handle,
                host.as_ptr(),
                metadata.as_ptr(),
                setup.global_segment_size,
                LOCAL_BUFFER_BYTES,
                protocol.as_ptr(),
                device.as_ptr(),
                master.as_ptr(),
            )
        };
        match code {
            0 => Ok(Box::new(client)),
            code => {
                client.close();
                Err(format!("mooncake_store_setup answered {code}"))
            }
        }
    }

    fn describe(&self) -> String {
        self.path.display().to_string()
    }
}

struct CClient {
    handle: Handle,
    symbols: Arc<Symbols>,
}

// SAFETY: Mooncake's client locks what its threads and callers share.
unsafe impl Send for CClient {}
// SAFETY: as above.
unsafe impl Sync for CClient {}

fn texts(names: &[String]) -> Result<Vec<CString>, String> {
    let text =
        |name: &String| CString::new(name.as_str()).map_err(|_zero| format!("{name:?} contains a zero byte"));
    names.iter().map(text).collect()
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}

fn places(spans: &[Span]) -> (Vec<*mut c_void>, Vec<usize>) {
    spans.iter().map(|span| (span.address as *mut c_void, span.length as usize)).unzip()
}

fn all(code: c_int, what: &str) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{what} answered {code}")) }
}

impl Client for CClient {
    fn exist(&self, names: &[String]) -> Result<Vec<i64>, String> {
        let texts = texts(names)?;
        let mut keys = pointers(&texts);
        let mut results = vec![-1; names.len()];
        // SAFETY: an open handle, and as many keys and places for results as are said.
        let code =
            unsafe { (self.symbols.exist)(self.handle, keys.as_mut_ptr(), keys.len(), results.as_mut_ptr()) };
        all(code, "batch_is_exist")?;
        Ok(results.into_iter().map(i64::from).collect())
    }

    fn put(&self, names: &[String], values: &[Span]) -> Result<Vec<i64>, String> {
        let texts = texts(names)?;
        let (mut keys, (mut places, sizes)) = (pointers(&texts), places(values));
        let mut results = vec![-1; names.len()];
        // SAFETY: an open handle, lists of one length, and memory that stays the caller's until the call is over.
        let code = unsafe {
            (self.symbols.put)(
                self.handle,
                keys.as_mut_ptr(),
                places.as_mut_ptr(),
                sizes.as_ptr(),
                keys.len(),
                std::ptr::null(),
                results.as_mut_ptr(),
            )
        };
        all(code, "batch_put_from")?;
        Ok(results.into_iter().map(i64::from).collect())
    }

    fn get(&self, names: &[String], spans: &[Span]) -> Result<Vec<i64>, String> {
        let texts = texts(names)?;
        let (mut keys, (mut places, sizes)) = (pointers(&texts), places(spans));
        let mut results = vec![-1; names.len()];
        // SAFETY: as for `put`, and the memory may be written.
        let code = unsafe {
            (self.symbols.get)(
                self.handle,
                keys.as_mut_ptr(),
                places.as_mut_ptr(),
                sizes.as_ptr(),
                keys.len(),
                results.as_mut_ptr(),
            )
        };
        all(code, "batch_get_into")?;
        Ok(results)
    }

    fn remove(&self, names: &[String]) -> Result<Vec<i64>, String> {
        // SAFETY: an open handle and a text. 1 removes it even if it was just read.
        let remove = |text: &CString| unsafe { (self.symbols.remove)(self.handle, text.as_ptr(), 1) };
        Ok(texts(names)?.iter().map(|text| remove(text).into()).collect())
    }

    fn register(&self, span: Span) -> Result<(), String> {
        let (address, length) = (span.address as *mut c_void, span.length as usize);
        // SAFETY: an open handle, and memory that stays mapped until it is unregistered.
        all(unsafe { (self.symbols.register)(self.handle, address, length) }, "register_buffer")
    }

    fn unregister(&self, span: Span) -> Result<(), String> {
        // SAFETY: an open handle. The address is only compared.
        let code = unsafe { (self.symbols.unregister)(self.handle, span.address as *mut c_void) };
        all(code, "unregister_buffer")
    }

    fn close(&self) {
        // SAFETY: its last use, as the caller promises.
        unsafe { (self.symbols.destroy)(self.handle) };
    }
}
