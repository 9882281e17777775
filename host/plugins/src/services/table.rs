//! The services in the form that plugins in C get.

use std::borrow::Cow;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use host_plugin_api::abi::services::HostRole;
use host_plugin_api::abi::{RResult, RStr};
use host_plugin_api::c;

use super::{Offered, Services};

/// Makes the table of functions for these services. It lives as long as the process, because the plugin may use it that long.
pub(super) fn of(services: &Arc<Services>) -> &'static c::Services {
    let offered: &'static Offered = Box::leak(Box::new(Offered(Arc::clone(services))));
    let level: &'static AtomicU64 = offered.level().value;
    Box::leak(Box::new(c::Services {
        size: size_of::<c::Services>() as u64,
        host: std::ptr::from_ref(offered).cast_mut().cast(),
        level: level.as_ptr(),
        log: Some(log),
        word: Some(word),
        wake: Some(wake),
    }))
}

/// Converts the first argument of each function back to the services.
///
/// # Safety
/// `host` is [`c::Services::host`] of a table that [`of`] made.
unsafe fn offered(host: *mut c_void) -> &'static Offered {
    // SAFETY: the caller's promise, and the services were leaked.
    unsafe { &*host.cast::<Offered>() }
}

/// Limit of a text from a plugin, in bytes. The log cuts its lines shorter.
const LONGEST: usize = 1 << 16;

/// Reads a text from the plugin. Replaces bytes that are not UTF-8, for instance where a character was cut.
///
/// # Safety
/// `text.length` bytes can be read at `text.data`.
unsafe fn text<'a>(text: c::Text) -> Cow<'a, str> {
    if text.data.is_null() || text.length == 0 {
        return Cow::Borrowed("");
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(text.data.cast::<u8>(), text.length.min(LONGEST)) };
    String::from_utf8_lossy(bytes)
}

unsafe extern "C" fn log(host: *mut c_void, level: u32, target: c::Text, message: c::Text) {
    // SAFETY: the plugin passes arguments as the header says.
    let (host, target, message) = unsafe { (offered(host), text(target), text(message)) };
    host.log(level, RStr::from_str(&target), RStr::from_str(&message));
}

unsafe extern "C" fn word(
    host: *mut c_void,
    kind: u32,
    name: c::Text,
    word: *mut *mut u64,
    error: *mut c::ErrorText,
) -> i32 {
    // SAFETY: the plugin passes arguments as the header says.
    let (host, name) = unsafe { (offered(host), text(name)) };
    match host.word(kind, RStr::from_str(&name)) {
        RResult::ROk(made) => {
            // SAFETY: as above. The word lives as long as the process.
            unsafe { *word = made.value.as_ptr() };
            0
        }
        RResult::RErr(why) => {
            // SAFETY: as above: `error` is null or points to room for a text.
            if let Some(error) = unsafe { error.as_mut() }.filter(|error| !error.text.is_null()) {
                let length = why.message.len().min(error.room);
                // SAFETY: both sides have so many bytes, and they do not overlap.
                unsafe {
                    std::ptr::copy_nonoverlapping(why.message.as_ptr(), error.text.cast::<u8>(), length);
                }
                error.length = length;
            }
            why.code.0
        }
    }
}

unsafe extern "C" fn wake(host: *mut c_void) {
    // SAFETY: the plugin passes arguments as the header says.
    unsafe { offered(host) }.wake();
}
