//! The features that a configuration turns on.

use crate::cli::launch;
use crate::cli::settings::{ExecutorName, RoleName, Settings};
use host_core::pool::Retained;
use host_core::transfer::StagingMode;
use host_plugins::requirements::Feature;
use host_wire::endpoint::ListenAt;

type On = fn(&Settings) -> bool;
type OnForModel = fn(&Settings, Option<Retained>) -> bool;

/// The conditions under which features are on.
///
/// A setting that needs plugins or other settings gets a row here. Its needs get rows in the compatibility table,
/// [`RULES`](host_plugins::requirements::RULES).
const TURNED_ON: &[(Feature, On)] = &[
    (Feature::PdTransfer, divided),
    (Feature::Aggregated, |settings| settings.role == Some(RoleName::Aggregated)),
    (Feature::DecodeRadixCache, |settings| computes(settings) && settings.decode_radix_cache()),
    (Feature::PrefillRadixCache, |settings| computes(settings) && settings.prefill_radix_cache()),
    (Feature::CachedPagesSent, |settings| divided(settings) && settings.prefill_radix_cache()),
    (Feature::EvictionPolicy, |settings| computes(settings) && settings.radix_eviction.is_some()),
    (Feature::Speculation, |settings| computes(settings) && settings.speculate.is_some()),
    (Feature::HierarchicalCache, |settings| computes(settings) && settings.hierarchical_cache()),
    (Feature::NoPrefixCache, |settings| {
        computes(settings) && !settings.decode_radix_cache() && !settings.prefill_radix_cache()
    }),
    (Feature::StorageCache, |settings| computes(settings) && !settings.stores().is_empty()),
    (Feature::UnstagedGpuPools, |settings| {
        let pools_on_a_gpu = settings.executor() == ExecutorName::Cuda;
        let none = settings.staging_bytes.is_some_and(|bytes| bytes.0 == 0);
        divided(settings) && pools_on_a_gpu && (none || settings.staging == Some(StagingMode::Never))
    }),
    (Feature::SupervisedRestart, |settings| settings.role.is_none()),
    (Feature::RemoteWorkers, |settings| {
        divided(settings) && settings.control.as_ref().is_some_and(ListenAt::is_reachable_from_elsewhere)
    }),
];

/// The conditions for features that depend on the model. The second argument says what layers retain instead of every token, if
/// there are such layers.
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
    let beside = if computes(settings) { launch::beside(settings) } else { None };
    of_model(settings, beside)
}

/// The features of a configuration whose model has layers that retain this instead of every token.
fn of_model(settings: &Settings, beside: Option<Retained>) -> Vec<Feature> {
    let turned_on = TURNED_ON.iter().filter(|(_, on)| on(settings)).map(|(feature, _)| *feature);
    let of_the_model = OF_THE_MODEL.iter().filter(|(_, on)| on(settings, beside));
    turned_on.chain(of_the_model.map(|(feature, _)| *feature)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::settings::{EvictionPolicyName, SpeculateName};
    use host_plugins::requirements::{RULES, check};
    use host_plugins::{Catalog, Manifest};

    fn plugin(role: &str, capabilities: &[&str]) -> Manifest {
        let text = format!(
            "manifest_version = 1\n[plugin]\nid = \"x.{role}\"\nname = \"{role}\"\nversion = \"1.0.0\"\n\
             [api]\nversion = \"1.0.0\"\n[[role]]\nkind = \"{role}\"\ncapabilities = {capabilities:?}\n\
             [build]\npanic = \"unwind\"\ntarget = \"t\"\nrustc = \"r\"\nsymbol = \"s\"\n"
        );
        Manifest::parse(&text).unwrap()
    }

    /// For each rule a configuration that only this rule refuses: the settings, what the model's layers retain, and the plugins.
    fn refused_by(rule: &str) -> (Settings, Option<Retained>, Vec<Manifest>) {
        let role = |role| Settings { role: Some(role), ..Settings::default() };
        let (decode, prefill) = (role(RoleName::Decode), role(RoleName::Prefill));
        let aggregated = role(RoleName::Aggregated);
        let cached = Settings { prefill_radix_cache: Some(true), ..aggregated.clone() };
        let tier = |hierarchical_cache| Settings {
            hicache_storage: Some(vec!["tier".to_owned()]),
            hierarchical_cache: Some(hierarchical_cache),
            ..cached.clone()
        };
        let carries = || vec![plugin("transfer", &["page_writes", "arrival_notification"])];
        match rule {
            "pd-page-writes" => (prefill, None, vec![plugin("transfer", &["arrival_notification"])]),
            "pd-arrival" => (decode, None, vec![plugin("transfer", &["page_writes"])]),
            "pd-one-transfer" => (decode, None, [carries(), carries()].concat()),
            "decode-radix-settled" => {
                (Settings { decode_radix_cache: Some(true), ..decode }, None, carries())
            }
            "prefill-radix-settled" => {
                (Settings { prefill_radix_cache: Some(true), ..prefill }, None, carries())
            }
            "remote-workers" => {
                (Settings { control: Some("192.0.2.7:0".parse().unwrap()), ..decode }, None, carries())
            }
            "gpu-pools-vram" => {
                let (executor, staging) = (Some(ExecutorName::Cuda), Some(StagingMode::Never));
                (Settings { executor, staging, ..prefill }, None, carries())
            }
            "restart-reachable" => (Settings::default(), None, carries()),
            "tiers-need-cache" => {
                (Settings { hierarchical_cache: Some(true), ..aggregated }, None, Vec::new())
            }
            "storage-through-host" => (tier(false), None, vec![plugin("tier", &["settled"])]),
            "storage-settled" => (tier(true), None, vec![plugin("tier", &[])]),
            "window-allocator" => {
                (aggregated, Some(Retained::Newest(8)), vec![plugin("allocator", &["state"])])
            }
            "state-allocator" => (aggregated, Some(Retained::State), vec![plugin("allocator", &["window"])]),
            "ratio-needs-window" => {
                (Settings { swa_full_tokens_ratio: Some(0.5), ..aggregated }, None, Vec::new())
            }
            "aggregated-no-decode-radix" => {
                (Settings { decode_radix_cache: Some(true), ..cached }, None, Vec::new())
            }
            "eviction-needs-cache" => {
                (Settings { radix_eviction: Some(EvictionPolicyName::Lfu), ..aggregated }, None, Vec::new())
            }
            "speculation-no-state" => {
                let speculate = Some(SpeculateName::Ngram);
                let keeps = vec![plugin("allocator", &["state"])];
                (Settings { speculate, ..aggregated }, Some(Retained::State), keeps)
            }
            _ => panic!("no configuration is known that the rule {rule} alone refuses"),
        }
    }

    #[test]
    fn each_rule_of_the_compatibility_table_alone_refuses_some_configuration() {
        for rule in RULES {
            let (settings, beside, plugins) = refused_by(rule.name);
            let features = of_model(&settings, beside);
            let violations =
                check(&features, &plugins.iter().collect::<Vec<_>>(), &Catalog::default()).unwrap_err();
            let refuse: Vec<_> = violations.iter().map(|violation| violation.rule).collect();
            assert_eq!(refuse, [rule.name], "{features:?}");
        }
    }
}
