//! Tree and pool of `host-core`: locks, LRU and events are on in every figure.

use std::hint::black_box;

use host_core::ids::PageId;
use host_core::pool::PagePool;
use host_core::radix::{
    EventSink, Inserted, Namespace, NamespaceKey, PageHash, Policy, RadixTree, TreeConfig, TreeEvent,
};

use crate::counting::in_use;
use crate::timing::Times;
use crate::workload::{PAGE, PAGES, Workload, read};

/// An event listener as in a worker: copies every event into a ring, which another thread would read.
struct Ring {
    numbers: Vec<u32>,
    at: usize,
    events: u64,
}

impl Ring {
    fn new() -> Self {
        Self { numbers: vec![0; 1 << 20], at: 0, events: 0 }
    }

    fn write(&mut self, numbers: &[u32]) {
        if self.at + numbers.len() > self.numbers.len() {
            self.at = 0;
        }
        self.numbers[self.at..self.at + numbers.len()].copy_from_slice(numbers);
        self.at += numbers.len();
    }

    fn pages(&mut self, pages: &[PageId]) {
        for page in pages {
            self.write(&[page.0]);
        }
    }
}

impl EventSink for Ring {
    fn event(&mut self, sequence: u64, event: TreeEvent<'_>) {
        self.events = sequence;
        match event {
            TreeEvent::Stored { parent, pages, tokens, .. } => {
                self.write(&[0, parent.map_or(u32::MAX, |page| page.0)]);
                self.pages(pages);
                self.write(tokens);
            }
            TreeEvent::Removed { pages } => self.pages(pages),
            TreeEvent::Cleared => self.write(&[2]),
        }
    }
}

struct Cache {
    pool: PagePool,
    tree: RadixTree,
    namespace: Namespace,
    ring: Ring,
}

impl Cache {
    fn new(pages: usize) -> Self {
        let mut tree = RadixTree::new(&TreeConfig {
            page_tokens: PAGE as u32,
            policy: Policy::Lru,
            identity: PageHash([1; 32]),
            max_namespaces: 16,
            seed: 0x5eed,
        });
        let namespace = tree.namespace(&NamespaceKey::default()).expect("the first namespace");
        Self { pool: PagePool::new(pages as u32), tree, namespace, ring: Ring::new() }
    }

    /// Does what a request with a cached prefix does: match and lock, allocate pages for the rest, insert, unlock.
    fn admit(&mut self, tokens: &[u32]) -> bool {
        let lock = self.tree.lock(self.namespace, tokens);
        let Some(owned) = self.pool.allocate(tokens.len() / PAGE - lock.pages()) else {
            self.tree.unlock(lock);
            return false;
        };
        let Inserted { lock, duplicates, rest, .. } =
            self.tree.insert(&mut self.pool, lock, tokens, owned, 0, &mut self.ring);
        self.pool.release(duplicates);
        self.pool.release(rest);
        self.tree.unlock(lock);
        true
    }

    /// Inserts as the other systems do: offers pages for the whole sequence, and gets back those that the tree already has.
    fn insert_whole(&mut self, tokens: &[u32]) {
        let owned = self.pool.allocate(tokens.len() / PAGE).expect("the pool is large enough");
        let lock = self.tree.lock(self.namespace, &[]);
        let Inserted { lock, duplicates, rest, .. } =
            self.tree.insert(&mut self.pool, lock, tokens, owned, 0, &mut self.ring);
        self.pool.release(duplicates);
        self.pool.release(rest);
        self.tree.unlock(lock);
    }

    fn match_all<'a>(&mut self, name: &str, prompts: impl Iterator<Item = &'a [u32]>, expected: usize) {
        let mut times = Times::with_capacity(100_000);
        let mut pages = Vec::with_capacity(PAGES);
        for tokens in prompts {
            let found = times.time(|| {
                pages.clear();
                let lock = self.tree.lock(self.namespace, tokens);
                self.tree.pages(&lock, &mut pages);
                self.tree.unlock(lock);
                pages.len()
            });
            assert_eq!(found, expected);
        }
        times.print(name);
    }
}

/// Inserts, matches and admits all sequences of the main workload.
pub fn run(workload: &Workload) {
    let count = workload.len();
    let mut cache = Cache::new(workload.unique_pages() + PAGES);
    let before = in_use();
    let mut times = Times::with_capacity(count);
    let noted = in_use() - before;
    for index in 0..count {
        times.time(|| cache.insert_whole(workload.sequence(index)));
    }
    let bytes = in_use() - before - noted;
    let pages = cache.tree.counts().pages;
    assert_eq!(pages, workload.unique_pages());
    times.print("ours: insert (alloc + insert + release duplicates + unlock)");
    println!(
        "{:<58} {:.1} B per page with its 64 B of tokens ({pages} pages, {} nodes, {} events)",
        "ours: memory of the tree",
        bytes as f64 / pages as f64,
        cache.tree.counts().nodes,
        cache.ring.events
    );
    let all = || (0..count).map(|index| workload.sequence(index));
    let mut times = Times::with_capacity(count);
    for tokens in all() {
        times.time(|| read(tokens));
    }
    times.print("floor: reading the prompt once");
    cache.match_all("ours: match (lock + page list + unlock), full hit", all(), PAGES);
    let just_read = all().inspect(|tokens| {
        read(tokens);
    });
    cache.match_all("ours: the same, prompt just read", just_read, PAGES);
    let mut times = Times::with_capacity(count);
    for tokens in all() {
        times.time(|| {
            let lock = cache.tree.lock(cache.namespace, tokens);
            black_box(lock.pages());
            cache.tree.unlock(lock);
        });
    }
    times.print("ours: match (lock + unlock), full hit");
    let mut times = Times::with_capacity(count);
    for tokens in all() {
        times.time(|| black_box(cache.tree.peek(cache.namespace, tokens)));
    }
    times.print("ours: peek, full hit");
    let cold = workload.cold(20_000.min(count));
    for _ in 0..2 {
        let prompts = cold.iter().map(Vec::as_slice);
        cache.match_all("ours: match, 102 pages cached + 26 new", prompts, crate::workload::SHARED_PAGES);
    }
    let start = std::time::Instant::now();
    let lock = cache.tree.lock(cache.namespace, workload.sequence(0));
    let hashes = cache.tree.page_hashes(&lock, 0).len();
    println!(
        "{:<58} {:.1} us",
        format!("ours: hash chain of {hashes} pages, on demand"),
        start.elapsed().as_secs_f64() * 1e6
    );
    cache.tree.unlock(lock);
    let mut fresh = Cache::new(workload.unique_pages() + PAGES);
    let mut times = Times::with_capacity(count);
    for tokens in all() {
        times.time(|| fresh.admit(tokens));
    }
    times.print("ours: admission (match + alloc of the delta + insert + unlock)");
}

/// Eviction from a tree of 41,000 leaves, 1,000 pages a call.
pub fn eviction(workload: &Workload) {
    let leaves = 41_000.min(workload.len());
    let mut cache = Cache::new(workload.unique_pages() + PAGES);
    for index in 0..leaves {
        assert!(cache.admit(workload.sequence(index)));
    }
    let pages = cache.tree.counts().pages;
    let mut times = Times::with_capacity(1000);
    for _ in 0..pages / 1000 {
        let evicted = times.time(|| {
            let evicted = cache.tree.evict(1000, &mut cache.ring);
            let count = evicted.ids().len();
            cache.pool.release_cached(evicted);
            count
        });
        assert_eq!(evicted, 1000);
    }
    times.print(&format!("ours: evict 1,000 pages, from {leaves} leaves to none"));
}

/// Admits with a pool for a tenth of the workload, so that every admission needs evicted pages. Evicts once per tick of 8
/// admissions.
pub fn pressure(workload: &Workload) {
    let mut cache = Cache::new(workload.unique_pages() / 10);
    let mut times = Times::with_capacity(workload.len() / 8);
    for tick in 0..workload.len() / 8 {
        let admitted = times.time(|| {
            let missing = (8 * PAGES).saturating_sub(cache.pool.counts().free);
            let evicted = cache.tree.evict(missing, &mut cache.ring);
            cache.pool.release_cached(evicted);
            (tick * 8..tick * 8 + 8).all(|index| cache.admit(workload.sequence(index)))
        });
        assert!(admitted);
    }
    times.print(&format!(
        "ours: tick of 8 admissions under pressure ({} evicted)",
        cache.tree.counts().evicted
    ));
}

/// Times allocation and release of pages, with and without a hand-over to the cache in between.
pub fn pool() {
    let mut pool = PagePool::new(100_000);
    let rounds = 20_000;
    let start = std::time::Instant::now();
    for _ in 0..rounds {
        let pages = pool.allocate(PAGES).expect("free pages");
        pool.release(black_box(pages));
    }
    let each = start.elapsed().as_nanos() as f64 / (rounds * PAGES) as f64;
    println!("{:<58} {each:.2} ns per page", "ours: pool, allocate + release");
    let start = std::time::Instant::now();
    for _ in 0..rounds {
        let pages = pool.allocate(PAGES).expect("free pages");
        let pages = pool.cache(black_box(pages));
        pool.release_cached(black_box(pages));
    }
    let each = start.elapsed().as_nanos() as f64 / (rounds * PAGES) as f64;
    println!("{:<58} {each:.2} ns per page", "ours: pool, allocate + cache + release");
}
