//! The plugins that the settings ask for, and the commands about plugins.

mod bench;
mod command;
mod features;
mod inspect;
mod install;
mod list;
mod new;
mod rules;
mod test;

pub use command::{Command, Directories};

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use host_core::Instance;
use host_plugin_api::transfer::{Opening, TransferBackend};
use host_plugin_api::{PoolAllocator, PoolOpening, StorageTier};

use super::settings::{RoleName, Settings};
use super::{Refused, addresses, launch};
use crate::plugins;
use crate::plugins::requirements::{self, Feature};
use crate::plugins::{Catalog, Entry, Manifest};
use crate::worker::link::rank_name;

/// Roles that a plugin has no use for beside that of moving pages, unless it is named for it.
const PLAYED_LATER: [&str; 2] = ["tier", "allocator"];

/// Checks that the plugins are there and can do what the configuration needs, without running any of their code.
///
/// # Errors
/// With everything that is missing at once.
pub fn check(settings: &Settings) -> Result<(), Refused> {
    let features = features::of(settings);
    // A process that opens no plugin needs none; what was named is looked for all the same.
    let needs_none = needs_none(settings, &features);
    let (directories, mut names) = match needs_none {
        true => (Vec::new(), Vec::new()),
        false => (settings.plugins_dirs(), settings.plugins()),
    };
    let catalog = Catalog::scan_with(settings.plugin_policy(), directories);
    let allocator = allocator(settings, &features, &catalog);
    names.extend(allocator.clone().filter(|name| !names.contains(name)));
    let (mut found, mut wrong) = (Vec::new(), Vec::new());
    for name in &names {
        match catalog.find(name) {
            Ok(entry) => found.push(entry),
            Err(error) => wrong.push(error.to_string()),
        }
    }
    let all_found = wrong.is_empty();
    let allocates = |manifest: &Manifest| allocator.as_ref() == Some(&manifest.plugin.name);
    let played = |entry: &&Entry| roles_played(settings, &entry.manifest, allocates(&entry.manifest));
    let played: Vec<Manifest> = found.iter().map(played).collect();
    let manifests: Vec<&Manifest> = played.iter().collect();
    if let Err(mut violations) = requirements::check(&features, &manifests, &catalog) {
        // That a role is not played may be for want of the plugin that was not found.
        violations.retain(|violation| all_found || !violation.is_for_want_of_a_plugin());
        let list: Vec<String> = violations.iter().map(|violation| format!("\n  - {violation}")).collect();
        if !list.is_empty() {
            wrong.push(format!("the configuration cannot work:{}", list.concat()));
        }
    }
    for entry in found.iter().filter(|entry| entry.manifest.role("transfer").is_none()) {
        let name = &entry.manifest.plugin.name;
        let plays = |role| entry.manifest.role(role).is_some();
        if settings.stores().contains(name) && plays("tier")
            || allocates(&entry.manifest) && plays("allocator")
        {
            continue;
        }
        let roles: Vec<&str> =
            PLAYED_LATER.into_iter().filter(|role| entry.manifest.role(role).is_some()).collect();
        wrong.push(format!(
            "plugin {name:?} would never be called: its role is {}, and the server uses transfer plugins, the storage tiers \
             that --hicache-storage names and the allocator that --allocator names; leave it out of --plugins",
            roles.join(" and ")
        ));
    }
    for entry in found.iter().filter(|entry| allocates(&entry.manifest)) {
        if entry.manifest.role("allocator").is_none() {
            let roles: Vec<&str> = entry.manifest.roles.iter().map(|role| role.kind.as_str()).collect();
            wrong.push(format!(
                "--allocator {}: the plugin hands out no pages, its role is {}",
                entry.manifest.plugin.name,
                roles.join(" and ")
            ));
        }
    }
    for entry in &found {
        let name = &entry.manifest.plugin.name;
        let config = config_of(settings, name).map_err(|refused| refused.to_string());
        if let Err(error) = config.and_then(|config| entry.manifest.check_config(&config)) {
            wrong.push(format!("the configuration of plugin {name:?} is wrong: {error}"));
        }
    }
    for name in settings.plugin.keys().filter(|_| !needs_none) {
        if !names.contains(name) && catalog.find(name).is_err() {
            wrong.push(format!(
                "[plugin.{name}] configures no plugin that is named or installed: correct the name"
            ));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(Refused(wrong.join("\n"))) }
}

/// A plugin with the roles that it will be opened for: a transfer plugin that could also store or allocate does not where
/// another one is named for that, and one that is named for storage or pages alone moves nothing.
fn roles_played(settings: &Settings, manifest: &Manifest, allocates: bool) -> Manifest {
    let mut played = manifest.clone();
    let name = &manifest.plugin.name;
    let stores = settings.stores().contains(name);
    let moves = !(stores || allocates) || settings.movers().contains(name);
    played.roles.retain(|role| match role.kind.as_str() {
        "tier" => stores,
        "allocator" => allocates,
        "transfer" => moves,
        _ => true,
    });
    played
}

/// Whether this process opens no plugin and was told of none.
fn needs_none(settings: &Settings, features: &[Feature]) -> bool {
    let opens =
        [Feature::PdTransfer, Feature::SlidingWindow].iter().any(|feature| features.contains(feature));
    let named = !settings.stores().is_empty() || settings.allocator.is_some();
    !opens && !named && settings.plugins.is_none()
}

/// The plugin that hands out pages, if one does: the one that is named, or for a model with windows the default one where
/// it is installed. That none is there for such a model is for the compatibility table to say, with those that would do.
fn allocator(settings: &Settings, features: &[Feature], catalog: &Catalog) -> Option<String> {
    let standard = || {
        let name = settings.window_allocator();
        let slides = features.contains(&Feature::SlidingWindow);
        (slides && catalog.find(&name).is_ok()).then_some(name)
    };
    settings.allocator.clone().or_else(standard)
}

/// Checks what a worker needs, plugins and all else. Each part says what it finds wrong; a second kind of mistake is worth
/// saying in the same run.
///
/// # Errors
/// With everything that was found.
pub fn check_all(settings: &Settings) -> Result<(), Refused> {
    let registers = match settings.role {
        None | Some(RoleName::Router) => false,
        Some(RoleName::Aggregated) => settings.router.is_some(),
        Some(RoleName::Prefill | RoleName::Decode) => true,
    };
    let addresses = if registers { addresses::check_worker(settings).map(drop) } else { Ok(()) };
    let found = [launch::plan(settings).map(drop), addresses, check(settings)];
    let wrong: Vec<String> = found.into_iter().filter_map(|result| Some(result.err()?.to_string())).collect();
    if wrong.is_empty() { Ok(()) } else { Err(Refused(wrong.join("\n"))) }
}

/// Asks the named plugins themselves whether their configuration works here: a library that one needs may be missing.
/// Their code is loaded, and nothing is opened.
///
/// # Errors
/// With everything that they refuse.
pub fn ask(settings: &Settings) -> Result<(), Refused> {
    let features = features::of(settings);
    if needs_none(settings, &features) {
        return Ok(());
    }
    let catalog = Catalog::scan_with(settings.plugin_policy(), settings.plugins_dirs());
    let (mut names, mut wrong) = (settings.plugins(), Vec::new());
    let allocator = allocator(settings, &features, &catalog);
    names.extend(allocator.clone().filter(|name| !names.contains(name)));
    for name in names {
        let entry = catalog.find(&name).map_err(|error| Refused(error.to_string()))?;
        let config = config_of(settings, &name)?;
        let roles = ["transfer", "tier", "allocator"];
        let manifest = roles_played(settings, &entry.manifest, allocator.as_ref() == Some(&name));
        let played = roles.into_iter().filter(|role| manifest.role(role).is_some());
        let refused = played.filter_map(|role| plugins::check_config(entry, role, &config).err());
        wrong.extend(refused.map(|error| error.to_string()).next());
    }
    if wrong.is_empty() { Ok(()) } else { Err(Refused(wrong.join("\n"))) }
}

/// The plugin's own table in a file of its own, as text; empty without a file.
fn plugin_config(file: Option<&Path>) -> anyhow::Result<String> {
    let text = file.map(std::fs::read_to_string).transpose();
    Ok(text.context("the plugin's configuration cannot be read")?.unwrap_or_default())
}

/// The plugin's own table, as text; empty when there is none.
fn config_of(settings: &Settings, plugin: &str) -> Result<String, Refused> {
    let table = settings.plugin.get(plugin).map(toml::to_string).transpose();
    let text = table.map_err(|error| Refused(format!("[plugin.{plugin}] is not a table: {error}")))?;
    Ok(text.unwrap_or_default())
}

/// Loads the transfer plugin and opens an instance for each rank of this worker.
///
/// # Errors
/// When it is not there, does not fit, or does not open.
pub fn open_transfer(
    settings: &Settings,
    instance: Instance,
    ranks: usize,
) -> anyhow::Result<(String, Vec<Arc<dyn TransferBackend>>)> {
    let catalog = Catalog::scan_with(settings.plugin_policy(), settings.plugins_dirs());
    let named: Result<Vec<_>, _> = settings.plugins().iter().map(|name| catalog.find(name)).collect();
    let named = named.map_err(|error| Refused(error.to_string()))?;
    // That there is only one is a rule of the compatibility table.
    let mut movers = named.into_iter().filter(|entry| entry.manifest.role("transfer").is_some());
    let entry = movers.next().ok_or_else(|| {
        Refused("none of the plugins moves KV between workers: add one, for example shm".into())
    })?;
    let name = entry.manifest.plugin.name.clone();
    let config = config_of(settings, &name)?;
    let open = |rank| {
        let opening = Opening { name: rank_name(instance, rank), config: config.clone() };
        plugins::open_transfer(entry, &opening).map_err(|error| Refused(error.to_string()))
    };
    let backends: Result<Vec<_>, Refused> = (0..ranks).map(open).collect();
    Ok((name, backends?))
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
    let opening = Opening { name: instance.to_string(), config: config_of(settings, name)? };
    Ok(plugins::open_tier(entry, &opening).map_err(|error| Refused(error.to_string()))?)
}

/// Loads the allocator and opens it for this worker's pool; `None` when the pool hands out its pages itself.
///
/// # Errors
/// When it is not there, does not fit, or does not open.
pub fn open_allocator(
    settings: &Settings,
    opening: PoolOpening,
    slides: bool,
) -> anyhow::Result<Option<(String, Arc<dyn PoolAllocator>)>> {
    if settings.allocator.is_none() && !slides {
        return Ok(None);
    }
    let name = settings.window_allocator();
    let catalog = Catalog::scan_with(settings.plugin_policy(), settings.plugins_dirs());
    let entry = catalog.find(&name).map_err(|error| Refused(error.to_string()))?;
    let opening = PoolOpening { config: config_of(settings, &name)?, ..opening };
    let opened = plugins::open_allocator(entry, &opening).map_err(|error| Refused(error.to_string()))?;
    Ok(Some((name, opened)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_plays_the_roles_that_it_is_named_for() {
        let text = "manifest_version = 1\n[plugin]\nid = \"x.both\"\nname = \"both\"\nversion = \"1.0.0\"\n\
                    [api]\nversion = \"1.0.0\"\n[[role]]\nkind = \"transfer\"\n[[role]]\nkind = \"tier\"\n\
                    [build]\npanic = \"unwind\"\ntarget = \"t\"\nrustc = \"r\"\nsymbol = \"s\"\n";
        let manifest = Manifest::parse(text).unwrap();
        for (plugins, storage, played) in [
            (Some("both"), None, &["transfer"][..]),
            (Some("both"), Some("both"), &["transfer", "tier"]),
            (Some("wire"), Some("both"), &["tier"]),
            (None, Some("both"), &["tier"]),
            (Some("both"), Some("other"), &["transfer"]),
        ] {
            let settings = Settings {
                plugins: plugins.map(|name| vec![name.to_owned()]),
                hicache_storage: storage.map(|name| vec![name.to_owned()]),
                ..Settings::default()
            };
            let roles = roles_played(&settings, &manifest, false).roles;
            let roles: Vec<&str> = roles.iter().map(|role| role.kind.as_str()).collect();
            assert_eq!(roles, played, "--plugins {plugins:?} --hicache-storage {storage:?}");
        }
    }
}
