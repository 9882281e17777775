//! The settings that Mooncake reads from the environment, once per process or once per engine, and whose defaults are
//! wrong for this plugin.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use host_transfer_kit::environment;

/// Variables that are set unless they are set already. Measured with 0.3.13.post1 over TCP: by default a peer takes
/// 2048 transfers at once, and transfers that wait for longer than a second fail. Mooncake's warnings report every
/// engine that starts, and every one that ends.
const SETTINGS: [(&str, &str); 5] = [
    ("MC_TCP_ENABLE_CONNECTION_POOL", "1"),
    ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"),
    ("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535"),
    ("MC_TCP_ADMISSION_TIMEOUT_MS", "60000"),
    ("MC_LOG_LEVEL", "ERROR"),
];

static ONCE: Mutex<bool> = Mutex::new(false);

/// Sets variables that are not set, and loads libraries that Mooncake needs and the loader would not find. To be called
/// before anything of Mooncake is loaded. Only the first call sets variables.
///
/// # Errors
/// What the loader says of a library that cannot be loaded.
pub fn set(preload: &[impl AsRef<Path>]) -> Result<(), String> {
    let mut done = ONCE.lock().unwrap_or_else(PoisonError::into_inner);
    if !*done {
        add(&SETTINGS);
        *done = true;
    }
    crate::loader::preload(preload)
}

/// Keeps Mooncake to TCP, for good: otherwise it would use RDMA adapters wherever it finds some.
pub fn force_tcp() {
    add(&[("MC_FORCE_TCP", "1")]);
}

fn add(settings: &[(&str, &str)]) {
    let settings: Vec<_> = settings.iter().map(|(name, value)| (*name, OsStr::new(*value))).collect();
    // SAFETY: the host changes no variables, and plugins on this kit take turns. In Mooncake 0.3.13 only etcd's client
    // imports `setenv`, and the Python modules assign to `os.environ` in a tool that is not imported here. What remains
    // is another library in this process that calls `setenv` at the same moment. To exclude that, too, export the
    // variables before the start, so that this function adds nothing.
    let _added = unsafe { environment::add(&settings) };
}
