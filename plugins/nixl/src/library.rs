//! Loads NIXL's library for a configuration.

use std::collections::BTreeMap;
use std::ffi::CString;

use host_plugin_api::{Error, ErrorCode, Result};

use crate::capi::Library;
use crate::config::Config;
use crate::environment;
use crate::search::{self, Places};

/// Loads NIXL's library from the first place that has one that fits, with NIXL's plugin `backend`. Tells NIXL the
/// folder of its plugins when NIXL would not look there.
///
/// # Errors
/// With every place that was tried.
pub fn find_library(config: &Config, backend: &str) -> Result<Library> {
    if backend == "UCX" && config.allows_devices(ucx_tls().as_deref()).is_ok() {
        environment::settle_memory_types();
    }
    let places = Places::of(config.library.clone());
    let mut tried = Vec::new();
    for path in places.candidates() {
        let bare = path.components().count() == 1;
        if !bare && !path.is_file() {
            tried.push((path, "there is no such file".to_owned()));
            continue;
        }
        // A library that the operator names is trusted. The system's loader finds a bare name.
        if !bare
            && !places.named_by_the_operator()
            && let Err(why) = host_ownership::may_run(&path)
        {
            let why = format!(
                "{why}; or name it in NIXL_LIBRARY, or as library in [plugin.nixl], to use it all the same"
            );
            tried.push((path, why));
            continue;
        }
        match Library::load(&path, search::wheel_version(&path)) {
            Ok(library) => {
                let directory = std::env::var_os("NIXL_PLUGIN_DIR");
                if let Some(folder) = search::plugin_folder(library.path(), directory, backend)? {
                    environment::name_plugins(&folder);
                }
                return Ok(library);
            }
            Err(why) => tried.push((path, why)),
        }
    }
    Err(search::not_found(&places, &tried))
}

/// The library and the backend's parameters for a configuration.
///
/// # Errors
/// `CONFIG` for an invalid configuration, or when nothing fits it.
pub fn settle(config: &Config) -> Result<(Library, Vec<(CString, CString)>)> {
    let parameters = strings(config.backend_parameters(ucx_tls().as_deref())?)?;
    Ok((find_library(config, &config.backend)?, parameters))
}

/// The environment's list of UCX's transports.
pub fn ucx_tls() -> Option<String> {
    std::env::var_os("UCX_TLS").and_then(|value| value.into_string().ok())
}

/// See [`crate::check`].
pub fn check(config: &str) -> Result<()> {
    settle(&Config::parse(config)?).map(drop)
}

/// Parameters of one of NIXL's plugins, as its C interface takes them.
///
/// # Errors
/// `CONFIG` for a zero byte.
pub fn strings(parameters: BTreeMap<String, String>) -> Result<Vec<(CString, CString)>> {
    let wrong = |_| Error::new(ErrorCode::CONFIG, "a parameter contains a zero byte");
    let pair = |(key, value)| Ok((CString::new(key)?, CString::new(value)?));
    let pairs: std::result::Result<Vec<_>, std::ffi::NulError> = parameters.into_iter().map(pair).collect();
    pairs.map_err(wrong)
}
