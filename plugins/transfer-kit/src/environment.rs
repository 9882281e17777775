//! Environment variables that are added while other threads run.
//!
//! Libraries that a plugin loads may take settings from the environment alone, and a plugin is opened in a process that
//! has threads already. `setenv` is not safe there: before glibc 2.41 it frees the array of variables when it grows,
//! also while another thread walks it.

use std::ffi::{CStr, CString, OsStr, c_char};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::fs::{FlockOperation, flock};

use crate::locked;

/// A file that differs between processes, and is the same for all libraries of one process.
const OWN: &str = "/proc/self/environ";

static WRITER: std::sync::Mutex<()> = std::sync::Mutex::new(());

unsafe extern "C" {
    /// The variables as `NAME=VALUE`, with a null pointer after the last. The array may be absent.
    static mut environ: *mut *mut c_char;
}

/// Adds those of these variables that are not set, all at once, and returns their names.
///
/// Threads may read the environment meanwhile. They see the variables of before or after: the array that they walk never
/// changes, and a longer one takes its place. Calls take turns, also those of other plugins that have a copy of this crate.
///
/// A name or a value that has a zero byte, and a name that is empty or has an `=`, is not added.
///
/// # Safety
/// Nothing else changes the environment meanwhile: neither `setenv`, `putenv`, `unsetenv` or `clearenv`, which may free the array
/// that is copied here, nor an assignment to `environ`.
pub unsafe fn add<'a>(variables: &[(&'a str, &OsStr)]) -> Vec<&'a str> {
    let _in_this_copy = locked(&WRITER);
    // Unlocked when the file is closed. On a system without such a file only the calls of one copy take turns.
    let _between_copies =
        File::open(OWN).ok().filter(|own| flock(own, FlockOperation::LockExclusive).is_ok());
    // SAFETY: it is aligned and lives as long as the process. Readers in C load it at once, as a pointer is on every target.
    let shared = unsafe { AtomicPtr::from_ptr(&raw mut environ) };
    let old = shared.load(Ordering::Acquire);
    let mut array = Vec::new();
    // SAFETY: the array ends with a null pointer, and nothing changes or frees it meanwhile, as the caller promises.
    unsafe {
        let mut at = old;
        while !at.is_null() && !(*at).is_null() {
            array.push(*at);
            at = at.add(1);
        }
    }
    let mut added = Vec::new();
    for (name, value) in variables {
        let start = [name.as_bytes(), b"="].concat();
        // SAFETY: each is a terminated string, which is not freed while the array has it.
        let is_set = |entry: &*mut c_char| unsafe { CStr::from_ptr(*entry) }.to_bytes().starts_with(&start);
        if name.is_empty() || name.contains('=') || array.iter().any(is_set) {
            continue;
        }
        if let Ok(entry) = CString::new([&start[..], value.as_bytes()].concat()) {
            array.push(entry.into_raw());
            added.push(*name);
        }
    }
    if !added.is_empty() {
        array.push(std::ptr::null_mut());
        // Never freed, since a reader may hold it for as long as it likes.
        shared.store(array.leak().as_mut_ptr(), Ordering::Release);
    }
    added
}
