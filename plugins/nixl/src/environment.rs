//! The one setting that NIXL takes from the environment alone.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use host_plugin_api::{Level, log};

static ORDER: Mutex<()> = Mutex::new(());

/// Says where NIXL's own plugins are, in `NIXL_PLUGIN_DIR`, unless somebody has. NIXL reads it when its first agent is made,
/// so this comes before that.
pub fn name_plugins(folder: &Path) {
    let _order = ORDER.lock().unwrap_or_else(PoisonError::into_inner);
    if std::env::var_os("NIXL_PLUGIN_DIR").is_some() {
        return;
    }
    // SAFETY: readers and writers in this library share a lock with this one. The host's, which has a standard library of
    // its own, and readers in C do not; this happens once, when the plugin is opened or checked and before the worker takes
    // work, and only for installs whose plugins NIXL would not find. To exclude it, export the variable before the start,
    // which leaves nothing to set here.
    unsafe { std::env::set_var("NIXL_PLUGIN_DIR", folder) };
    log!(Level::INFO, "NIXL's own plugins are in {}", folder.display());
}
