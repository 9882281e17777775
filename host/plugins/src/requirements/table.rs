//! The compatibility table: the needs of every feature, with reasons. `host plugins rules` prints it.

use host_plugin_api::capability as can;

use super::{Feature, Need, Rule};

const fn transfer(rule: &'static str, feature: Feature, name: &'static str, reason: &'static str) -> Rule {
    Rule { name: rule, feature, need: Need::Capability { role: "transfer", name }, reason }
}

const fn tier(rule: &'static str, feature: Feature, name: &'static str, reason: &'static str) -> Rule {
    Rule { name: rule, feature, need: Need::Capability { role: "tier", name }, reason }
}

const fn allocator(rule: &'static str, feature: Feature, name: &'static str, reason: &'static str) -> Rule {
    Rule { name: rule, feature, need: Need::Capability { role: "allocator", name }, reason }
}

const fn with(name: &'static str, feature: Feature, other: Feature, reason: &'static str) -> Rule {
    Rule { name, feature, need: Need::Also(other), reason }
}

const fn with_one(
    name: &'static str,
    feature: Feature,
    others: &'static [Feature],
    reason: &'static str,
) -> Rule {
    Rule { name, feature, need: Need::AnyOf(others), reason }
}

const fn one(name: &'static str, feature: Feature, role: &'static str, reason: &'static str) -> Rule {
    Rule { name, feature, need: Need::OnlyOne { role }, reason }
}

const fn without(name: &'static str, feature: Feature, other: Feature, reason: &'static str) -> Rule {
    Rule { name, feature, need: Need::Without(other), reason }
}

/// The table of rules.
pub const RULES: &[Rule] = &[
    transfer(
        "pd-page-writes",
        Feature::PdTransfer,
        can::PAGE_WRITES,
        "prefill writes pages into the decode worker's pool",
    ),
    transfer(
        "pd-arrival",
        Feature::PdTransfer,
        can::ARRIVAL_NOTIFICATION,
        "decode must not read a page before its data is there",
    ),
    transfer(
        "decode-radix-settled",
        Feature::DecodeRadixCache,
        can::SETTLED,
        "pages in the tree outlive the request, also one that was aborted during its transfer",
    ),
    transfer(
        "prefill-radix-settled",
        Feature::CachedPagesSent,
        can::SETTLED,
        "pages in the tree are evicted and used again, also those that a transfer was reading when it was aborted",
    ),
    transfer(
        "gpu-pools-vram",
        Feature::UnstagedGpuPools,
        can::VRAM,
        "pages of a pool in a GPU's memory reach other workers through staging memory, or by a plugin that reaches a GPU's memory",
    ),
    without(
        "tiers-need-cache",
        Feature::HierarchicalCache,
        Feature::NoPrefixCache,
        "lower tiers extend the prefix cache that is switched off",
    ),
    with(
        "storage-through-host",
        Feature::StorageCache,
        Feature::HierarchicalCache,
        "pages reach storage through host memory",
    ),
    tier(
        "storage-settled",
        Feature::StorageCache,
        can::SETTLED,
        "a failed restore's pages are reused only when the tier touches them no more",
    ),
    allocator(
        "window-allocator",
        Feature::SlidingWindow,
        can::WINDOW,
        "layers with a window have pages of their own, given back behind it",
    ),
    allocator(
        "state-allocator",
        Feature::LayerState,
        can::STATE,
        "layers with a state have pages of their own, which each sequence has a fixed number of",
    ),
    with(
        "ratio-needs-window",
        Feature::WindowRatio,
        Feature::SlidingWindow,
        "--swa-full-tokens-ratio divides the pool between full and sliding layers, and is left out for a model without any",
    ),
    without(
        "speculation-no-state",
        Feature::Speculation,
        Feature::LayerState,
        "what a state has taken in cannot be taken out of it again when a guess was wrong",
    ),
    transfer(
        "remote-workers",
        Feature::RemoteWorkers,
        can::MULTI_HOST,
        "a worker's address is on another machine",
    ),
    transfer(
        "restart-reachable",
        Feature::SupervisedRestart,
        can::PEER_RESTART,
        "a worker that is started again must be reachable again",
    ),
    one(
        "pd-one-transfer",
        Feature::PdTransfer,
        "transfer",
        "a worker has one way to its peers, and two workers must use the same",
    ),
    without(
        "aggregated-no-decode-radix",
        Feature::Aggregated,
        Feature::DecodeRadixCache,
        "there is no decode worker; --prefill-radix-cache is the cache of an aggregated one",
    ),
    with_one(
        "eviction-needs-cache",
        Feature::EvictionPolicy,
        &[Feature::DecodeRadixCache, Feature::PrefillRadixCache],
        "there is nothing to evict from",
    ),
];
