//! Advice for operators: the settings that turn a feature on or off.

use super::{Feature, Need};

/// The setting that turns a feature on and the one that turns it off. `None` if there is no such setting.
struct Settings {
    on: Option<&'static str>,
    off: Option<&'static str>,
}

const fn settings(feature: Feature) -> Settings {
    use Feature as F;
    let (on, off) = match feature {
        F::Aggregated => (Some("give --role aggregated"), Some("leave --role aggregated out")),
        F::DecodeRadixCache => (Some("give --decode-radix-cache"), Some("give --no-decode-radix-cache")),
        F::PrefillRadixCache | F::CachedPagesSent => {
            (Some("give --prefill-radix-cache"), Some("give --no-prefill-radix-cache"))
        }
        F::EvictionPolicy => (Some("give --radix-eviction"), Some("leave --radix-eviction out")),
        F::HierarchicalCache => (Some("give --hierarchical-cache"), Some("give --no-hierarchical-cache")),
        F::StorageCache => (Some("give --hicache-storage"), Some("leave --hicache-storage out")),
        F::WindowRatio => (Some("give --swa-full-tokens-ratio"), Some("leave --swa-full-tokens-ratio out")),
        F::Speculation => (Some("give --speculate"), Some("leave --speculate out")),
        F::UnstagedGpuPools => (None, Some("leave --staging never and --staging-bytes 0 out")),
        F::NoPrefixCache => (None, Some("give --decode-radix-cache or --prefill-radix-cache")),
        // These features follow from the model, the machine or other settings.
        F::PdTransfer | F::SlidingWindow | F::LayerState | F::RemoteWorkers | F::SupervisedRestart => {
            (None, None)
        }
    };
    Settings { on, off }
}

/// The setting that turns a feature off, if there is one.
pub(super) fn off(feature: Feature) -> Option<&'static str> {
    settings(feature).off
}

/// Advice for a feature whose need of other features is not met.
pub(super) fn advice(feature: Feature, need: Need) -> String {
    let (ways, otherwise) = match need {
        Need::Also(other) => (vec![settings(other).on], "turn it on, too"),
        Need::AnyOf(others) => {
            (others.iter().map(|other| settings(*other).on).collect(), "turn one of them on, too")
        }
        Need::Without(other) => (vec![settings(other).off], "turn one of them off"),
        Need::Capability { .. } | Need::OnlyOne { .. } => (Vec::new(), "use another plugin"),
    };
    let mut ways: Vec<&str> = ways.into_iter().flatten().collect();
    ways.extend(settings(feature).off);
    if ways.is_empty() { otherwise.to_owned() } else { ways.join(", or ") }
}
