//! Whether the plugins that the settings ask for are there and will do.

use super::asked::Asked;
use super::config_of;
use crate::cli::settings::{RoleName, Settings};
use crate::cli::{Refused, addresses, launch};
use host_plugins::{Entry, Manifest, requirements};

/// Checks that the plugins are there and can do what the configuration needs, without running any of their code.
///
/// # Errors
/// With everything that is missing at once.
pub fn check(settings: &Settings) -> Result<(), Refused> {
    let asked = Asked::of(settings);
    let (found, missing) = find(&asked);
    let manifests = || found.iter().map(|entry| &entry.manifest);
    let mut wrong = missing;
    wrong.extend(unmet_needs(settings, &asked, &found));
    wrong.extend(manifests().filter_map(|plugin| never_called(settings, &asked, plugin)));
    wrong.extend(manifests().filter_map(|plugin| hands_out_no_pages(&asked, plugin)));
    wrong.extend(manifests().filter_map(|plugin| carries_no_pages(settings, plugin)));
    wrong.extend(manifests().filter_map(|plugin| wrong_table(settings, plugin)));
    wrong.extend(tables_of_nobody(settings, &asked));
    refuse(wrong)
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
    refuse(wrong)
}

/// Asks the named plugins themselves whether their configuration works here: a library that one needs may be missing.
/// Their code is loaded, and nothing is opened.
///
/// # Errors
/// With everything that they refuse.
pub fn ask(settings: &Settings) -> Result<(), Refused> {
    let asked = Asked::of(settings);
    let mut wrong = Vec::new();
    for name in &asked.names {
        let entry = asked.catalog.find(name).map_err(|error| Refused(error.to_string()))?;
        let config = config_of(settings, name)?;
        let plugin = asked.played(settings, &entry.manifest);
        let played = ["transfer", "tier", "allocator"].into_iter().filter(|role| plugin.role(role).is_some());
        let refused = played.filter_map(|role| host_plugins::check_config(entry, role, &config).err());
        // Its roles share one configuration, so that the first to refuse it says enough.
        wrong.extend(refused.map(|error| error.to_string()).next());
    }
    refuse(wrong)
}

/// The plugins that are there, and a sentence for each that is not.
fn find(asked: &Asked) -> (Vec<&Entry>, Vec<String>) {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for name in &asked.names {
        match asked.catalog.find(name) {
            Ok(entry) => found.push(entry),
            Err(error) => missing.push(error.to_string()),
        }
    }
    (found, missing)
}

/// What features need and these plugins do not have, as the compatibility table says it.
fn unmet_needs(settings: &Settings, asked: &Asked, found: &[&Entry]) -> Option<String> {
    let played: Vec<Manifest> = found.iter().map(|entry| asked.played(settings, &entry.manifest)).collect();
    let played: Vec<&Manifest> = played.iter().collect();
    let mut violations = requirements::check(&asked.features, &played, &asked.catalog).err()?;
    if found.len() < asked.names.len() {
        // That a role is not played may be for want of the plugin that was not found.
        violations.retain(|violation| !violation.is_for_want_of_a_plugin());
    }
    let list: Vec<String> = violations.iter().map(|violation| format!("\n  - {violation}")).collect();
    (!list.is_empty()).then(|| format!("the configuration cannot work:{}", list.concat()))
}

/// A plugin that moves nothing and is not named for what it could do instead.
fn never_called(settings: &Settings, asked: &Asked, plugin: &Manifest) -> Option<String> {
    let (name, plays) = (&plugin.plugin.name, |role| plugin.role(role).is_some());
    let stores = settings.stores().contains(name) && plays("tier");
    let allocates = asked.allocates(plugin) && plays("allocator");
    if plays("transfer") || stores || allocates {
        return None;
    }
    let could: Vec<&str> = ["tier", "allocator"].into_iter().filter(|role| plays(role)).collect();
    Some(format!(
        "plugin {name:?} would never be called: its role is {}, and another plugin has it; leave one of them out",
        could.join(" and ")
    ))
}

/// A plugin that is named as the allocator and is none.
fn hands_out_no_pages(asked: &Asked, plugin: &Manifest) -> Option<String> {
    if !asked.allocates(plugin) || plugin.role("allocator").is_some() {
        return None;
    }
    let roles: Vec<&str> = plugin.roles.iter().map(|role| role.kind.as_str()).collect();
    Some(format!(
        "--allocator {}: the plugin hands out no pages, its role is {}",
        plugin.plugin.name,
        roles.join(" and ")
    ))
}

/// A plugin that is chosen to carry pages and cannot.
fn carries_no_pages(settings: &Settings, plugin: &Manifest) -> Option<String> {
    let name = &plugin.plugin.name;
    if settings.transfer.as_ref() != Some(name) || plugin.role("transfer").is_some() {
        return None;
    }
    let roles: Vec<&str> = plugin.roles.iter().map(|role| role.kind.as_str()).collect();
    Some(format!("--transfer {name}: the plugin carries no pages, its role is {}", roles.join(" and ")))
}

/// A plugin whose own table has keys that it does not declare, or other values.
fn wrong_table(settings: &Settings, plugin: &Manifest) -> Option<String> {
    let name = &plugin.plugin.name;
    let config = config_of(settings, name).map_err(|refused| refused.to_string());
    let error = config.and_then(|config| plugin.check_config(&config)).err()?;
    Some(format!("the configuration of plugin {name:?} is wrong: {error}"))
}

/// Tables of plugins that are neither named nor installed.
fn tables_of_nobody(settings: &Settings, asked: &Asked) -> Vec<String> {
    // A process that opens no plugin reads none of their tables.
    if !asked.any {
        return Vec::new();
    }
    let nobodys = |name: &&String| !asked.names.contains(name) && asked.catalog.find(name).is_err();
    let sentence = |name: &String| {
        format!("[plugin.{name}] configures no plugin that is named or installed: correct the name")
    };
    settings.plugin.keys().filter(nobodys).map(sentence).collect()
}

fn refuse(wrong: Vec<String>) -> Result<(), Refused> {
    if wrong.is_empty() { Ok(()) } else { Err(Refused(wrong.join("\n"))) }
}
