//! Finds the interface of Mooncake that the tier uses. The search is the transfer role's, with other names.

use std::path::Path;

use host_plugin_api::Result;

use super::capi::{CLibrary, NAMES};
use super::client::Library;
use super::python::PythonLibrary;
use crate::config::{Config, Protocol};
use crate::search::{Wanted, look_at, search};

fn wanted(library: Option<&Path>) -> Wanted {
    Wanted {
        title: "Mooncake Store",
        file: "libmooncake_store.so",
        variable: "MOONCAKE_STORE_LIBRARY",
        key: "store_library",
        named: library.map(Path::to_owned),
        symbols: NAMES,
    }
}

/// Loads the Mooncake Store that is configured, or the first that is there.
///
/// # Errors
/// `UNSUPPORTED` with every attempt and its reason.
pub fn load(config: &Config, library: Option<&Path>) -> Result<Box<dyn Library>> {
    let tcp = || {
        if config.protocol == Protocol::Tcp {
            crate::environment::force_tcp();
        }
    };
    search(
        &wanted(library),
        config,
        |path| {
            crate::environment::set(&config.preloads())?;
            tcp();
            Ok(Box::new(CLibrary::load(path)?) as Box<dyn Library>)
        },
        |probe| {
            tcp();
            Ok(Box::new(PythonLibrary::load(probe)?) as Box<dyn Library>)
        },
    )
}

/// Says whether [`load`] would find a Mooncake Store. Nothing of Mooncake is loaded into this process.
///
/// # Errors
/// As [`load`].
pub fn check(config: &Config, library: Option<&Path>) -> Result<()> {
    let wanted = wanted(library);
    search(&wanted, config, |path| look_at(path, &config.preloads(), NAMES), |probe| probe.store().map(drop))
}
