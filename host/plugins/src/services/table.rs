//! The services as plugins in C get them.

use std::borrow::Cow;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use host_plugin_api::abi::services::HostRole;
use host_plugin_api::abi::{RResult, RStr};
use host_plugin_api::c;

use super::{Offered, Services};

/// A table whose functions are given these services. It lives as long as the process, as the plugin may use it so long.
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

/// The services behind the first argument of all functions.
///
/// # Safety
/// `host` is [`c::Services::host`] of a table that [`of`] made.
unsafe fn offered(host: *mut c_void) -> &'static Offered {
    // SAFETY: the caller's, and it was leaked.
    unsafe { &*host.cast::<Offered>() }
}

/// Longest text that is looked at, in bytes. The log cuts its lines at fewer.
const LONGEST: usize = 1 << 16;

/// A text of the plugin's. What is not UTF-8 in it, as where a character was cut, is replaced.
///
/// # Safety
/// So many bytes can be read there.
unsafe fn text<'a>(text: c::Text) -> Cow<'a, str> {
    if text.data.is_null() || text.length == 0 {
        return Cow::Borrowed("");
    }
    // SAFETY: the caller's.
    let bytes = unsafe { std::slice::from_raw_parts(text.data.cast::<u8>(), text.length.min(LONGEST)) };
    String::from_utf8_lossy(bytes)
}

unsafe extern "C" fn log(host: *mut c_void, level: u32, target: c::Text, message: c::Text) {
    // SAFETY: the header says what a plugin passes.
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
    // SAFETY: the header says what a plugin passes.
    let (host, name) = unsafe { (offered(host), text(name)) };
    match host.word(kind, RStr::from_str(&name)) {
        RResult::ROk(made) => {
            // SAFETY: as above. The word lives as long as the process.
            unsafe { *word = made.value.as_ptr() };
            0
        }
        RResult::RErr(why) => {
            // SAFETY: as above: null, or room for a text.
            if let Some(error) = unsafe { error.as_mut() }.filter(|error| !error.text.is_null()) {
                let length = why.message.len().min(error.room);
                // SAFETY: so many bytes are there on both sides, which do not overlap.
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
    // SAFETY: the header says what a plugin passes.
    unsafe { offered(host) }.wake();
}
