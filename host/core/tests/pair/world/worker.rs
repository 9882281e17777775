//! One worker process.

use std::collections::BTreeMap;
use std::time::Duration;

use host_core::aux_row::AUX_ROW_BYTES;
use host_core::hierarchy::{HierarchyConfig, TierConfig};
use host_core::layer_groups::{LayerGroups, Wish};
use host_core::layout::{Dtype, KvLayout, KvOrder, KvShape};
use host_core::pool::PoolLimits;
use host_core::radix::Policy;
use host_core::routing::EventLog;
use host_core::{Batch, Config, Instance, Role, Room, Scheduler, Time};

use super::super::memory::{LAYERS, Memory, PAGE_TOKENS, VOCABULARY};
use super::super::sliding::Sliding;
use super::Faults;

/// The rule that cuts every chunk into so many groups of layers.
pub fn groups(count: u32) -> LayerGroups {
    let shape = KvShape {
        pages: 1,
        heads: 1,
        layers: LAYERS as usize,
        page_tokens: PAGE_TOKENS,
        head_dim: 1,
        value_dim: 1,
        dtype: Dtype::F32,
    };
    let layout = KvLayout::new(shape, KvOrder::PageLayerHeadKvTokenDim);
    LayerGroups::new(Wish::Groups(count), &layout).unwrap_or_else(|error| panic!("{error}"))
}

/// Slots of a worker with so many pages: fewer or more than these.
fn slots(pages: u32) -> u32 {
    pages * 7 % 48 + 4
}

/// Two tiers, with room for so little at once that everything has to wait for its turn.
fn below(faults: Faults, pages: u32) -> HierarchyConfig {
    let tier = |writes| TierConfig { writes, latency: Duration::from_millis(2), bytes_per_second: 1e6 };
    HierarchyConfig {
        write: faults.write,
        write_back_ahead: 4,
        prefetch: faults.prefetch,
        wait_base: Duration::from_millis(200),
        wait_per_1024_tokens: Duration::from_secs(1),
        longest_wait: Duration::from_secs(3),
        batch_pages: 3,
        read_bytes: 4_000,
        write_bytes: 4_000,
        copy_bytes: 5_000,
        questions: 2,
        queued_writes: 8,
        ..HierarchyConfig::new(slots(pages), 1_000, vec![tier(true), tier(pages.is_multiple_of(2))])
    }
}

/// One worker process: its scheduler and its memory.
pub struct Worker {
    pub instance: Instance,
    pub scheduler: Scheduler,
    pub memory: Memory,
    /// Slots of host memory.
    pub host: Memory,
    pub aux: Vec<[u8; AUX_ROW_BYTES]>,
    pub batch: Option<(Time, Batch)>,
    /// Layers of the batch that are computed.
    pub layers: u32,
    /// What prefill said of the parts that arrived, by room, attempt and sequence.
    pub sent_sums: BTreeMap<(Room, u32), BTreeMap<u32, u64>>,
    /// What somebody who listens knows of the cache.
    pub log: EventLog,
}

impl Worker {
    pub fn new(
        instance: Instance,
        role: Role,
        pages: u32,
        faults: Faults,
        layer_groups: LayerGroups,
        sliding: Option<Sliding>,
    ) -> Self {
        let config = Config {
            role,
            pages,
            page_tokens: PAGE_TOKENS as u32,
            max_tokens: 64,
            vocabulary: VOCABULARY,
            chunk_tokens: 7,
            radix_cache: faults.cache.then_some(Policy::Lru),
            hierarchy: faults.below.then(|| below(faults, pages)),
            cache_events: true,
            identity: host_core::radix::PageHash([0; 32]),
            reserved_decode_tokens: if faults.pressure { 2 } else { 1_000 },
            target_itl: faults.paced.then_some(Duration::from_millis(12)),
            seed: 5,
            window: sliding.map(Sliding::shape),
            layer_groups,
            max_batch: 3,
            max_running: 5,
            max_queued: 100,
            max_attempts: 3,
            bootstrap_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(600),
            peer_patience: Duration::from_secs(20),
        };
        // Half of the workers with windows divide their pages.
        let limits = match sliding.filter(|_| pages.is_multiple_of(2)) {
            Some(sliding) => sliding.limits(pages),
            None => PoolLimits::shared(pages),
        };
        Self {
            instance,
            scheduler: Scheduler::with_pages(config, limits, None),
            memory: Memory::new(pages, sliding),
            host: Memory::new(slots(pages), None),
            aux: vec![[0; AUX_ROW_BYTES]; 5],
            batch: None,
            layers: 0,
            sent_sums: BTreeMap::new(),
            log: EventLog::new(pages, PAGE_TOKENS as u32, 100),
        }
    }

    /// Holds what was told of the cache, change by change, against what is there.
    pub fn check_told(&self) {
        let pool = self.scheduler.stats().pool;
        let pages = pool.free + pool.held + pool.cached + pool.quarantined;
        let mut told = EventLog::new(pages as u32, PAGE_TOKENS as u32, 0);
        self.scheduler.cache_contents().iter().for_each(|event| told.record(event));
        assert_eq!(
            self.log.snapshot().keys,
            told.snapshot().keys,
            "{:?}: what was told of its cache",
            self.instance
        );
    }
}
