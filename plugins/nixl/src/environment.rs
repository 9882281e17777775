//! Settings that NIXL, and the AWS SDK in it, take from the environment alone.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use host_plugin_api::{Level, log};

static ORDER: Mutex<()> = Mutex::new(());

/// Says where NIXL's own plugins are, in `NIXL_PLUGIN_DIR`, unless it is set. NIXL reads it when its first agent is made,
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

/// Has the AWS SDK give up a request after 2 attempts, 6 s where a server says nothing; left alone it makes 11, for a minute. And
/// with keys that were given, has it not look for others at an address that only machines of Amazon's have. It reads this when
/// an agent is made. Variables that are set already stay.
pub fn settle_aws(has_keys: bool) {
    let _order = ORDER.lock().unwrap_or_else(PoisonError::into_inner);
    let unset = |name: &str| std::env::var_os(name).is_none();
    let mut settings = Vec::new();
    if unset("AWS_RETRY_MODE") && unset("AWS_MAX_ATTEMPTS") {
        settings.extend([("AWS_RETRY_MODE", "standard"), ("AWS_MAX_ATTEMPTS", "2")]);
    }
    if has_keys && unset("AWS_EC2_METADATA_DISABLED") {
        settings.push(("AWS_EC2_METADATA_DISABLED", "true"));
    }
    for (name, value) in settings {
        // SAFETY: as above: when an instance opens, before the worker takes work; to exclude it, export the variable.
        unsafe { std::env::set_var(name, value) };
        log!(Level::DEBUG, "{name} is set to {value}");
    }
}
