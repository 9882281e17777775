//! Finds the transfer engine that is configured, or the first that is there.

use host_plugin_api::Result;

use super::Driver;
use super::c::{CDriver, SYMBOLS};
use super::python::PythonDriver;
use crate::config::Config;
use crate::search::{Wanted, look_at, search};

/// File name of the C library.
pub const FILE: &str = "libtransfer_engine.so";

fn wanted(config: &Config) -> Wanted {
    Wanted {
        title: "Mooncake's transfer engine",
        file: FILE,
        variable: "MOONCAKE_TE_LIBRARY",
        key: "library",
        named: config.library.clone(),
        symbols: SYMBOLS,
    }
}

/// Loads the Mooncake that is configured, or the first that is there.
///
/// # Errors
/// `UNSUPPORTED` with every attempt and its reason, `CONFIG` when none could work as configured.
pub fn load(config: &Config) -> Result<Box<dyn Driver>> {
    config.check_transfer()?;
    search(
        &wanted(config),
        config,
        |path| Ok(Box::new(CDriver::load(path, config)?) as Box<dyn Driver>),
        |probe| Ok(Box::new(PythonDriver::load(probe, config)?) as Box<dyn Driver>),
    )
}

/// Says whether [`load`] would find an engine. Nothing of Mooncake is loaded into this process.
///
/// # Errors
/// As [`load`].
pub fn check(config: &Config) -> Result<()> {
    config.check_transfer()?;
    let wanted = wanted(config);
    search(
        &wanted,
        config,
        |path| look_at(path, &config.preloads(), wanted.symbols),
        |probe| probe.engine().map(drop),
    )
}

#[cfg(test)]
mod tests {
    use host_plugin_api::ErrorCode;

    use super::*;

    #[test]
    fn every_attempt_is_in_the_error_with_its_reason() {
        let config = Config { python: Some("/no/such/python".into()), ..Config::default() };
        let error = check(&config).unwrap_err();
        for part in [FILE, "cannot run /no/such/python", "pip install", "MOONCAKE_TE_LIBRARY"] {
            assert!(error.code == ErrorCode::UNSUPPORTED && error.message.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn what_the_user_names_is_all_that_is_tried() {
        let config = Config { library: Some("/no/such.so".into()), ..Config::default() };
        let error = check(&config).unwrap_err();
        assert!(error.message.contains("/no/such.so") && !error.message.contains("    python"), "{error}");
        let other = Config { library: Some("/lib/x86_64-linux-gnu/libc.so.6".into()), ..Config::default() };
        assert!(check(&other).unwrap_err().message.contains("has no createTransferEngine"));
    }
}
