//! The plugins that the settings ask for, and the commands about plugins.

mod command;
mod inspect;
mod install;
mod list;
mod new;
mod rules;
mod test;

pub use command::Command;

use std::sync::Arc;

use host_core::Instance;
use host_plugin_api::transfer::{Opening, TransferBackend};

use super::Refused;
use super::settings::{RoleName, Settings};
use crate::plugins;
use crate::plugins::requirements::{self, Feature};
use crate::plugins::{Catalog, Entry};

/// Checks that the plugins are there and can do what the configuration needs, without running any of their code.
///
/// # Errors
/// With everything that is missing at once.
pub fn check(settings: &Settings) -> Result<(), Refused> {
    let catalog = Catalog::scan(settings.plugins_dirs());
    let wanted = find_all(settings, &catalog)?;
    let manifests: Vec<_> = wanted.iter().map(|entry| &entry.manifest).collect();
    let features = features(settings);
    requirements::check(&features, &manifests, &catalog).map_err(|violations| {
        let list: Vec<String> = violations.iter().map(|violation| format!("\n  - {violation}")).collect();
        Refused(format!("the configuration cannot work:{}", list.concat()))
    })?;
    for entry in wanted {
        let name = &entry.manifest.plugin.name;
        entry
            .manifest
            .check_config(&config_of(settings, name)?)
            .map_err(|error| Refused(format!("the configuration of plugin {name:?} is wrong: {error}")))?;
    }
    Ok(())
}

fn find_all<'a>(settings: &Settings, catalog: &'a Catalog) -> Result<Vec<&'a Entry>, Refused> {
    let found: Vec<_> = settings.plugins().iter().map(|name| catalog.find(name)).collect();
    let missing: Vec<String> =
        found.iter().filter_map(|result| result.as_ref().err().map(ToString::to_string)).collect();
    match missing.is_empty() {
        true => Ok(found.into_iter().flatten().collect()),
        false => Err(Refused(missing.join("\n"))),
    }
}

/// What the configuration makes use of.
fn features(settings: &Settings) -> Vec<Feature> {
    if settings.role == Some(RoleName::Aggregated) {
        return Vec::new();
    }
    let mut features = vec![Feature::PdTransfer];
    if settings.decode_radix_cache {
        features.push(Feature::DecodeRadixCache);
    }
    if settings.role.is_none() {
        features.push(Feature::SupervisedRestart);
    }
    if settings.control.is_some_and(|address| !address.ip().is_loopback()) {
        features.push(Feature::RemoteWorkers);
    }
    features
}

/// The plugin's own table, as text; empty when there is none.
fn config_of(settings: &Settings, plugin: &str) -> Result<String, Refused> {
    let table = settings.plugin.get(plugin).map(toml::to_string).transpose();
    let text = table.map_err(|error| Refused(format!("[plugin.{plugin}] is not a table: {error}")))?;
    Ok(text.unwrap_or_default())
}

/// Loads the transfer plugin and opens an instance for this worker.
///
/// # Errors
/// When it is not there, does not fit, or does not open.
pub fn open_transfer(
    settings: &Settings,
    instance: Instance,
) -> anyhow::Result<(String, Arc<dyn TransferBackend>)> {
    let catalog = Catalog::scan(settings.plugins_dirs());
    let entries = find_all(settings, &catalog)?;
    let entry =
        entries.into_iter().find(|entry| entry.manifest.role("transfer").is_some()).ok_or_else(|| {
            Refused("none of the plugins moves KV between workers: add one, for example shm".into())
        })?;
    let name = entry.manifest.plugin.name.clone();
    let opening = Opening { name: instance.to_string(), config: config_of(settings, &name)? };
    let backend = plugins::open_transfer(entry, &opening).map_err(|error| Refused(error.to_string()))?;
    Ok((name, backend))
}
