//! The parts of a worker.

use std::sync::Arc;

use host_core::{Config, Instance};
use host_executor::{Executor, KvMemory};
use host_plugin_api::transfer::TransferBackend;
use host_wire::proto::KvIdentity;

use super::{Grammars, OffloadTiers, Pages, StagingSettings};

/// Everything that a worker needs to start.
pub struct Parts {
    /// Its name for people: "prefill-0".
    pub name: String,
    /// Limits and policies.
    pub config: Config,
    /// The identity of its KV.
    pub identity: KvIdentity,
    /// The allocator of its pool's pages.
    pub pages: Pages,
    /// The transfer plugin's name, or `None` for aggregated workers.
    pub transfer: Option<String>,
    /// Whether the transfer plugin declares that it registers the memory of devices.
    pub vram: bool,
    /// The tensor-parallel ranks, at least one.
    pub ranks: Vec<RankParts>,
    /// The worker's instance: random, new at every start.
    pub instance: Instance,
    /// The offload tiers. They are there when [`Config::hierarchy`] is.
    pub offload: Option<OffloadTiers>,
    /// Whether pages are digested on both ends of a transfer.
    pub page_integrity: bool,
    /// Grammars of requests, or `None` if tokens are drawn from no model's vocabulary.
    pub grammars: Option<Arc<Grammars>>,
    /// When pages go through staging memory, and how much staging memory there is.
    pub staging: StagingSettings,
}

/// The parts of one tensor-parallel rank.
pub struct RankParts {
    /// The executor.
    pub executor: Box<dyn Executor>,
    /// Its pool: all pages, and of each the heads that this rank holds ([`host_core::heads::rank_heads`]).
    pub kv: KvMemory,
    /// The rank's own instance of the transfer plugin, or `None` for aggregated workers.
    pub transfer: Option<Arc<dyn TransferBackend>>,
}
