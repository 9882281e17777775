//! Turns a cluster file into configurations of the core.

use std::time::Duration;

use host_core::Config;
use host_core::heads::rank_heads;
use host_core::hierarchy::{HierarchyConfig, TierConfig, WritePolicy};
use host_core::layer_groups::{LayerGroups, Wish};
use host_core::layout::{Dtype, KvLayout, KvOrder, KvShape};
use host_core::radix::{PageHash, Policy as Eviction};
use host_sim::{Kv, Sliding};

use super::{Cluster, Link, Role, Workers, Write};
use crate::machine::Machine;
use crate::model::Model;

/// The number of token ids. Prompts and answers use all values of a u32, so that different texts differ in their first
/// token.
pub(crate) const VOCABULARY: u32 = u32::MAX;
/// A timeout that is longer than any simulation: without faults, no request is given up.
const FOREVER: Duration = Duration::from_secs(1_000_000_000);
/// The most pages of a pool.
const MOST_PAGES: f64 = 1e7;

impl Cluster {
    /// The model.
    ///
    /// # Panics
    /// When its name is unknown. [`parse`](Self::parse) refuses such clusters.
    #[must_use]
    pub fn model(&self) -> Model {
        self.model.find(&Model::PRESETS).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The link between workers.
    ///
    /// # Panics
    /// See [`model`](Self::model).
    #[must_use]
    pub fn link(&self) -> Link {
        self.link.find(&Link::PRESETS).unwrap_or_else(|error| panic!("{error}"))
    }

    /// One device of some workers.
    ///
    /// # Panics
    /// See [`model`](Self::model).
    #[must_use]
    pub fn machine(&self, workers: &Workers) -> Machine {
        workers.machine.find(&Machine::PRESETS).unwrap_or_else(|error| panic!("{error}"))
    }

    /// What the pages of all workers hold: names, and no contents.
    pub(crate) fn kv(&self) -> Kv {
        let model = self.model();
        let sliding =
            model.sliding.map(|sliding| Sliding { layers: sliding.layers, window: sliding.tokens as usize });
        let blank = Kv::blank(self.page_tokens as usize, VOCABULARY);
        Kv { layers: model.layers, sliding, ..blank }
    }

    /// Bytes of one page of the pool. It holds the layers that see all tokens, or as many sliding ones.
    #[must_use]
    pub fn page_bytes(&self) -> f64 {
        self.model().kv_bytes(self.kv) * f64::from(self.page_tokens)
    }

    /// How often the ranks of a worker together hold each KV head, on average. It is above 1 where there are more ranks than heads.
    #[must_use]
    pub fn held(&self, ranks: usize) -> f64 {
        let heads = self.model().kv_heads as usize;
        let held: usize = (0..ranks).map(|rank| rank_heads(heads, ranks, rank).len()).sum();
        held as f64 / heads as f64
    }

    /// Pages in the pool of each of these workers.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "cut off at the ends")]
    pub fn pool_pages(&self, workers: &Workers) -> u32 {
        if let Some(tokens) = workers.pool_tokens {
            return (tokens / self.page_tokens).min(MOST_PAGES as u32);
        }
        let memory = self.machine(workers).memory * workers.tp as f64 * workers.memory_share;
        let left = memory - self.model().weight_bytes(self.weights);
        (left / (self.page_bytes() * self.held(workers.tp))).clamp(0.0, MOST_PAGES) as u32
    }

    /// The core's configuration of these workers.
    pub(crate) fn config(&self, workers: &Workers, seed: u64) -> Config {
        let pages = self.pool_pages(workers);
        let window = self.kv().window();
        let positions = match window {
            None => pages.saturating_mul(self.page_tokens),
            Some(shape) => {
                let most = shape.most_positions(pages as usize, self.page_tokens as usize);
                u32::try_from(most).unwrap_or(u32::MAX)
            }
        };
        let role = match workers.role {
            Role::Prefill => host_core::Role::Prefill,
            Role::Decode => host_core::Role::Decode,
            Role::Aggregated => host_core::Role::Aggregated,
        };
        Config {
            role,
            pages,
            page_tokens: self.page_tokens,
            max_tokens: positions,
            vocabulary: VOCABULARY,
            chunk_tokens: workers.chunk_tokens,
            radix_cache: workers.radix_cache.then_some(Eviction::Lru),
            hierarchy: self.hierarchy(workers),
            cache_events: workers.radix_cache,
            identity: PageHash([0; 32]),
            reserved_decode_tokens: workers.reserved_decode_tokens,
            draft_tokens: 0,
            target_itl: workers.target_itl_ms.map(|target| Duration::from_secs_f64(target / 1e3)),
            share_transfers: self.share_transfers,
            seed,
            settles: true,
            window,
            layer_groups: self.layer_groups(pages),
            max_batch: workers.max_batch,
            max_running: workers.max_batch.saturating_mul(2),
            max_queued: workers.max_queued,
            max_attempts: 3,
            bootstrap_timeout: FOREVER,
            request_timeout: FOREVER,
            transfer_patience: FOREVER,
            peer_patience: FOREVER,
        }
    }

    /// Pages in the host memory of each of these workers.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "cut off at the ends")]
    pub(crate) fn slots(&self, workers: &Workers) -> u32 {
        (workers.host_memory_gib * f64::from(1 << 30) / (self.page_bytes() * self.held(workers.tp))) as u32
    }

    fn hierarchy(&self, workers: &Workers) -> Option<HierarchyConfig> {
        let bytes = self.page_bytes();
        let slots = self.slots(workers);
        if slots == 0 {
            return None;
        }
        let tiers = self.tiers.iter().map(|tier| TierConfig {
            writes: true,
            latency: Duration::from_secs_f64(tier.latency_us / 1e6),
            bytes_per_second: tier.gigabytes_per_second * 1e9,
        });
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size of memory")]
        let mut config = HierarchyConfig::new(slots, bytes as u64, tiers.collect());
        config.write = match workers.write {
            Write::WriteThrough => WritePolicy::WriteThrough,
            Write::WriteThroughSelective => WritePolicy::WriteThroughSelective,
            Write::WriteBack => WritePolicy::WriteBack,
        };
        Some(config)
    }

    /// The pool of a rank with so many pages and heads. The core knows no type of one byte, so a row in FP8 counts as half as
    /// many numbers of two bytes.
    pub(crate) fn kv_shape(&self, pages: usize, heads: usize) -> KvShape {
        let model = self.model();
        let (dtype, dim) = match self.kv {
            crate::model::Dtype::F32 => (Dtype::F32, model.head_dim),
            crate::model::Dtype::Bf16 => (Dtype::Bf16, model.head_dim),
            crate::model::Dtype::Fp8 => (Dtype::Bf16, model.head_dim.div_ceil(2)),
        };
        let (layers, page_tokens, dim) = (model.layers as usize, self.page_tokens as usize, dim as usize);
        KvShape { pages, heads, layers, page_tokens, head_dim: dim, value_dim: dim, dtype }
    }

    fn layer_groups(&self, pages: u32) -> LayerGroups {
        let model = self.model();
        if self.layer_groups == 1 {
            return LayerGroups::off(model.layers);
        }
        let shape = self.kv_shape(pages as usize, model.kv_heads as usize);
        let layout = KvLayout::new(shape, KvOrder::PageLayerHeadKvTokenDim);
        LayerGroups::new(Wish::Groups(self.layer_groups), &layout)
            .unwrap_or_else(|error| panic!("layer_groups was checked: {error}"))
    }
}
