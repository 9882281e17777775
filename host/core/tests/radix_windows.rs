//! The radix tree of a model with sliding layers against a naive model, step by step: both have the same matches, each at the end
//! of a whole window, both keep and evict the same window parts, and after every step every page of the pool is in exactly one
//! place.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should panic")]

mod radix {
    pub mod model;
    pub mod sliding;
}

use std::collections::BTreeSet;

use host_core::ids::PageId;
use host_core::pool::{HeldPages, PagePool};
use host_core::radix::{Namespace, NamespaceKey, PageHash, Policy, PrefixLock, RadixTree, TreeConfig};
use host_core::window::WindowShape;
use host_sim::Random;
use radix::model::{PAGE, Prefix};
use radix::sliding::{Receipt, Sliding};

const POOL: u32 = 60;
const NAMESPACES: u32 = 2;
const SEEDS: u64 = if cfg!(debug_assertions) { 600 } else { 6000 };
const STEPS: usize = 150;

/// Events that must have occurred in some run. Without them the runs prove little.
#[derive(Debug, Default)]
struct Seen {
    /// Matches that end before the last cached page because a window is missing, but not at the start.
    shorter: u64,
    whole: u64,
    duplicates: u64,
    /// Parts that were added to cached pages without one.
    refilled: u64,
    parts_evicted: u64,
    pages_evicted: u64,
    past_locks: u64,
    flushes_past_locks: u64,
    gone: u64,
}

/// A request.
struct Job {
    lock: PrefixLock,
    receipt: Receipt,
    /// The token page of its first part.
    first: usize,
}

struct World {
    random: Random,
    shape: WindowShape,
    pool: PagePool,
    tree: RadixTree,
    /// Requested again each time that the tree is cleared, so that the model takes them for other namespaces.
    namespaces: Vec<Namespace>,
    model: Sliding,
    jobs: Vec<Job>,
    seen: Seen,
}

/// Windows from one token to some pages. No window is computed again.
fn shape(seed: u64) -> WindowShape {
    WindowShape { tokens: 1 + (seed % 7) as u32, parts: 1 + (seed / 7 % 2) as u32, layers: 0 }
}

fn policy(seed: u64) -> Policy {
    [Policy::Lru, Policy::Lfu, Policy::Slru, Policy::Priority][(seed % 4) as usize]
}

fn key(number: u32) -> NamespaceKey {
    NamespaceKey { model: "m".into(), extra_key: number.to_string(), salt: String::new() }
}

/// The number of a namespace. Namespaces are numbered in the order in which they are requested.
fn number(namespace: Namespace) -> u32 {
    let name = format!("{namespace:?}");
    name.trim_matches(|letter: char| !letter.is_ascii_digit()).parse().unwrap()
}

fn sorted(pages: &[PageId]) -> Vec<PageId> {
    let mut pages = pages.to_vec();
    pages.sort_unstable();
    pages
}

impl World {
    fn new(seed: u64, seen: Seen) -> Self {
        let (shape, policy) = (shape(seed), policy(seed));
        let config = TreeConfig {
            page_tokens: PAGE as u32,
            policy,
            identity: PageHash([7; 32]),
            max_namespaces: NAMESPACES as usize,
            seed: 3,
        };
        let mut tree = RadixTree::new(&config);
        let namespaces = (0..NAMESPACES).map(|each| tree.namespace(&key(each)).unwrap()).collect();
        let model = Sliding::new(policy, shape.tokens as usize);
        let pool = PagePool::new(POOL);
        Self { random: Random::new(seed), shape, pool, tree, namespaces, model, jobs: Vec::new(), seen }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random.place(bound)
    }

    fn tokens(&mut self) -> Vec<u32> {
        (0..self.below(16)).map(|_| self.below(8).min(1) as u32).collect()
    }

    fn one(&mut self) -> Option<usize> {
        (!self.jobs.is_empty()).then(|| self.below(self.jobs.len()))
    }

    fn take(&mut self) {
        self.model.full.step += 1;
        match self.below(100) {
            0..25 => self.begin(),
            25..50 => self.insert(),
            50..55 => self.again(),
            55..60 => self.mark(),
            60..67 => self.slide(),
            67..85 => {
                if let Some(at) = self.one() {
                    let job = self.jobs.swap_remove(at);
                    self.unlock(job);
                }
            }
            85..92 => self.evict_one(),
            92..94 => {
                let wanted = self.below(14);
                self.evict(wanted);
            }
            94..96 => {
                let wanted = self.below(8);
                let evicted = self.tree.evict_windows(wanted);
                assert_eq!(sorted(evicted.ids()), sorted(&self.model.evict_windows(wanted)));
                self.pool.release_cached(evicted);
            }
            96..98 => {
                let wanted = self.below(6);
                let evicted = self.tree.evict_pages(wanted, &mut ());
                assert_eq!(sorted(evicted.ids()), sorted(&self.model.evict_pages(wanted)));
                self.pool.release_cached(evicted);
            }
            98 => self.flush(),
            _ => self.clear(),
        }
    }

    /// Begins a request that computes, or one that is sent the pages that it lacks. Some requests end at once without a use.
    fn begin(&mut self) {
        let (namespace, tokens) = (self.below(NAMESPACES as usize), self.tokens());
        let id = self.namespaces[namespace];
        let whole: Prefix = [&[number(id)], &tokens[..]].concat();
        let computes = self.below(4) > 0;
        let cached = self.tree.peek(id, &tokens);
        let lock = match computes {
            true => self.tree.hold_window(id, &tokens, self.shape),
            false => self.tree.hold(id, &tokens),
        };
        let receipt = self.model.hold(&whole, computes);
        let pages = lock.pages();
        assert_eq!((pages, lock.windows()), (receipt.lock.pages(), receipt.windows.len()));
        self.seen.whole += u64::from(computes && pages > 0 && pages == cached);
        self.seen.shorter += u64::from(pages > 0 && pages < cached);
        // A request that is sent its window may have parts from any page on.
        let first = if computes { pages - lock.windows() } else { self.below(pages + 1) };
        let job = Job { lock, receipt, first };
        match self.below(3) {
            0 => self.unlock(job),
            _ => {
                self.tree.count_use(&job.lock);
                self.model.count_use(&job.receipt);
                self.jobs.push(job);
            }
        }
    }

    fn again(&mut self) {
        let Some(at) = self.one() else { return };
        let lock = self.tree.lock_again(&self.jobs[at].lock);
        let prefix = self.jobs[at].receipt.lock.prefix.clone();
        let receipt = Receipt { lock: self.model.full.lock(&prefix, false), windows: Vec::new() };
        let first = self.below(lock.pages() + 1);
        self.jobs.push(Job { lock, receipt, first });
    }

    /// Whether the tree was cleared since the receipt was taken.
    fn forgotten(&self, receipt: &Receipt) -> bool {
        receipt.lock.prefix[0] < number(self.namespaces[0])
    }

    fn unlock(&mut self, job: Job) {
        let forgotten = self.forgotten(&job.receipt);
        let prefix = job.receipt.lock.prefix.clone();
        self.tree.unlock(job.lock);
        self.model.unlock(job.receipt);
        let gone = self.tree.gone();
        let model = if forgotten { self.model.forget(&prefix) } else { Vec::new() };
        assert_eq!(sorted(gone.ids()), sorted(&model), "what cannot be found goes with its last holder");
        self.seen.gone += model.len() as u64;
        self.pool.release_cached(gone);
    }

    fn slide(&mut self) {
        let Some(at) = self.one() else { return };
        let count = self.below(self.jobs[at].receipt.windows.len() + 1);
        let job = &mut self.jobs[at];
        self.tree.unlock_windows(&mut job.lock, count);
        self.model.let_go(&mut job.receipt, count);
        job.first += count;
    }

    fn mark(&mut self) {
        let Some(at) = self.one() else { return };
        let end = self.below(self.jobs[at].lock.pages() + 1);
        // No request can continue from a prefix that was cleared.
        if !self.forgotten(&self.jobs[at].receipt) {
            self.tree.mark_window(&self.jobs[at].lock, end, self.shape);
            self.model.mark(&self.jobs[at].receipt, end);
        }
    }

    /// Inserts the pages that a request has computed, and the window parts that it still has.
    fn insert(&mut self) {
        let Some(at) = self.one() else { return };
        let (more, windows) = (self.tokens(), self.below(5) > 0);
        let (spare, priority) = (self.below(2), self.below(3) as i32);
        let job = &self.jobs[at];
        let whole = [&job.receipt.lock.prefix[..], &more].concat();
        let pages = (whole.len() - 1) / PAGE;
        let wanted = pages + spare - job.lock.pages();
        let kept = job.first + job.receipt.windows.len();
        let parts = if windows { (pages + spare).saturating_sub(kept) } else { 0 };
        let k = self.shape.parts as usize;
        self.evict((wanted + parts * k).saturating_sub(self.pool.counts().free));
        if !self.pool.fits(wanted, parts * k) {
            return;
        }
        let full = self.pool.allocate(wanted).unwrap();
        let own = self.pool.allocate_window(parts * k).unwrap();
        let offered = (full.ids().to_vec(), own.ids().to_vec());
        let Job { lock, mut receipt, first } = self.jobs.swap_remove(at);
        let inserted = self.tree.insert(&mut self.pool, lock, &whole[1..], full, priority, &mut ());
        let mut lock = inserted.lock;
        if self.forgotten(&receipt) {
            assert_eq!((inserted.taken, inserted.rest.ids()), (0, &offered.0[..]));
            let before = receipt.windows.len();
            let kept = self.tree.keep_windows(&mut self.pool, &mut lock, first, self.shape, own);
            assert_eq!((kept.duplicates.ids(), kept.rest.ids()), (&[][..], &offered.1[..]));
            assert_eq!(lock.windows(), before);
            self.release([inserted.duplicates, inserted.rest, kept.duplicates, kept.rest]);
            self.jobs.push(Job { lock, receipt, first });
            return;
        }
        let (duplicates, longer) = self.model.full.insert(&receipt.lock, &whole, &offered.0, priority);
        assert_eq!(inserted.duplicates.ids(), duplicates);
        receipt.lock = longer;
        self.release([inserted.duplicates, inserted.rest]);
        if windows {
            let there = self.model.parts.len();
            let offered: Vec<Vec<PageId>> = offered.1.chunks(k).map(<[PageId]>::to_vec).collect();
            let duplicates = self.model.keep(&mut receipt, first, &offered);
            let kept = self.tree.keep_windows(&mut self.pool, &mut lock, first, self.shape, own);
            assert_eq!(kept.duplicates.ids(), duplicates);
            assert_eq!(kept.pages, self.tree.window_pages(&lock));
            let took = self.model.parts.len() - there;
            assert_eq!(kept.rest.ids().len(), (parts - took) * k - duplicates.len(), "the rest comes back");
            self.seen.duplicates += duplicates.len() as u64;
            self.seen.refilled += u64::from(took > inserted.taken);
            self.release([kept.duplicates, kept.rest]);
        } else {
            self.release([own]);
        }
        self.jobs.push(Job { lock, receipt, first });
    }

    fn release<const COUNT: usize>(&mut self, all: [HeldPages; COUNT]) {
        all.into_iter().for_each(|pages| self.pool.release(pages));
    }

    /// Evicts for one page. The model knows exactly which pages must go.
    fn evict_one(&mut self) {
        let before = (self.model.full.pages.len(), self.model.parts.len());
        let locked = self.model.full.locked() > 0;
        let evicted = self.tree.evict(1, &mut ());
        let expected = self.model.evict_one();
        assert_eq!(sorted(evicted.ids()), sorted(&expected), "other pages go than should");
        let after = (self.model.full.pages.len(), self.model.parts.len());
        self.seen.parts_evicted += u64::from(after.0 == before.0 && after.1 < before.1);
        self.seen.pages_evicted += u64::from(after.0 < before.0);
        self.seen.past_locks += u64::from(after != before && locked);
        self.pool.release_cached(evicted);
    }

    /// Evicts for several pages. The model knows which pages may go, and how many.
    fn evict(&mut self, wanted: usize) {
        let evicted = self.tree.evict(wanted, &mut ());
        self.model.follow(evicted.ids());
        let count = evicted.ids().len();
        assert!(count < wanted + 1 + self.shape.parts as usize, "{count} pages for {wanted}");
        assert!(
            count >= wanted || self.tree.evictable() == 0,
            "{count} pages for {wanted}, and more are there"
        );
        self.pool.release_cached(evicted);
    }

    fn flush(&mut self) {
        let flushed = self.tree.flush(&mut ());
        self.model.follow(flushed.ids());
        assert!(self.model.full.pages.values().all(|page| page.locks > 0), "only locked pages stay");
        assert!(self.model.parts.values().all(|part| part.pins > 0), "only parts that are kept stay");
        self.seen.flushes_past_locks += u64::from(!self.model.parts.is_empty() && !flushed.ids().is_empty());
        self.pool.release_cached(flushed);
    }

    fn clear(&mut self) {
        let cleared = self.tree.clear(&mut ());
        self.model.follow(cleared.ids());
        assert!(self.model.full.pages.values().all(|page| page.locks > 0));
        assert!(self.model.parts.values().all(|part| part.pins > 0));
        self.pool.release_cached(cleared);
        self.namespaces = (0..NAMESPACES).map(|each| self.tree.namespace(&key(each)).unwrap()).collect();
    }

    fn check(&self) {
        self.pool.audit();
        self.tree.audit();
        let (pool, tree) = (self.pool.counts(), self.tree.counts());
        let (pages, locked) = (self.model.full.pages.len(), self.model.full.locked());
        let (parts, kept) = self.model.part_pages();
        assert_eq!((pool.held, pool.quarantined), (0, 0), "no request holds pages between steps");
        assert_eq!(pool.cached, pages + parts, "pages that are cached are in the tree");
        assert_eq!((tree.pages, tree.locked, tree.window_pages), (pages, locked, parts));
        assert_eq!(self.tree.evictable_parts(), (pages - locked, parts - kept));
        assert_eq!(tree.locks, self.jobs.len());
        let full = self.model.full.pages.values().map(|page| page.page);
        let all: Vec<PageId> =
            full.chain(self.model.parts.values().flat_map(|part| part.pages.clone())).collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "a page in two places");
        for job in &self.jobs {
            let mut pages = Vec::new();
            self.tree.pages(&job.lock, &mut pages);
            let prefix = &job.receipt.lock.prefix;
            let expected = radix::model::prefixes(prefix).map(|prefix| self.model.full.pages[prefix].page);
            assert_eq!(pages, expected.collect::<Vec<_>>(), "a locked prefix changed its pages");
            let windows = job.receipt.windows.iter().flat_map(|page| self.model.parts[page].pages.clone());
            assert_eq!(self.tree.window_pages(&job.lock), windows.collect::<Vec<_>>());
        }
    }

    /// Ends every request, and checks that every page is evicted in the right order.
    fn drain(mut self) -> Seen {
        while let Some(job) = self.jobs.pop() {
            self.model.full.step += 1;
            self.unlock(job);
            self.check();
        }
        while self.tree.evictable() > 0 {
            self.evict_one();
            self.check();
        }
        assert_eq!((self.pool.counts().free, self.tree.counts().nodes), (POOL as usize, 0));
        self.seen
    }
}

#[test]
fn a_tree_with_windows_equals_the_model() {
    let mut seen = Seen::default();
    for seed in 0..SEEDS {
        println!("seed {seed}: {:?}, {:?}", shape(seed), policy(seed));
        let mut world = World::new(seed, seen);
        for _ in 0..STEPS {
            world.take();
            world.check();
        }
        seen = world.drain();
    }
    println!("{seen:?}");
    let Seen { shorter, whole, duplicates, refilled, parts_evicted, pages_evicted, .. } = seen;
    let Seen { past_locks, flushes_past_locks, gone, .. } = seen;
    let all = [shorter, whole, duplicates, refilled, parts_evicted, pages_evicted];
    assert!(
        all.into_iter().chain([past_locks, flushes_past_locks, gone]).all(|count| count > SEEDS / 10),
        "something hardly ever happened"
    );
}

#[test]
fn a_look_at_a_place_does_not_make_its_window_more_useful() {
    let window = WindowShape { tokens: 3, ..shape(0) };
    let tokens: Vec<u32> = (0..12).collect();
    for goes_on in [false, true] {
        let World { mut pool, mut tree, namespaces, .. } = World::new(0, Seen::default());
        let namespace = namespaces[0];
        let lock = tree.hold(namespace, &tokens);
        let full = pool.allocate(6).unwrap();
        let inserted = tree.insert(&mut pool, lock, &tokens, full, 0, &mut ());
        let mut lock = inserted.lock;
        let own = pool.allocate_window(6).unwrap();
        let kept = tree.keep_windows(&mut pool, &mut lock, 0, window, own);
        for pages in [inserted.duplicates, inserted.rest, kept.duplicates, kept.rest] {
            pool.release(pages);
        }
        // The window at the end is marked as useful. A request matches in the middle.
        tree.mark_window(&lock, 6, window);
        tree.unlock(lock);
        let ends_at = |tree: &mut RadixTree, count: usize, goes_on: bool| {
            let lock = tree.hold_window(namespace, &tokens[..count * PAGE], window);
            let pages = lock.pages();
            if goes_on {
                tree.count_use(&lock);
            }
            tree.unlock(lock);
            pages
        };
        assert_eq!(ends_at(&mut tree, 3, goes_on), 3);
        pool.release_cached(tree.evict(if goes_on { 4 } else { 5 }, &mut ()));
        assert_eq!(
            (ends_at(&mut tree, 3, false), ends_at(&mut tree, 6, false)),
            (if goes_on { 3 } else { 0 }, 6)
        );
        tree.audit();
        pool.audit();
    }
}
