//! NIXL's C API. This file and the modules of this folder have all calls into it. They also have all unsafe code of the
//! plugin, except for accesses to a tier's memory and the setting of variables.
//!
//! The API has no stable ABI ("may change between releases"), so every symbol is looked up before anything is called,
//! and this file names the differences between releases. Written against 1.5.1.
//!
//! An [`Agent`] is used by the thread that made it and no other (its pointers are not `Send`), which is what NIXL asks
//! of a caller that wants no locks.

mod agent;
mod exit;
mod objects;
mod requests;

pub use agent::{Agent, Extent};
pub use exit::{Alive, guard};
pub use requests::{Direction, Progress, Request};

use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

type Handle = *mut c_void;

/// The kind of memory of ranges, with NIXL's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    Dram = 0,
    /// Memory of a device. The device is given with each range.
    Vram = 1,
    /// Objects in a bucket. Each is registered with its name, under the number given in the device's place.
    Object = 3,
    /// Files. The descriptor is given with each range, in the device's place. Addresses are offsets.
    File = 4,
}

macro_rules! api {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The functions. None is missing.
        struct Api { $($name: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        impl Api {
            /// # Errors
            /// The names of functions that the library lacks.
            fn look_up(library: &Loaded) -> Result<Self, Vec<String>> {
                let mut missing = Vec::new();
                $(
                    let name = concat!("nixl_capi_", stringify!($name));
                    // SAFETY: the type is the function's in the header of the releases that this file names.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> c_int>(name.as_bytes())
                    };
                    if $name.is_err() {
                        missing.push(name.to_owned());
                    }
                )*
                match ($($name,)*) {
                    ($(Ok($name),)*) => Ok(Self { $($name: *$name,)* }),
                    _ => Err(missing),
                }
            }
        }
    };
}

api! {
    create_configured_agent(*const c_char, *const agent::AgentConfig, *mut Handle);
    destroy_agent(Handle);
    create_params(*mut Handle);
    params_add(Handle, *const c_char, *const c_char);
    destroy_params(Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend(Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Handle, *const c_char);
    create_reg_dlist(c_int, *mut Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist(Handle);
    register_mem(Handle, Handle, Handle);
    deregister_mem(Handle, Handle, Handle);
    create_xfer_dlist(c_int, *mut Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    xfer_dlist_clear(Handle);
    destroy_xfer_dlist(Handle);
    create_opt_args(*mut Handle);
    opt_args_add_backend(Handle, Handle);
    opt_args_set_notif_msg(Handle, *const c_void, usize);
    opt_args_set_has_notif(Handle, bool);
    opt_args_set_skip_desc_merge(Handle, bool);
    destroy_opt_args(Handle);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
    create_query_resp_list(*mut Handle);
    destroy_query_resp_list(Handle);
    query_resp_list_size(Handle, *mut usize);
    query_resp_list_has_value(Handle, usize, *mut bool);
    query_mem(Handle, Handle, Handle, Handle);
    gen_notif(Handle, *const c_char, *const c_void, usize, Handle);
    create_notif_map(*mut Handle);
    destroy_notif_map(Handle);
    get_notifs(Handle, Handle, Handle);
    notif_map_size(Handle, *mut usize);
    notif_map_get_agent_at(Handle, usize, *mut *const c_char);
    notif_map_get_notifs_size(Handle, *const c_char, *mut usize);
    notif_map_get_notif(Handle, *const c_char, usize, *mut *const c_void, *mut usize);
    notif_map_clear(Handle);
}

/// NIXL refused a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    call: &'static str,
    code: i32,
}

impl Refusal {
    /// The refusal for a request that failed.
    pub fn of(call: &'static str) -> Self {
        Self { call, code: -2 }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NIXL's {} answered {} (its log on standard error says more)", self.call, self.code)
    }
}

fn check(call: &'static str, code: c_int) -> Result<(), Refusal> {
    if code == 0 { Ok(()) } else { Err(Refusal { call, code }) }
}

/// The loaded library. Stays loaded for good: UCX leaves hooks behind.
pub struct Library {
    api: Api,
    path: PathBuf,
}

impl Library {
    /// Loads it and looks every function up.
    ///
    /// # Errors
    /// A sentence that says what is wrong with the file.
    pub fn load(path: &Path, version: Option<String>) -> Result<Self, String> {
        // SAFETY: the library's constructors run. It is NIXL's, named by the user or found where its packages are.
        let library = unsafe { Loaded::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| error.to_string())?;
        let version = version.unwrap_or_else(|| "a NIXL of unknown version".to_owned());
        // SAFETY: only the symbols' presence is looked up.
        let has = |name: &[u8]| unsafe { library.get::<*mut c_void>(name) }.is_ok();
        let looked_up = Api::look_up(&library).map_err(|missing| {
            format!("{version} has no {}; nixl-cu12 1.5.1 is known to work", missing.join(", "))
        });
        // Before 1.0 lists were made with one argument more.
        let older = has(b"nixl_capi_xfer_dlist_is_sorted\0");
        let stub = has(b"nixl_capi_is_stub\0") && {
            // SAFETY: a function without arguments that returns whether it is part of the stub.
            unsafe {
                library.get::<unsafe extern "C" fn() -> bool>(b"nixl_capi_is_stub\0").is_ok_and(|f| f())
            }
        };
        std::mem::forget(library);
        if stub {
            return Err("it is the stub of NIXL's Rust bindings, not NIXL".to_owned());
        }
        if older {
            return Err(format!("{version} is older than the C API that this plugin speaks, 1.5"));
        }
        Ok(Self { api: looked_up?, path: path.to_owned() })
    }

    /// The path that it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Whether this machine has a CUDA driver, without which UCX takes no device memory, and takes host memory for it.
///
/// # Errors
/// What the loader says.
pub fn cuda_driver() -> Result<(), String> {
    // SAFETY: the driver's own library, where the system's loader looks for it. Nothing of it is called.
    let driver = unsafe { Loaded::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) };
    // Other code of this process may be using the driver, so it stays loaded.
    driver.map(std::mem::forget).map_err(|error| error.to_string())
}

/// Takes a new object's handle out of a `create` call.
fn made(call: &'static str, create: impl FnOnce(*mut Handle) -> c_int) -> Result<Handle, Refusal> {
    let mut handle = std::ptr::null_mut();
    check(call, create(&raw mut handle))?;
    if handle.is_null() { Err(Refusal { call, code: 0 }) } else { Ok(handle) }
}

/// A list of ranges, for building requests. It is reused.
pub struct Ranges {
    library: Arc<Library>,
    handle: Handle,
}

impl Ranges {
    pub fn new(library: &Arc<Library>, segment: Segment) -> Result<Self, Refusal> {
        // SAFETY: the place for the handle is ours.
        let create = |to| unsafe { (library.api.create_xfer_dlist)(segment as c_int, to) };
        Ok(Self { handle: made("create_xfer_dlist", create)?, library: library.clone() })
    }

    pub fn clear(&mut self) -> Result<(), Refusal> {
        // SAFETY: the list is alive until our drop.
        check("xfer_dlist_clear", unsafe { (self.library.api.xfer_dlist_clear)(self.handle) })
    }

    /// Adds a range of a device. `device` is 0 when there is none.
    pub fn add(&mut self, address: u64, length: usize, device: u64) -> Result<(), Refusal> {
        let add = self.library.api.xfer_dlist_add_desc;
        // SAFETY: the list is alive, and the address is a number to it.
        check("xfer_dlist_add_desc", unsafe { add(self.handle, address as usize, length, device) })
    }
}

impl Drop for Ranges {
    fn drop(&mut self) {
        // SAFETY: our own list, destroyed once.
        let _destroyed = unsafe { (self.library.api.destroy_xfer_dlist)(self.handle) };
    }
}
