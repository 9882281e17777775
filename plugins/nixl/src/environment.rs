//! Settings that NIXL, and the AWS SDK in it, take from the environment alone.

use std::ffi::OsStr;
use std::path::Path;

use host_plugin_api::{Level, log};
use host_transfer_kit::environment;

/// Names the folder of NIXL's own plugins in `NIXL_PLUGIN_DIR`, unless it is set. NIXL reads it when its first agent is
/// made, so this comes before that.
pub fn name_plugins(folder: &Path) {
    if !add(&[("NIXL_PLUGIN_DIR", folder.as_os_str())]).is_empty() {
        log!(Level::INFO, "NIXL's own plugins are in {}", folder.display());
    }
}

/// Makes UCX ask the driver what memory an address is in. By default it remembers what was allocated since it was loaded, and takes
/// all other memory for the host's. A worker's pool may be older. UCX reads the variable when it is loaded.
pub fn settle_memory_types() {
    for name in add(&[("UCX_MEMTYPE_CACHE", OsStr::new("n"))]) {
        log!(Level::DEBUG, "{name} is set, for this process");
    }
}

/// Makes the AWS SDK give up a request after 2 attempts, which takes 6 s when a server says nothing. By default it
/// makes 11, for a minute. With keys that were given, also keeps it from looking for others at an address that only
/// machines of Amazon's have. The SDK reads this when an agent is made. Variables that are set already stay.
pub fn settle_aws(has_keys: bool) {
    let unset = |name: &str| std::env::var_os(name).is_none();
    let mut settings = Vec::new();
    if unset("AWS_RETRY_MODE") && unset("AWS_MAX_ATTEMPTS") {
        settings.extend([("AWS_RETRY_MODE", OsStr::new("standard")), ("AWS_MAX_ATTEMPTS", OsStr::new("2"))]);
    }
    if has_keys {
        settings.push(("AWS_EC2_METADATA_DISABLED", OsStr::new("true")));
    }
    for name in add(&settings) {
        log!(Level::DEBUG, "{name} is set, for this process");
    }
}

fn add<'a>(settings: &[(&'a str, &OsStr)]) -> Vec<&'a str> {
    // SAFETY: the host changes no variables, and plugins on this kit take turns. In NIXL 1.5.1 only gRPC and an
    // exporter of telemetry import `setenv`. Neither runs before an agent is made. What remains is another library in
    // this process that calls `setenv` at the same moment. To exclude that, too, export the variables before the start,
    // so that this function adds nothing.
    unsafe { environment::add(settings) }
}
