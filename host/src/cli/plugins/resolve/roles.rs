//! Assigns roles to the plugins that `--plugins` names.

use std::collections::BTreeSet;

use host_plugins::Manifest;

use super::caches;
use crate::cli::settings::{RoleName, Settings};

/// Adds the role of each plugin to the settings where the operator did not set it. Keeps plugins with the transfer role in
/// `plugins`.
pub fn put_to_work(settings: &mut Settings, named: &[Manifest], notes: &mut Vec<String>) {
    if let Some(plugins) = &mut settings.plugins {
        let mut seen = BTreeSet::new();
        plugins.retain(|name| seen.insert(name.clone()));
    }
    for plugin in named {
        let (name, plays) = (&plugin.plugin.name, |role| plugin.role(role).is_some());
        if plays("transfer") {
            continue;
        }
        if plays("tier") && settings.hierarchical_cache == Some(false) {
            notes.push(format!("{name} does nothing: --no-hierarchical-cache turned storage tiers off"));
        } else if plays("tier") && caches::all_off(settings) && !settings.stores().contains(name) {
            notes.push(format!("{name} does nothing: the prefix caches above it are off"));
        } else if plays("tier") {
            let storage = settings.hicache_storage.get_or_insert_default();
            if !storage.contains(name) {
                storage.push(name.clone());
            }
        } else if plays("allocator") && settings.allocator.is_none() {
            settings.allocator = Some(name.clone());
            notes.push(format!("{name} hands out pages: --plugins names it; without it the host does"));
        } else if plays("allocator") && settings.allocator.as_ref() != Some(name) {
            // The plugin keeps its place in the list, so that the checks refuse it: it would never be called.
            continue;
        }
        if let Some(plugins) = &mut settings.plugins {
            plugins.retain(|plugin| plugin != name);
        }
    }
    choose_transfer(settings, named, notes);
}

/// Selects the transfer plugin. With `--transfer`, other plugins that could transfer pages do nothing unless they are named for
/// another role. If none of the named plugins can, the default plugin transfers pages.
fn choose_transfer(settings: &mut Settings, named: &[Manifest], notes: &mut Vec<String>) {
    let carries = |name: &String| {
        named.iter().any(|plugin| plugin.plugin.name == *name && plugin.role("transfer").is_some())
    };
    let Some(chosen) = settings.transfer.clone() else {
        let left = settings.plugins.as_ref().is_some_and(Vec::is_empty) && !named.is_empty();
        if left && settings.role != Some(RoleName::Aggregated) {
            settings.plugins = None;
            notes.push(format!(
                "{} carries pages between workers, as none of the named plugins does; --plugins or --transfer names \
                 another",
                settings.movers().join(", ")
            ));
        }
        return;
    };
    let mut plugins = settings.plugins.take().unwrap_or_default();
    for name in plugins.iter().filter(|name| carries(name) && **name != chosen) {
        if !settings.stores().contains(name) && settings.allocator.as_ref() != Some(name) {
            notes.push(format!("{name} does nothing: --transfer {chosen} carries pages"));
        }
    }
    // A plugin that is named for storage is opened only for storage.
    plugins.retain(|name| *name == chosen || !carries(name));
    if !plugins.contains(&chosen) {
        plugins.insert(0, chosen);
    }
    settings.plugins = Some(plugins);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(name: &str, roles: &[&str]) -> Manifest {
        let roles: String = roles.iter().map(|role| format!("[[role]]\nkind = \"{role}\"\n")).collect();
        let text = format!(
            "manifest_version = 1\n[plugin]\nid = \"x.{name}\"\nname = \"{name}\"\nversion = \"1.0.0\"\n\
             [api]\nversion = \"1.0.0\"\n{roles}\
             [build]\npanic = \"unwind\"\ntarget = \"t\"\nrustc = \"r\"\nsymbol = \"s\"\n"
        );
        Manifest::parse(&text).unwrap()
    }

    /// The settings with a role for every plugin, and the notes.
    fn worked(mut settings: Settings) -> (Settings, Vec<String>) {
        let all = [
            manifest("wire", &["transfer"]),
            manifest("both", &["transfer", "tier"]),
            manifest("disk", &["tier"]),
            manifest("pages", &["allocator"]),
        ];
        let named = settings.plugins.clone().unwrap_or_default();
        let named: Vec<Manifest> =
            all.into_iter().filter(|plugin| named.contains(&plugin.plugin.name)).collect();
        let mut notes = Vec::new();
        put_to_work(&mut settings, &named, &mut notes);
        (settings, notes)
    }

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    fn with(plugins: &[&str]) -> Settings {
        Settings { plugins: Some(names(plugins)), ..Settings::default() }
    }

    #[test]
    fn a_named_tier_stores_and_moves_nothing() {
        let (settings, notes) = worked(with(&["wire", "disk"]));
        assert_eq!(settings.stores(), ["disk"]);
        assert_eq!(settings.movers(), ["wire"]);
        assert!(notes.is_empty(), "{notes:?}");
        // The operator's order of tiers is kept.
        let chosen = Settings { hicache_storage: Some(names(&["both", "disk"])), ..with(&["wire", "disk"]) };
        let (settings, _) = worked(chosen);
        assert_eq!(settings.stores(), ["both", "disk"]);
    }

    #[test]
    fn a_tier_does_nothing_where_the_hierarchical_cache_is_off() {
        let (settings, notes) =
            worked(Settings { hierarchical_cache: Some(false), ..with(&["wire", "disk"]) });
        assert!(settings.stores().is_empty());
        assert_eq!(settings.plugins(), ["wire"]);
        assert!(notes[0].contains("disk does nothing: --no-hierarchical-cache"), "{notes:?}");
    }

    #[test]
    fn a_tier_does_nothing_where_all_prefix_caches_of_the_process_are_off() {
        let decode = Settings {
            role: Some(RoleName::Decode),
            decode_radix_cache: Some(false),
            ..with(&["wire", "disk"])
        };
        let (settings, notes) = worked(decode.clone());
        assert!(settings.stores().is_empty() && notes[0].contains("disk does nothing"), "{notes:?}");
        let (settings, _) = worked(Settings { role: None, ..decode });
        assert_eq!(settings.stores(), ["disk"], "prefill has one");
    }

    #[test]
    fn a_plugin_that_is_named_twice_is_one() {
        let (settings, _) = worked(with(&["wire", "wire"]));
        assert_eq!(settings.movers(), ["wire"]);
    }

    #[test]
    fn a_plugin_with_both_roles_stores_only_when_it_is_named_for_that() {
        let (settings, _) = worked(with(&["both"]));
        assert!(settings.stores().is_empty());
        assert_eq!(settings.movers(), ["both"]);
    }

    #[test]
    fn an_allocator_that_is_named_hands_out_pages() {
        let (settings, notes) = worked(with(&["wire", "pages"]));
        assert_eq!((settings.allocator.as_deref(), settings.movers()), (Some("pages"), names(&["wire"])));
        assert_eq!(notes.len(), 1);
    }

    #[test]
    fn where_no_named_plugin_carries_pages_the_standard_one_does() {
        let (settings, notes) = worked(with(&["disk"]));
        assert_eq!(settings.movers(), Settings::default().movers());
        assert!(notes[0].contains("carries pages between workers"), "{notes:?}");
        let (settings, notes) = worked(Settings { role: Some(RoleName::Aggregated), ..with(&["disk"]) });
        assert!(settings.movers().is_empty() && notes.is_empty(), "one worker sends none");
        let (settings, ..) = worked(with(&["unknown"]));
        assert_eq!(settings.movers(), ["unknown"], "that it is missing is said by the checks");
    }

    #[test]
    fn the_chosen_transfer_plugin_carries_pages_and_the_other_does_nothing() {
        let chosen = |storage: &[&str]| Settings {
            transfer: Some("wire".into()),
            hicache_storage: Some(names(storage)),
            ..with(&["both", "wire"])
        };
        let (settings, notes) = worked(chosen(&[]));
        assert_eq!(settings.plugins(), ["wire"]);
        assert!(notes[0].contains("both does nothing"), "{notes:?}");
        let (settings, notes) = worked(chosen(&["both"]));
        assert_eq!(settings.movers(), ["wire"]);
        assert_eq!(settings.plugins(), ["wire", "both"]);
        assert!(notes.is_empty(), "{notes:?}");
        let (settings, ..) = worked(Settings { transfer: Some("wire".into()), ..Settings::default() });
        assert_eq!(settings.plugins(), ["wire"], "it need not be named twice");
    }
}
