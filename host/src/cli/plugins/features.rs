//! The features that a configuration turns on.

use crate::cli::launch;
use crate::cli::settings::{RoleName, Settings};
use host_core::pool::Retained;
use host_plugins::requirements::Feature;
use host_wire::endpoint::ListenAt;

type On = fn(&Settings) -> bool;
type OnForModel = fn(&Settings, Option<Retained>) -> bool;

/// When each feature is on.
///
/// A setting that needs something of plugins or of other settings gets a row here. What it needs gets a row in the
/// compatibility table, [`RULES`](host_plugins::requirements::RULES).
const TURNED_ON: &[(Feature, On)] = &[
    (Feature::PdTransfer, divided),
    (Feature::Aggregated, |settings| settings.role == Some(RoleName::Aggregated)),
    (Feature::DecodeRadixCache, |settings| computes(settings) && settings.decode_radix_cache()),
    (Feature::PrefillRadixCache, |settings| computes(settings) && settings.prefill_radix_cache()),
    (Feature::PagesOutliveRequests, |settings| {
        divided(settings) && (settings.decode_radix_cache() || settings.prefill_radix_cache())
    }),
    (Feature::EvictionPolicy, |settings| computes(settings) && settings.radix_eviction.is_some()),
    (Feature::HierarchicalCache, |settings| computes(settings) && settings.hierarchical_cache()),
    (Feature::NoPrefixCache, |settings| {
        computes(settings) && !settings.decode_radix_cache() && !settings.prefill_radix_cache()
    }),
    (Feature::StorageCache, |settings| computes(settings) && !settings.stores().is_empty()),
    // A decode worker without free pages preempts requests, whatever is set.
    (Feature::Preemption, divided),
    (Feature::SupervisedRestart, |settings| settings.role.is_none()),
    (Feature::RemoteWorkers, |settings| {
        divided(settings) && settings.control.as_ref().is_some_and(ListenAt::is_reachable_from_elsewhere)
    }),
];

/// When each feature is on that depends on the model. The second argument says what layers keep beside those that see every
/// token, if there are such.
const OF_THE_MODEL: &[(Feature, OnForModel)] = &[
    (Feature::SlidingWindow, |settings, beside| {
        computes(settings) && matches!(beside, Some(Retained::Newest(_)))
    }),
    (Feature::LayerState, |settings, beside| computes(settings) && beside == Some(Retained::State)),
    (Feature::WindowRatio, |settings, _beside| {
        computes(settings) && settings.swa_full_tokens_ratio.is_some()
    }),
];

/// Whether this process runs a worker.
fn computes(settings: &Settings) -> bool {
    settings.role != Some(RoleName::Router)
}

/// Whether this process runs a prefill or decode worker.
fn divided(settings: &Settings) -> bool {
    computes(settings) && settings.role != Some(RoleName::Aggregated)
}

/// The features that the configuration turns on.
pub fn of(settings: &Settings) -> Vec<Feature> {
    let turned_on = TURNED_ON.iter().filter(|(_, on)| on(settings)).map(|(feature, _)| *feature);
    let beside = if computes(settings) { launch::beside(settings) } else { None };
    let of_the_model = OF_THE_MODEL.iter().filter(|(_, on)| on(settings, beside));
    turned_on.chain(of_the_model.map(|(feature, _)| *feature)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_plugins::requirements::RULES;

    #[test]
    fn some_setting_turns_each_feature_of_the_compatibility_table_on() {
        for rule in RULES {
            let set = TURNED_ON.iter().any(|(feature, _)| *feature == rule.feature);
            let of_the_model = OF_THE_MODEL.iter().any(|(feature, _)| *feature == rule.feature);
            assert!(set || of_the_model, "nothing ever asks the rule {}", rule.name);
        }
    }
}
