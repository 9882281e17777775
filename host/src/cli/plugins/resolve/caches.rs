//! Caches that are on by default.

use crate::cli::settings::{RoleName, Settings};

/// A cache of one role, and how it is turned off.
struct Switch {
    /// Its field in the settings.
    place: fn(&mut Settings) -> &mut Option<bool>,
    /// Whether a process of this role has it; without a role, all parts run here.
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
/// The compatibility table needs no more of a transfer plugin for the prefix caches than for the transfer itself, so every
/// plugin that carries pages can have them.
pub fn turn_on(settings: &mut Settings, notes: &mut Vec<String>) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn turned(mut settings: Settings, stores: &[&str]) -> (Settings, Vec<String>) {
        settings.hicache_storage = Some(stores.iter().map(|name| (*name).to_owned()).collect());
        let mut notes = Vec::new();
        turn_on(&mut settings, &mut notes);
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
    fn prefix_caches_need_no_more_than_the_transfer() {
        use host_plugins::requirements::{Feature, Need, RULES};
        let needed = |feature: Feature| {
            let of = RULES.iter().filter(move |rule| rule.feature == feature);
            of.filter_map(|rule| match rule.need {
                Need::Capability { role: "transfer", name } => Some(name),
                _ => None,
            })
        };
        let carries: Vec<&str> = needed(Feature::PdTransfer).collect();
        for feature in [Feature::DecodeRadixCache, Feature::PrefillRadixCache, Feature::PagesOutliveRequests]
        {
            for capability in needed(feature) {
                assert!(
                    carries.contains(&capability),
                    "{feature:?} needs {capability}: it cannot be on by default"
                );
            }
        }
    }
}
