//! The compatibility table: what every feature asks of plugins and of other features, and why. `host plugins rules`
//! prints it.

use host_plugin_api::capability as can;

use super::{Feature, Need, Rule};

const fn transfer(feature: Feature, name: &'static str, reason: &'static str) -> Rule {
    Rule { feature, need: Need::Capability { role: "transfer", name }, reason }
}

const fn tier(feature: Feature, name: &'static str, reason: &'static str) -> Rule {
    Rule { feature, need: Need::Capability { role: "tier", name }, reason }
}

const fn allocator(feature: Feature, name: &'static str, reason: &'static str) -> Rule {
    Rule { feature, need: Need::Capability { role: "allocator", name }, reason }
}

const fn with(feature: Feature, other: Feature, reason: &'static str) -> Rule {
    Rule { feature, need: Need::Also(other), reason }
}

const fn without(feature: Feature, other: Feature, reason: &'static str) -> Rule {
    Rule { feature, need: Need::Without(other), reason }
}

/// The table.
pub const RULES: &[Rule] = &[
    transfer(Feature::PdTransfer, can::PAGE_WRITES, "prefill writes pages into the decode worker's pool"),
    transfer(
        Feature::PdTransfer,
        can::ARRIVAL_NOTIFICATION,
        "decode must not read a page before its data is there",
    ),
    transfer(
        Feature::PdTransfer,
        can::SETTLED,
        "pages of a write that failed are reused only when nothing of it is in flight any more",
    ),
    transfer(
        Feature::PagesOutliveRequests,
        can::SETTLED,
        "a page is reused only when no write to it can still land",
    ),
    transfer(
        Feature::DecodeRadixCache,
        can::PAGE_WRITES,
        "only the pages that decode lacks are sent, wherever they lie",
    ),
    transfer(
        Feature::DecodeRadixCache,
        can::ARRIVAL_NOTIFICATION,
        "a page enters the tree when its data is there",
    ),
    transfer(
        Feature::DecodeRadixCache,
        can::SETTLED,
        "pages in the tree outlive the request, also one that was aborted during its transfer",
    ),
    without(
        Feature::DecodeRadixCache,
        Feature::NoPrefixCache,
        "the tree is the prefix cache that is switched off",
    ),
    transfer(
        Feature::Retraction,
        can::SETTLED,
        "a retracted request's pages go to others while its transfer may still run",
    ),
    transfer(
        Feature::HierarchicalCache,
        can::SETTLED,
        "pages move between tiers after the request that received them",
    ),
    without(
        Feature::HierarchicalCache,
        Feature::NoPrefixCache,
        "lower tiers extend the prefix cache that is switched off",
    ),
    with(Feature::StorageCache, Feature::HierarchicalCache, "pages reach storage through host memory"),
    tier(
        Feature::StorageCache,
        can::SETTLED,
        "a failed restore's pages are reused only when the tier touches them no more",
    ),
    with(Feature::SharedStorage, Feature::StorageCache, "there must be a storage tier to share"),
    tier(Feature::SharedStorage, can::SHARED, "workers look for pages that another machine stored"),
    with(Feature::PersistentStorage, Feature::StorageCache, "there must be a storage tier that persists"),
    tier(Feature::PersistentStorage, can::PERSISTENT, "pages are looked for after a restart"),
    allocator(
        Feature::SlidingWindow,
        can::WINDOW,
        "layers with a window have pages of their own, given back behind it",
    ),
    with(Feature::WindowTail, Feature::SlidingWindow, "only a window has a tail"),
    allocator(
        Feature::WindowTail,
        can::TAIL_EXTEND,
        "decode takes pages for the window's tail alone, not for the whole prompt",
    ),
    transfer(Feature::DeviceMemory, can::VRAM, "the pools lie in device memory"),
    transfer(Feature::RemoteWorkers, can::MULTI_HOST, "a worker's address is on another machine"),
    transfer(
        Feature::SupervisedRestart,
        can::PEER_RESTART,
        "a worker that is started again must be reachable again",
    ),
];
