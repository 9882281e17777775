//! Checks that the requested plugins are there and have the needed capabilities.

use super::config_of;
use super::open::RATIO;
use super::requested::Requested;
use crate::cli::settings::{RoleName, Settings};
use crate::cli::{Refused, addresses, launch};
use host_plugins::{Entry, Manifest, requirements};

/// Checks that the plugins are installed and have the capabilities that the configuration needs. Runs none of their code.
///
/// # Errors
/// All problems at once.
pub fn check(settings: &Settings) -> Result<(), Refused> {
    let requested = Requested::of(settings);
    let (found, missing) = find(&requested);
    let manifests = || found.iter().map(|entry| &entry.manifest);
    let mut wrong = missing;
    wrong.extend(unmet_needs(settings, &requested, &found));
    wrong.extend(manifests().filter_map(|plugin| never_called(settings, &requested, plugin)));
    wrong.extend(manifests().filter_map(|plugin| hands_out_no_pages(&requested, plugin)));
    wrong.extend(manifests().filter_map(|plugin| takes_no_ratio(settings, &requested, plugin)));
    wrong.extend(manifests().filter_map(|plugin| carries_no_pages(settings, plugin)));
    wrong.extend(manifests().filter_map(|plugin| wrong_table(settings, plugin)));
    wrong.extend(tables_of_no_plugin(settings, &requested));
    refuse(wrong)
}

/// Checks everything that a worker needs, with its plugins. Collects the problems of all parts, so that one run shows all mistakes.
///
/// # Errors
/// All problems that were found.
pub fn check_all(settings: &Settings) -> Result<(), Refused> {
    let registers = match settings.role {
        None | Some(RoleName::Router) => false,
        Some(RoleName::Aggregated) => settings.router.is_some(),
        Some(RoleName::Prefill | RoleName::Decode) => true,
    };
    let addresses = if registers { addresses::check_worker(settings).map(drop) } else { Ok(()) };
    let found = [launch::plan(settings).map(drop), addresses, check(settings)];
    let wrong: Vec<String> = found.into_iter().filter_map(|result| Some(result.err()?.to_string())).collect();
    refuse(wrong)
}

/// Asks the named plugins whether their configuration works here. For instance a library that a plugin needs may be missing. Loads
/// their code and opens no instance.
///
/// # Errors
/// The reasons of all plugins that refuse their configuration.
pub fn ask(settings: &Settings) -> Result<(), Refused> {
    let requested = Requested::of(settings);
    let mut wrong = Vec::new();
    for name in &requested.names {
        let entry = requested.catalog.find(name).map_err(|error| Refused(error.to_string()))?;
        let config = config_of(settings, name)?;
        let plugin = requested.played(settings, &entry.manifest);
        let played = ["transfer", "tier", "allocator"].into_iter().filter(|role| plugin.role(role).is_some());
        let refused = played.filter_map(|role| host_plugins::check_config(entry, role, &config).err());
        // The roles of a plugin share one configuration, so the first refusal is enough.
        wrong.extend(refused.map(|error| error.to_string()).next());
    }
    refuse(wrong)
}

/// The plugins that are there, and a sentence for each that is not.
fn find(requested: &Requested) -> (Vec<&Entry>, Vec<String>) {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for name in &requested.names {
        match requested.catalog.find(name) {
            Ok(entry) => found.push(entry),
            Err(error) => missing.push(error.to_string()),
        }
    }
    (found, missing)
}

/// Needs of features that these plugins do not meet, by the compatibility table.
fn unmet_needs(settings: &Settings, requested: &Requested, found: &[&Entry]) -> Option<String> {
    let played: Vec<Manifest> =
        found.iter().map(|entry| requested.played(settings, &entry.manifest)).collect();
    let played: Vec<&Manifest> = played.iter().collect();
    let mut violations = requirements::check(&requested.features, &played, &requested.catalog).err()?;
    if found.len() < requested.names.len() {
        // The missing role may be that of a plugin that was not found. That plugin has its own sentence.
        violations.retain(|violation| !violation.is_for_want_of_a_plugin());
    }
    let list: Vec<String> = violations.iter().map(|violation| format!("\n  - {violation}")).collect();
    (!list.is_empty()).then(|| format!("the configuration cannot work:{}", list.concat()))
}

/// A sentence for a plugin that would never be called: it has no transfer role, and is not named for another of its roles.
fn never_called(settings: &Settings, requested: &Requested, plugin: &Manifest) -> Option<String> {
    let (name, plays) = (&plugin.plugin.name, |role| plugin.role(role).is_some());
    let stores = settings.stores().contains(name) && plays("tier");
    let allocates = requested.allocates(plugin) && plays("allocator");
    if plays("transfer") || stores || allocates {
        return None;
    }
    let could: Vec<&str> = ["tier", "allocator"].into_iter().filter(|role| plays(role)).collect();
    Some(format!(
        "plugin {name:?} would never be called: its role is {}, and another plugin has it; leave one of them out",
        could.join(" and ")
    ))
}

/// A sentence for an allocator that cannot divide its pool by the given ratio.
fn takes_no_ratio(settings: &Settings, requested: &Requested, plugin: &Manifest) -> Option<String> {
    let ratio = settings.swa_full_tokens_ratio?;
    let takes = plugin.config.contains_key(RATIO);
    (requested.allocates(plugin) && !takes).then(|| {
        format!(
            "--swa-full-tokens-ratio {ratio}: the allocator {} has no setting {RATIO}: leave the flag out, or use --allocator \
             swa",
            plugin.plugin.name
        )
    })
}

/// A sentence for a plugin that is named as the allocator but has no such role.
fn hands_out_no_pages(requested: &Requested, plugin: &Manifest) -> Option<String> {
    if !requested.allocates(plugin) || plugin.role("allocator").is_some() {
        return None;
    }
    let roles: Vec<&str> = plugin.roles.iter().map(|role| role.kind.as_str()).collect();
    Some(format!(
        "--allocator {}: the plugin hands out no pages, its role is {}",
        plugin.plugin.name,
        roles.join(" and ")
    ))
}

/// A sentence for a plugin that `--transfer` names but that has no such role.
fn carries_no_pages(settings: &Settings, plugin: &Manifest) -> Option<String> {
    let name = &plugin.plugin.name;
    if settings.transfer.as_ref() != Some(name) || plugin.role("transfer").is_some() {
        return None;
    }
    let roles: Vec<&str> = plugin.roles.iter().map(|role| role.kind.as_str()).collect();
    Some(format!("--transfer {name}: the plugin carries no pages, its role is {}", roles.join(" and ")))
}

/// A sentence for a plugin whose own table has undeclared keys or wrong values.
fn wrong_table(settings: &Settings, plugin: &Manifest) -> Option<String> {
    let name = &plugin.plugin.name;
    let config = config_of(settings, name).map_err(|refused| refused.to_string());
    let error = config.and_then(|config| plugin.check_config(&config)).err()?;
    Some(format!("the configuration of plugin {name:?} is wrong: {error}"))
}

/// Sentences for tables of plugins that are neither named nor installed.
fn tables_of_no_plugin(settings: &Settings, requested: &Requested) -> Vec<String> {
    // A process that opens no plugin does not read their tables.
    if !requested.any {
        return Vec::new();
    }
    let of_no_plugin =
        |name: &&String| !requested.names.contains(name) && requested.catalog.find(name).is_err();
    let sentence = |name: &String| {
        format!("[plugin.{name}] configures no plugin that is named or installed: correct the name")
    };
    settings.plugin.keys().filter(of_no_plugin).map(sentence).collect()
}

fn refuse(wrong: Vec<String>) -> Result<(), Refused> {
    if wrong.is_empty() { Ok(()) } else { Err(Refused(wrong.join("\n"))) }
}
