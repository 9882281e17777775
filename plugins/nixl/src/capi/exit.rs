//! The end of a process in which NIXL still waits for a server.
//!
//! When a process exits, the AWS SDK in NIXL destroys its state while its own threads still use it: with requests on
//! their way the process died of a segmentation fault. So a process that exits while an agent of objects is alive ends
//! right there, with its exit status. A process that shut its instances down has no such agent.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use libloading::os::unix::Library as Loaded;

type Handler = unsafe extern "C" fn(c_int, *mut c_void);

unsafe extern "C" {
    fn _exit(status: c_int) -> !;
}

static ALIVE: AtomicUsize = AtomicUsize::new(0);

/// Held as long as an agent may have threads of the SDK.
pub struct Alive(());

impl Alive {
    pub fn begin() -> Self {
        ALIVE.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        ALIVE.fetch_sub(1, Ordering::SeqCst);
    }
}

unsafe extern "C" fn leave(status: c_int, _nothing: *mut c_void) {
    if ALIVE.load(Ordering::SeqCst) > 0 {
        // SAFETY: ends the process, whatever its threads do.
        unsafe { _exit(status) }
    }
}

/// Registers the check for the exit of the process. The check runs before anything that was set up earlier is destroyed. To
/// be called once NIXL is loaded, and again when it has served a request, because some of it is only set up then.
pub fn guard() {
    let this = Loaded::this();
    // SAFETY: the type is that of the function in glibc.
    let on_exit = unsafe { this.get::<unsafe extern "C" fn(Handler, *mut c_void) -> c_int>(b"on_exit\0") };
    if let Ok(on_exit) = on_exit {
        // SAFETY: the handler is in this library, which is never unloaded. Without room for it the process exits as it would.
        let _full = unsafe { on_exit(leave, std::ptr::null_mut()) };
    }
}
