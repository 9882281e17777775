//! The settings that Mooncake reads from the environment, once per process or once per engine, and that are wrong by default
//! for what we do with it.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Variables that are set unless they are set already. Measured with 0.3.13.post1 over TCP: by default a peer takes 2048
/// transfers at once, and lets those fail that wait for longer than a second. Its warnings are about every engine that starts,
/// and every one that ends.
const SETTINGS: [(&str, &str); 5] = [
    ("MC_TCP_ENABLE_CONNECTION_POOL", "1"),
    ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"),
    ("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535"),
    ("MC_TCP_ADMISSION_TIMEOUT_MS", "60000"),
    ("MC_LOG_LEVEL", "ERROR"),
];

static ONCE: Mutex<bool> = Mutex::new(false);

/// Sets what is not set, and loads what Mooncake needs and the loader would not find. To be called before anything of
/// Mooncake is loaded; it does its work once.
///
/// # Errors
/// What the loader says of a library that cannot be loaded.
pub fn set(preload: &[impl AsRef<Path>]) -> Result<(), String> {
    let mut done = ONCE.lock().unwrap_or_else(PoisonError::into_inner);
    if !*done {
        for (name, value) in SETTINGS.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()) {
            // SAFETY: readers and writers in this library share a lock with this one. The host's, which has a standard library
            // of its own, and readers in C do not; this happens once, when the worker opens its plugins and before it takes
            // work. To exclude it, export the variables before the start, which leaves nothing to set here.
            unsafe { std::env::set_var(name, value) };
        }
        *done = true;
    }
    crate::python::preload(preload)
}

/// Keeps Mooncake to TCP, for good: it would take adapters for RDMA wherever it finds some.
pub fn force_tcp() {
    let _order = ONCE.lock().unwrap_or_else(PoisonError::into_inner);
    if std::env::var_os("MC_FORCE_TCP").is_none() {
        // SAFETY: as above.
        unsafe { std::env::set_var("MC_FORCE_TCP", "1") };
    }
}
