//! The workers of these tests, and the faults around them.

use std::time::Duration;

use host_core::hierarchy::{HierarchyConfig, PrefetchPolicy, TierConfig, WritePolicy};
use host_core::layer_groups::LayerGroups;
use host_core::layout::KvOrder;
use host_core::pool::PoolLimits;
use host_core::radix::Policy;
use host_core::{Config, Role};
use host_sim::{Faults, Kv, Sliding, layer_groups};

/// Layers of a page.
pub const LAYERS: u32 = 5;
/// Tokens of a page.
pub const PAGE_TOKENS: usize = 4;
/// Token ids are below this, unless requests draft.
const VOCABULARY: u32 = 50;
/// Tokens of the longest request.
const LONGEST: usize = 64;

/// How likely each mishap is (see [`Faults`]), and what the workers and their clients do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scene {
    pub loss: f64,
    pub repeat: f64,
    pub flip: f64,
    pub death: f64,
    pub disconnect: f64,
    pub executor: f64,
    pub flush: f64,
    pub tier: f64,
    pub copy: f64,
    /// Per draw: the tokens that may follow are not known in time.
    pub late_draw: f64,
    /// Per request: its client leaves, at any time.
    pub abort: f64,
    /// Whether prefill sends pages in groups of layers.
    pub layers: bool,
    /// Whether answers are long and few pages are reserved for them, so that requests are preempted.
    pub pressure: bool,
    /// Whether a target for the time between tokens lets few requests decode at once.
    pub paced: bool,
    /// Whether both workers keep their pages for requests that begin alike.
    pub cache: bool,
    /// Whether a client continues the conversation after an answer, two times in three.
    pub talk: bool,
    /// Whether the transfer backend does not prove that writes have settled.
    pub unproven: bool,
    /// Whether both workers have offload tiers.
    pub offload: bool,
    /// When pages are written to offload tiers.
    pub write: WritePolicy,
    /// How long requests wait for pages from storage.
    pub prefetch: PrefetchPolicy,
    /// Whether half of the requests have the same prompt.
    pub alike: bool,
    /// Whether some layers of the model see the newest tokens only.
    pub window: bool,
    /// Whether many requests continue from some position in one of two prompts, and few layers have short windows.
    pub forks: bool,
    /// Whether workers draft tokens. The vocabulary then has two tokens, so that some drafts are right.
    pub drafts: bool,
}

impl Scene {
    /// Every fault between two workers and their clients, each often enough to occur together with the others.
    pub fn of_every_kind() -> Self {
        Self {
            loss: 0.2,
            repeat: 0.2,
            abort: 0.3,
            flip: 0.05,
            death: 0.005,
            disconnect: 0.005,
            ..Self::default()
        }
    }

    /// The scene's faults. Half of all writes are staged, half are read early, and a fifth of the news of layers is lost.
    pub fn faults(self) -> Faults {
        let Self { loss, repeat, flip, death, disconnect, executor, flush, tier, copy, late_draw, .. } = self;
        let decode_death = 0.0;
        let (news, staged, read_early) = (0.2, 0.5, 0.5);
        Faults {
            loss,
            repeat,
            flip,
            death,
            decode_death,
            disconnect,
            executor,
            news,
            flush,
            tier,
            copy,
            late_draw,
            staged,
            read_early,
            ..Faults::default()
        }
    }

    /// The model's KV. Windows are shorter than a page, some pages long, or longer than most prompts. Where many requests fork, one
    /// to three layers have windows of one to about two pages.
    pub fn kv(self, seed: u64) -> Kv {
        let some = || {
            let windows = [1, 2, 4, 5, 9, 12, 30];
            Sliding { layers: 1 + (seed / 7 % 7) as u32, window: windows[(seed % 7) as usize] }
        };
        let few = || Sliding { layers: 1 + (seed / 3 % 3) as u32, window: [4, 6, 9][(seed % 3) as usize] };
        let sliding = self.window.then(|| if self.forks { few() } else { some() });
        let vocabulary = self.vocabulary();
        Kv { page_tokens: PAGE_TOKENS, layers: LAYERS, vocabulary, sliding, words: true }
    }

    /// Token ids are below this.
    pub fn vocabulary(self) -> u32 {
        if self.drafts { 2 } else { VOCABULARY }
    }

    /// Pages of the pool that the longest request takes for its window.
    pub fn window_pages(kv: &Kv) -> u32 {
        let least = kv.window().map(|shape| shape.least_pages(LONGEST, PAGE_TOKENS) - LONGEST / PAGE_TOKENS);
        least.unwrap_or(0) as u32
    }

    /// A worker of so many pages.
    pub fn worker(self, seed: u64, role: Role, pages: u32) -> (Config, PoolLimits) {
        let kv = self.kv(seed);
        let layer_groups = match self.layers {
            true => layer_groups(KvOrder::PageLayerHeadKvTokenDim, LAYERS, 4, 2 + (seed % 4) as u32),
            false => LayerGroups::off(LAYERS),
        };
        let config = Config {
            max_tokens: LONGEST as u32,
            vocabulary: kv.vocabulary,
            chunk_tokens: 7,
            draft_tokens: if self.drafts { 1 + (seed % 9) as u32 } else { 0 },
            radix_cache: self.cache.then_some(Policy::Lru),
            hierarchy: self.offload.then(|| self.tiers(pages)),
            cache_events: true,
            reserved_decode_tokens: if self.pressure { 2 } else { 1_000 },
            target_itl: self.paced.then_some(Duration::from_millis(12)),
            settles: !self.unproven,
            window: kv.window(),
            layer_groups,
            max_batch: 3,
            max_running: 5,
            request_timeout: Duration::from_secs(600),
            peer_patience: Duration::from_secs(20),
            ..host_sim::config(role, pages)
        };
        // Half of the workers with windows divide their pool: the longest request fits exactly, and few requests at once.
        let limits = match kv.window().filter(|_| pages.is_multiple_of(2)) {
            Some(shape) => {
                let window = shape.parts * (shape.most_kept(1, PAGE_TOKENS) as u32 + 1);
                PoolLimits { total: pages, full: pages.min(19), window }
            }
            None => PoolLimits::shared(pages),
        };
        (config, limits)
    }

    /// Host memory that is smaller or larger than the pool, and two tiers that take so few bytes at once that every batch has to
    /// wait for its turn.
    fn tiers(self, pages: u32) -> HierarchyConfig {
        let tier = |writes| TierConfig { writes, latency: Duration::from_millis(2), bytes_per_second: 1e6 };
        let tiers = vec![tier(true), tier(pages.is_multiple_of(2))];
        HierarchyConfig {
            write: self.write,
            write_back_ahead: 4,
            prefetch: self.prefetch,
            wait_base: Duration::from_millis(200),
            wait_per_1024_tokens: Duration::from_secs(1),
            longest_wait: Duration::from_secs(3),
            batch_pages: 3,
            read_bytes: 4_000,
            write_bytes: 4_000,
            copy_bytes: 5_000,
            questions: 2,
            queued_writes: 8,
            ..HierarchyConfig::new(pages * 7 % 48 + 4, 1_000, tiers)
        }
    }
}
