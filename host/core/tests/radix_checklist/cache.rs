//! A tree with its pool and its events.

use host_core::ids::PageId;
use host_core::pool::{HeldPages, PagePool, PoolCounts};
use host_core::radix::{
    EventSink, Inserted, Namespace, NamespaceKey, PageHash, Policy, PrefixLock, RadixTree, TreeConfig,
    TreeCounts, TreeEvent,
};

pub const PAGE: usize = 4;

/// A tree with its pool and its events.
pub struct Cache {
    pub pool: PagePool,
    pub tree: RadixTree,
    pub namespace: Namespace,
    pub told: Vec<(u64, String)>,
}

pub struct Log<'a>(pub &'a mut Vec<(u64, String)>);

impl EventSink for Log<'_> {
    fn event(&mut self, sequence: u64, event: TreeEvent<'_>) {
        self.0.push((sequence, format!("{event:?}")));
    }
}

impl Cache {
    pub fn new(pages: u32) -> Self {
        Self::with(pages, Policy::Lru)
    }

    pub fn with(pages: u32, policy: Policy) -> Self {
        let config = TreeConfig {
            page_tokens: PAGE as u32,
            policy,
            identity: PageHash([9; 32]),
            max_namespaces: 3,
            seed: 11,
        };
        let mut tree = RadixTree::new(&config);
        let namespace = tree.namespace(&NamespaceKey::default()).unwrap();
        Self { pool: PagePool::new(pages), tree, namespace, told: Vec::new() }
    }

    pub fn lock(&mut self, tokens: &[u32]) -> PrefixLock {
        self.tree.lock(self.namespace, tokens)
    }

    pub fn insert(&mut self, lock: PrefixLock, tokens: &[u32], owned: HeldPages) -> Inserted {
        let inserted = self.tree.insert(&mut self.pool, lock, tokens, owned, 0, &mut Log(&mut self.told));
        self.audit();
        inserted
    }

    /// Inserts the pages of `tokens` that are not cached yet. The lock stays.
    pub fn fill(&mut self, tokens: &[u32]) -> PrefixLock {
        let lock = self.lock(tokens);
        let owned = self.pool.allocate(tokens.len() / PAGE - lock.pages()).unwrap();
        let Inserted { lock, duplicates, rest, .. } = self.insert(lock, tokens, owned);
        assert!(duplicates.ids().is_empty() && rest.ids().is_empty());
        self.pool.release(duplicates);
        self.pool.release(rest);
        lock
    }

    pub fn remember(&mut self, tokens: &[u32]) {
        let lock = self.fill(tokens);
        self.tree.unlock(lock);
    }

    pub fn pages(&self, lock: &PrefixLock) -> Vec<PageId> {
        let mut pages = Vec::new();
        self.tree.pages(lock, &mut pages);
        pages
    }

    pub fn evict(&mut self, wanted: usize) -> usize {
        let evicted = self.tree.evict(wanted, &mut Log(&mut self.told));
        let count = evicted.ids().len();
        self.pool.release_cached(evicted);
        self.audit();
        count
    }

    pub fn cached(&self, tokens: &[u32]) -> usize {
        self.tree.peek(self.namespace, tokens)
    }

    /// Free + evictable + locked + held = total, counted independently by pool and tree.
    pub fn audit(&self) {
        self.pool.audit();
        self.tree.audit();
        let PoolCounts { free, held, cached, quarantined } = self.pool.counts();
        let TreeCounts { pages, locked, .. } = self.tree.counts();
        assert_eq!(cached, pages);
        assert_eq!(free + held + quarantined + self.tree.evictable() + locked, self.pool.total());
    }

    /// Checks that nothing is locked and that every page can be evicted.
    pub fn drained(mut self) {
        assert_eq!((self.tree.counts().locked, self.tree.counts().locks), (0, 0));
        self.evict(usize::MAX);
        assert_eq!(self.pool.counts().free, self.pool.total());
    }
}
