//! Resolves `--plugins`: assigns each plugin to the roles in its manifest, and turns on the caches and settings that it needs.
//!
//! The resulting settings name every role in its own key (`plugins`, `hicache-storage`, `allocator`), and all later code reads
//! these keys. Processes that a supervisor starts get the same result from the same flags and directories.

mod caches;
mod roles;

use host_plugins::{Catalog, Manifest};
use toml::{Table, Value};

use super::host_defaults;
use crate::cli::Refused;
use crate::cli::settings::{RoleName, Settings, set_key};

/// Settings in which every named plugin has a role.
#[derive(Debug)]
pub struct Resolved {
    /// The settings.
    pub settings: Settings,
    /// A sentence for each setting that was added to the operator's, with the flag that turns it off.
    pub notes: Vec<String>,
    /// Values that the host supplied, in the form of `--set`. Processes that this one starts get them, and do not choose again.
    pub supplied: Vec<String>,
}

/// Assigns a role to every plugin that `--plugins` names. [`check`](super::check) finds problems with the plugins.
///
/// # Errors
/// When a `--set` is not of the form PLUGIN.KEY=VALUE.
pub fn resolve(mut settings: Settings) -> Result<Resolved, Refused> {
    let mut notes = Vec::new();
    let catalog = Catalog::scan_with(settings.plugin_policy(), settings.plugins_dirs());
    set_keys(&mut settings, &catalog)?;
    let named = settings.plugins.clone().unwrap_or_default();
    let manifests = named.iter().filter_map(|name| Some(catalog.find(name).ok()?.manifest.clone()));
    roles::put_to_work(&mut settings, &manifests.collect::<Vec<_>>(), &mut notes);
    // A router has no caches, but it checks the same settings as its workers.
    caches::turn_on(&mut settings, &catalog, &mut notes);
    let supplied = match settings.role {
        Some(RoleName::Router) => Vec::new(),
        _ => host_defaults::fill(&mut settings, &catalog, &mut notes),
    };
    Ok(Resolved { settings, notes, supplied })
}

/// Writes the values of `--set` into the plugins' tables.
fn set_keys(settings: &mut Settings, catalog: &Catalog) -> Result<(), Refused> {
    for pair in std::mem::take(&mut settings.set) {
        let (plugin, rest) = pair
            .split_once('.')
            .filter(|(plugin, rest)| !plugin.is_empty() && !plugin.contains('=') && rest.contains('='))
            .ok_or_else(|| {
                let form =
                    "is not of the form PLUGIN.KEY=VALUE, for example hicache-file.dir=/var/cache/pages";
                Refused(format!("--set {pair:?} {form}"))
            })?;
        let manifest: Option<&Manifest> = catalog.find(plugin).ok().map(|entry| &entry.manifest);
        let is_named = settings.plugins().iter().any(|name| name == plugin);
        if manifest.is_none() && !is_named {
            let why = format!("no plugin {plugin:?} is named or installed: correct the name");
            return Err(Refused(format!("--set {pair:?}: {why}")));
        }
        let table = settings.plugin.entry(plugin).or_insert_with(|| Value::Table(Table::new()));
        let table =
            table.as_table_mut().ok_or_else(|| Refused(format!("[plugin.{plugin}] is not a table")))?;
        set_key(table, manifest, rest, &pair)?;
    }
    Ok(())
}
