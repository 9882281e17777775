//! Caches that are on by default.

use host_plugin_api::capability;
use host_plugins::Catalog;

use crate::cli::settings::{RoleName, Settings};

/// A cache of one role, and the flag that turns it off.
struct Switch {
    /// Its field in the settings.
    place: fn(&mut Settings) -> &mut Option<bool>,
    /// Whether a process with this role has the cache. Without a role, all parts run on this machine.
    is_of: fn(Option<RoleName>) -> bool,
    what: &'static str,
    off: &'static str,
}

const PREFIX_CACHES: [Switch; 2] = [
    Switch {
        place: |settings| &mut settings.prefill_radix_cache,
        is_of: |role| role != Some(RoleName::Decode),
        what: "prefill",
        off: "--no-prefill-radix-cache",
    },
    Switch {
        place: |settings| &mut settings.decode_radix_cache,
        is_of: |role| matches!(role, None | Some(RoleName::Decode | RoleName::Router)),
        what: "decode",
        off: "--no-decode-radix-cache",
    },
];

/// Whether the operator turned off every prefix cache of this process. Then nothing reaches a storage tier.
pub fn all_off(settings: &Settings) -> bool {
    let mut settings = settings.clone();
    let role = settings.role;
    PREFIX_CACHES
        .iter()
        .filter(|switch| (switch.is_of)(role))
        .all(|switch| *(switch.place)(&mut settings) == Some(false))
}

/// Turns on the caches that the operator did not set: prefix caches, and the hierarchical cache if there is a storage tier.
///
/// Prefix caches are off by default if the transfer plugin transfers pages and does not declare `settled`. A storage tier that the
/// operator named needs them nevertheless. Then the compatibility table refuses the transfer plugin.
pub fn turn_on(settings: &mut Settings, catalog: &Catalog, notes: &mut Vec<String>) {
    if settings.stores().is_empty()
        && let Some(plugin) = carries_unsettled(settings, catalog)
    {
        return turn_off(settings, &plugin, notes);
    }
    let mut on = Vec::new();
    for switch in PREFIX_CACHES {
        let is_of = (switch.is_of)(settings.role);
        let place = (switch.place)(settings);
        if place.is_none() && is_of {
            *place = Some(true);
            on.push(switch);
        }
    }
    if !on.is_empty() {
        let list = |text: fn(&Switch) -> &'static str, between: &str| {
            on.iter().map(text).collect::<Vec<_>>().join(between)
        };
        let (what, off) = (list(|switch| switch.what, " and "), list(|switch| switch.off, " "));
        notes.push(format!("prefix caching is on in {what}: the default; off with {off}"));
    }
    let stores = settings.stores().join(" and ");
    if !stores.is_empty() && settings.hierarchical_cache.is_none() && !all_off(settings) {
        settings.hierarchical_cache = Some(true);
        notes.push(format!(
            "hierarchical cache is on: {stores} stores pages; off with --no-hierarchical-cache"
        ));
    }
}

/// The plugin that transfers pages, if it does not declare `settled`.
fn carries_unsettled(settings: &Settings, catalog: &Catalog) -> Option<String> {
    let unsettled = |name: &String| {
        let manifest = catalog.find(name).ok().map(|entry| &entry.manifest);
        manifest.is_some_and(|manifest| {
            manifest.declares("transfer", capability::PAGE_WRITES)
                && !manifest.declares("transfer", capability::SETTLED)
        })
    };
    let carries = settings.role != Some(RoleName::Aggregated);
    carries.then(|| settings.movers().into_iter().find(unsettled)).flatten()
}

/// Turns the prefix caches off that the operator did not turn on.
fn turn_off(settings: &mut Settings, plugin: &str, notes: &mut Vec<String>) {
    let mut off = Vec::new();
    for switch in PREFIX_CACHES {
        let is_of = (switch.is_of)(settings.role);
        let place = (switch.place)(settings);
        if place.is_none() && is_of {
            *place = Some(false);
            off.push(switch.what);
        }
    }
    if !off.is_empty() {
        let what = off.join(" and ");
        notes.push(format!(
            "prefix caching is off in {what}: {plugin} does not declare \"settled\", which cached pages need"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turned(settings: Settings, stores: &[&str]) -> (Settings, Vec<String>) {
        with(&Catalog::default(), settings, stores)
    }

    fn with(catalog: &Catalog, mut settings: Settings, stores: &[&str]) -> (Settings, Vec<String>) {
        settings.hicache_storage = Some(stores.iter().map(|name| (*name).to_owned()).collect());
        let mut notes = Vec::new();
        turn_on(&mut settings, catalog, &mut notes);
        (settings, notes)
    }

    #[test]
    fn each_role_has_its_cache_unless_it_is_switched_off() {
        let aggregated = Settings { role: Some(RoleName::Aggregated), ..Settings::default() };
        let (settings, notes) = turned(aggregated.clone(), &[]);
        assert_eq!((settings.prefill_radix_cache, settings.decode_radix_cache), (Some(true), None));
        assert!(
            notes[0].contains("on in prefill") && notes[0].contains("--no-prefill-radix-cache"),
            "{notes:?}"
        );
        let off = Settings { prefill_radix_cache: Some(false), ..aggregated };
        let (settings, notes) = turned(off, &[]);
        assert!(!settings.prefill_radix_cache() && notes.is_empty(), "{notes:?}");
    }

    #[test]
    fn a_storage_tier_has_the_caches_above_it_on() {
        let (settings, notes) = turned(Settings::default(), &["disk"]);
        assert!(settings.prefill_radix_cache() && settings.decode_radix_cache());
        assert!(settings.hierarchical_cache() && notes[1].contains("disk stores pages"), "{notes:?}");
        let (settings, _) = turned(Settings::default(), &[]);
        assert!(!settings.hierarchical_cache());
    }

    #[test]
    fn prefix_caches_are_off_by_default_where_the_transfer_plugin_does_not_say_what_has_settled() {
        let plugins = host_tests::plugin_files::directory(&["unsettled", "wire"]);
        let catalog = Catalog::scan([plugins.path()]);
        let over = |plugin: &str| Settings { plugins: Some(vec![plugin.to_owned()]), ..Settings::default() };
        let (settings, notes) = with(&catalog, over("unsettled"), &[]);
        assert_eq!((settings.prefill_radix_cache, settings.decode_radix_cache), (Some(false), Some(false)));
        assert!(notes[0].contains("off in prefill and decode: unsettled does not declare"), "{notes:?}");
        let (settings, _) = with(&catalog, over("wire"), &[]);
        assert_eq!((settings.prefill_radix_cache, settings.decode_radix_cache), (Some(true), Some(true)));
        // A cache that the operator turned on stays on, so that a rule refuses it with the reason.
        let asked = Settings { decode_radix_cache: Some(true), ..over("unsettled") };
        let (settings, _) = with(&catalog, asked, &[]);
        assert_eq!((settings.prefill_radix_cache, settings.decode_radix_cache), (Some(false), Some(true)));
        let (settings, _) = with(&catalog, over("unsettled"), &["disk"]);
        assert_eq!((settings.prefill_radix_cache, settings.decode_radix_cache), (Some(true), Some(true)));
        let aggregated = Settings { role: Some(RoleName::Aggregated), ..over("unsettled") };
        let (settings, _) = with(&catalog, aggregated, &[]);
        assert!(settings.prefill_radix_cache(), "nothing is transferred");
    }
}
