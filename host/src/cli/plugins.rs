//! The plugins that the settings ask for.

use std::sync::Arc;

use host_core::Instance;
use host_plugin_api::transfer::TransferBackend;

use super::Refused;
use super::settings::Settings;

/// Checks that the plugins are there and can do what the configuration needs, without running any of their code.
///
/// # Errors
/// With everything that is missing at once.
pub fn check(settings: &Settings) -> Result<(), Refused> {
    let _ = settings;
    Ok(())
}

/// Loads the transfer plugin and opens an instance for this worker.
///
/// # Errors
/// When it is not there, does not fit, or does not open.
pub fn open_transfer(
    settings: &Settings,
    instance: Instance,
) -> anyhow::Result<(String, Arc<dyn TransferBackend>)> {
    let _ = (settings, instance);
    anyhow::bail!("no plugins yet")
}
