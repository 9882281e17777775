//! Where every page of a worker is: one interface over pool, radix tree, offload tiers, windows and quarantine.
//!
//! The [scheduler](crate::scheduler) knows requests, and this module knows pages. Each request has a [`Holding`], whose
//! pages only this module changes. The scheduler passes a request's tokens as [`Tokens`].
//!
//! ```text
//!             fetch            probe            admit
//!  waiting ──────────► tiers ─────────► Prefix ───────► Holding ─── extend, keep, keep_computed
//!                                                          │
//!                     ┌────────── give_back (preempted) ◄──┤
//!                     ▼                                    ▼ release (ended)
//!                  waiting                    free, cached, or in quarantine until nothing touches them
//! ```
//!
//! | Operation | What it does |
//! | --- | --- |
//! | [`fetch`](Cache::fetch) | asks the offload tiers for pages of a waiting request that the pool lacks |
//! | [`probe`](Cache::probe) | finds and locks the cached prefix that a waiting request may use |
//! | [`forgo`](Cache::forgo) | lets go of the prefix that `probe` locked |
//! | [`need`](Cache::need), [`can_have`](Cache::can_have), [`make_free`](Cache::make_free) | count pages, and evict for them |
//! | [`admit`](Cache::admit) | gives a request its pages and begins to restore pages from the offload tiers |
//! | [`restored`](Cache::restored) | updates the state of a request's restore, and says whether it has ended |
//! | [`continue_at`](Cache::continue_at) | lets a request continue behind the pages that it has |
//! | [`extend`](Cache::extend) | adds pages to a running request |
//! | [`keep`](Cache::keep), [`keep_computed`](Cache::keep_computed) | give computed pages to the radix tree, and to the offload tiers by policy |
//! | [`write_back`](Cache::write_back) | evicts and saves pages before their space is needed |
//! | [`give_up_saves`](Cache::give_up_saves) | takes pages back from copies that have not begun |
//! | [`give_back`](Cache::give_back) | takes all pages of a preempted request |
//! | [`release`](Cache::release) | takes all pages of an ended request, into quarantine where something may touch them |
//!
//! free + held + cached + quarantined pages are all pages of the pool, always: [`Cache::audit`] checks it.

mod admit;
mod holding;
mod keep;
mod pages;
mod prefix;
mod quarantine;
mod release;
mod save;
mod tiers;
mod window;

#[cfg(test)]
mod tests;

use crate::config::Config;
use crate::hierarchy::{Hierarchy, HierarchyStats, TierStats};
use crate::ids::Time;
use crate::pool::{Component, HeldPages, PagePool, PageSource, PoolCounts, PoolLimits};
use crate::radix::{CacheChanges, CacheEvent, PageHash, RadixTree, TreeConfig, TreeCounts};
use crate::window::WindowShape;

pub(crate) use admit::Need;
pub(crate) use holding::{Holding, Restore, Tokens};
pub(crate) use pages::Pages;
pub(crate) use prefix::Prefix;
use quarantine::Quarantine;
pub(crate) use quarantine::Touches;

/// Namespaces at most, whatever the size of the pool.
const NAMESPACES: usize = 1 << 16;

/// The pages of one worker.
#[derive(Debug)]
pub(crate) struct Cache {
    page_tokens: usize,
    /// Digest that enters all page names of this worker, beside namespace and tokens.
    identity: PageHash,
    /// Shape of the window, for a model with sliding layers.
    window: Option<WindowShape>,
    /// Whether a peer sends new requests the KV that the cache lacks. Only after a preemption they compute it here.
    is_sent: bool,
    pool: PagePool,
    /// Cached prefixes, if the worker keeps any.
    tree: Option<RadixTree>,
    /// The offload tiers, if there are any.
    tiers: Option<Hierarchy>,
    /// Changes of the tree since the last tick.
    changes: CacheChanges,
    quarantine: Quarantine,
}

/// Numbers of pages after a cache was emptied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flushed {
    /// Pages that are free now.
    pub freed: usize,
    /// Pages that requests use. They are free when these requests end.
    pub in_use: usize,
}

impl Cache {
    pub(crate) fn new(config: &Config, limits: PoolLimits, source: Option<Box<dyn PageSource>>) -> Self {
        let tree = |policy| {
            RadixTree::new(&TreeConfig {
                page_tokens: config.page_tokens,
                policy,
                identity: config.identity,
                // Each kept namespace has a page or a running request. So while both together are at most `NAMESPACES`, no
                // client can use up all namespaces.
                max_namespaces: NAMESPACES.min(config.pages as usize + config.max_running as usize),
                seed: config.seed,
            })
        };
        Self {
            page_tokens: config.page_tokens as usize,
            identity: config.identity,
            window: config.window,
            is_sent: config.role.receives_kv(),
            pool: PagePool::open(limits, source),
            tree: config.radix_cache.map(tree),
            tiers: config
                .hierarchy
                .clone()
                .map(|tiers| Hierarchy::new(tiers, config.page_tokens, config.chunk_tokens)),
            changes: CacheChanges::new(config.cache_events),
            quarantine: Quarantine::default(),
        }
    }

    /// Pages that hold so many positions.
    #[inline]
    pub(crate) fn pages_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.page_tokens)
    }

    /// Where the pages of the pool are.
    pub(crate) fn counts(&self) -> PoolCounts {
        self.pool.counts()
    }

    /// The fault for which the allocator was disabled. Since then the pool chooses pages itself.
    pub(crate) fn page_source_fault(&self) -> Option<&str> {
        self.pool.fault()
    }

    /// Counts of the radix tree. Without a tree all are zero.
    pub(crate) fn tree_counts(&self) -> TreeCounts {
        self.tree.as_ref().map(RadixTree::counts).unwrap_or_default()
    }

    /// Counters of the offload tiers. Without any tiers all are zero.
    pub(crate) fn hierarchy_stats(&self) -> HierarchyStats {
        self.tiers.as_ref().map(Hierarchy::stats).unwrap_or_default()
    }

    /// Counters of each storage tier, in their order.
    pub(crate) fn tier_stats(&self) -> Vec<TierStats> {
        self.tiers.as_ref().map(Hierarchy::tier_stats).unwrap_or_default()
    }

    /// Ended requests whose pages are in quarantine.
    pub(crate) fn quarantined(&self) -> usize {
        self.quarantine.len()
    }

    /// Whether nothing is on its way to or from the offload tiers.
    pub(crate) fn is_idle(&self) -> bool {
        self.tiers.as_ref().is_none_or(Hierarchy::is_idle)
    }

    /// When the offload tiers need a tick if nothing happens before.
    pub(crate) fn next_deadline(&self) -> Option<Time> {
        self.tiers.as_ref().and_then(Hierarchy::next_deadline)
    }

    /// Changes of the radix tree since the last call. `None` if there are none, or if cache events are off.
    pub(crate) fn take_changes(&mut self) -> Option<Vec<CacheEvent>> {
        self.changes.take()
    }

    /// The whole radix tree as events.
    pub(crate) fn contents(&self) -> Vec<CacheEvent> {
        let mut changes = CacheChanges::new(true);
        if let Some(tree) = &self.tree {
            tree.contents(&mut changes);
        }
        changes.take().unwrap_or_default()
    }

    /// Empties the radix tree and the host memory tier. Storage keeps its pages. Pages that requests use stay for them, and no
    /// other request finds them. They are free when the last of these requests ends. `None` without a radix tree.
    pub(crate) fn flush(&mut self) -> Option<Flushed> {
        let tree = self.tree.as_mut()?;
        let pages = tree.clear(&mut self.changes);
        let freed = pages.ids().len();
        self.pool.release_cached(pages);
        if let Some(tiers) = &mut self.tiers {
            tiers.clear();
        }
        Some(Flushed { freed, in_use: tree.counts().pages + tree.counts().window_pages })
    }

    /// Recounts every page. `holdings` must be the holdings of all requests.
    ///
    /// # Panics
    /// When a page is counted twice or not at all.
    pub(crate) fn audit<'a>(&self, holdings: impl Iterator<Item = &'a Holding> + Clone) {
        self.pool.audit();
        let count = |pages: &Option<HeldPages>| pages.as_ref().map_or(0, |pages| pages.ids().len());
        let of = |kv: &Holding| count(&kv.held) + count(&kv.spare) + kv.window.own.ids().len();
        let held: usize = holdings.clone().map(of).sum();
        assert_eq!(held, self.pool.counts().held, "every held page has a request");
        if let Some(tree) = &self.tree {
            tree.audit();
            let cached = tree.counts().pages + tree.counts().window_pages;
            assert_eq!(cached, self.pool.counts().cached, "every cached page is in the tree");
            let saves = self.tiers.as_ref().map_or(0, Hierarchy::locks);
            let locks = holdings.filter(|kv| kv.lock.is_some()).count() + self.quarantine.locks() + saves;
            assert_eq!(
                tree.counts().locks,
                locks,
                "every lock has a request, pages in quarantine, or a copy"
            );
        }
        let evicted = self.tiers.as_ref().map_or(0, Hierarchy::evicted_pages);
        assert_eq!(
            self.quarantine.pages() + evicted,
            self.pool.counts().quarantined,
            "every page in quarantine has an entry or a copy"
        );
        if let Some(tiers) = &self.tiers {
            tiers.audit();
        }
    }

    /// Whether so many pages are free or can be evicted (cached pages that no request uses), within each component's
    /// limit.
    pub(crate) fn can_have(&self, pages: Pages) -> bool {
        let (full, window) = self.tree.as_ref().map_or((0, 0), RadixTree::evictable_parts);
        let within = |component, wanted, evictable| {
            self.pool.used(component) + wanted <= self.pool.limits().of(component) as usize + evictable
        };
        within(Component::Full, pages.full, full)
            && within(Component::Window, pages.window, window)
            && pages.full + pages.window <= self.pool.counts().free + full + window
    }

    /// Evicts cached pages until so many are free.
    pub(crate) fn make_free(&mut self, pages: Pages) {
        if self.pool.fits(pages.full, pages.window) {
            return;
        }
        let over = |pool: &PagePool, component, wanted: usize| {
            let limit = pool.limits().of(component) as usize;
            // A component whose limit is the whole pool needs no eviction of its own: `evict_now` covers what the pool
            // lacks.
            let over = (pool.used(component) + wanted).saturating_sub(limit);
            if limit == pool.total() { 0 } else { over }
        };
        let full = over(&self.pool, Component::Full, pages.full);
        let window = over(&self.pool, Component::Window, pages.window);
        if let Some(tree) = &mut self.tree {
            let windows = tree.evict_windows_named(window);
            let saving = self.tiers.as_mut().filter(|tiers| tiers.saves_evicted());
            if let Some(tiers) = saving {
                let names = windows.iter().flat_map(|(names, _)| names);
                let dropped = names.filter(|name| !tiers.has(name)).count();
                tiers.stats_mut().dropped += dropped as u64;
            }
            windows.into_iter().for_each(|(_, pages)| self.pool.release_cached(pages));
            self.pool.release_cached(tree.evict_pages(full, &mut self.changes));
        }
        let missing = (pages.full + pages.window).saturating_sub(self.pool.counts().free);
        if missing > 0 {
            self.evict_now(missing);
        }
    }
}
