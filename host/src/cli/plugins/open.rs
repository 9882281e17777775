//! Opens the plugins of a worker.

use std::sync::Arc;

use host_core::Instance;
use host_plugin_api::transfer::{Opening, TransferBackend};
use host_plugin_api::{PoolAllocator, PoolOpening, StorageTier, capability};
use host_plugins::{Catalog, PluginError};
use host_worker::link::rank_name;

use super::{config_of, host_defaults};
use crate::cli::Refused;
use crate::cli::settings::Settings;

/// The transfer plugin of a worker.
pub struct OpenedTransfer {
    /// Its name.
    pub name: String,
    /// Whether it declares `settled`: it says exactly which transfers have settled.
    pub settles: bool,
    /// Whether it declares that it registers memory of devices.
    pub vram: bool,
    /// An instance for each rank.
    pub backends: Vec<Arc<dyn TransferBackend>>,
}

/// A refusal, unless the same configuration may work later. A supervisor starts the worker again then.
fn not_opened(error: PluginError) -> anyhow::Error {
    if error.may_pass() { error.into() } else { Refused(error.to_string()).into() }
}

/// Loads the transfer plugin and opens an instance for each rank of this worker.
///
/// # Errors
/// When it is not there, does not fit, or does not open.
pub fn open_transfer(
    settings: &Settings,
    instance: Instance,
    ranks: usize,
) -> anyhow::Result<OpenedTransfer> {
    let catalog = Catalog::scan_with(settings.plugin_policy(), settings.plugins_dirs());
    let named: Result<Vec<_>, _> = settings.plugins().iter().map(|name| catalog.find(name)).collect();
    let named = named.map_err(|error| Refused(error.to_string()))?;
    // A rule of the compatibility table allows only one.
    let mut movers = named.into_iter().filter(|entry| entry.manifest.role("transfer").is_some());
    let entry = movers.next().ok_or_else(|| {
        Refused("none of the plugins moves KV between workers: add one, for example shm".into())
    })?;
    let name = entry.manifest.plugin.name.clone();
    let config = config_of(settings, &name)?;
    let open = |rank| {
        let opening = Opening { name: rank_name(instance, rank), config: config.clone() };
        host_plugins::open_transfer(entry, &opening).map_err(not_opened)
    };
    let backends: anyhow::Result<Vec<_>> = (0..ranks).map(open).collect();
    let declares = |capability| entry.manifest.declares("transfer", capability);
    let (settles, vram) = (declares(capability::SETTLED), declares(capability::VRAM));
    Ok(OpenedTransfer { name, settles, vram, backends: backends? })
}

/// Loads a storage tier and opens an instance for this worker.
///
/// # Errors
/// When it is not there, does not fit, or does not open.
pub fn open_tier(
    settings: &Settings,
    name: &str,
    instance: Instance,
) -> anyhow::Result<Arc<dyn StorageTier>> {
    let catalog = Catalog::scan_with(settings.plugin_policy(), settings.plugins_dirs());
    let entry = catalog.find(name).map_err(|error| Refused(error.to_string()))?;
    if let Some(table) = settings.plugin.get(name).and_then(toml::Value::as_table) {
        let made = host_defaults::make_parents(table);
        made.map_err(|error| Refused(format!("no folder for {name}'s pages can be made: {error}")))?;
    }
    let opening = Opening { name: instance.to_string(), config: config_of(settings, name)? };
    host_plugins::open_tier(entry, &opening).map_err(not_opened)
}

/// The key of an allocator's configuration that `--swa-full-tokens-ratio` sets.
pub(super) const RATIO: &str = "full_tokens_ratio";

/// Loads the allocator and opens it for this worker's pool. `None` if the pool itself allocates its pages.
///
/// `needed` is true if the model has layers that retain something else than every token.
///
/// # Errors
/// When it is not there, does not fit, or does not open.
pub fn open_allocator(
    settings: &Settings,
    opening: PoolOpening,
    needed: bool,
) -> anyhow::Result<Option<(String, Arc<dyn PoolAllocator>)>> {
    if settings.allocator.is_none() && !needed {
        return Ok(None);
    }
    let name = settings.window_allocator();
    let catalog = Catalog::scan_with(settings.plugin_policy(), settings.plugins_dirs());
    let entry = catalog.find(&name).map_err(|error| Refused(error.to_string()))?;
    let mut config = config_of(settings, &name)?;
    if let Some(ratio) = settings.swa_full_tokens_ratio {
        // The key goes before the header of any table.
        config = format!("{RATIO} = {ratio:?}\n{config}");
    }
    let opening = PoolOpening { config, ..opening };
    let opened = host_plugins::open_allocator(entry, &opening).map_err(not_opened)?;
    Ok(Some((name, opened)))
}
