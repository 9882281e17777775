//! The radix tree against a naive model, step by step, under every policy: both have the same matches and the same locks and evict
//! the same pages, events tell the same contents, and after every step every page of the pool is in exactly one place.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should panic")]

mod radix {
    pub mod model;
}

use std::cell::RefCell;
use std::collections::BTreeMap;

use host_core::ids::PageId;
use host_core::pool::PagePool;
use host_core::radix::{
    EventSink, Inserted, Namespace, NamespaceKey, PageHash, Policy, PrefixLock, RadixTree, TreeConfig,
    TreeEvent,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use radix::model::{Lock, Model, PAGE, Prefix};

const POOL: u32 = 40;
const NAMESPACES: u32 = 2;

/// A step. `which` is taken modulo the number of locks that exist.
#[derive(Clone, Debug)]
enum Step {
    Lock { namespace: u32, tokens: Vec<u32> },
    LockAgain { which: usize },
    Insert { which: usize, more: Vec<u32>, spare: usize, priority: i32 },
    Unlock { which: usize },
    Evict { pages: usize },
    Flush,
    Clear,
}

fn tokens() -> impl Strategy<Value = Vec<u32>> {
    vec(0..2_u32, 0..14)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => (0..NAMESPACES, tokens()).prop_map(|(namespace, tokens)| Step::Lock { namespace, tokens }),
        5 => any::<usize>().prop_map(|which| Step::LockAgain { which }),
        30 => (any::<usize>(), tokens(), 0..3_usize, -2..3_i32)
            .prop_map(|(which, more, spare, priority)| Step::Insert { which, more, spare, priority }),
        25 => any::<usize>().prop_map(|which| Step::Unlock { which }),
        15 => (0..12_usize).prop_map(|pages| Step::Evict { pages }),
        5 => Just(Step::Flush),
        1 => Just(Step::Clear),
    ]
}

/// Rebuilds the contents from events alone.
#[derive(Default)]
struct Mirror {
    sequence: u64,
    pages: BTreeMap<PageId, Prefix>,
}

impl EventSink for Mirror {
    fn event(&mut self, sequence: u64, event: TreeEvent<'_>) {
        assert_eq!(sequence, self.sequence + 1, "a gap between events");
        self.sequence = sequence;
        match event {
            TreeEvent::Stored { namespace, parent, pages, tokens, .. } => {
                let mut prefix = match parent {
                    Some(parent) => self.pages[&parent].clone(),
                    None => vec![number(namespace)],
                };
                assert_eq!(tokens.len(), pages.len() * PAGE);
                for (page, tokens) in pages.iter().zip(tokens.chunks(PAGE)) {
                    prefix.extend(tokens);
                    assert!(self.pages.insert(*page, prefix.clone()).is_none(), "{page:?} stored twice");
                }
            }
            TreeEvent::Removed { pages } => {
                for page in pages {
                    assert!(self.pages.remove(page).is_some(), "{page:?} removed, but never stored");
                }
            }
            TreeEvent::Cleared => self.pages.clear(),
        }
    }
}

fn key(number: u32) -> NamespaceKey {
    NamespaceKey { model: "m".into(), extra_key: String::new(), salt: number.to_string() }
}

/// The number of a namespace. Namespaces are numbered in the order in which they are requested.
fn number(namespace: Namespace) -> u32 {
    let name = format!("{namespace:?}");
    name.trim_matches(|letter: char| !letter.is_ascii_digit()).parse().unwrap()
}

/// Events that must have occurred in some run. Without them the runs prove little.
#[derive(Debug, Default)]
struct Seen {
    partial_matches: u64,
    whole_matches: u64,
    duplicates: u64,
    taken: u64,
    partial_evictions: u64,
    evictions_past_locks: u64,
    flushes_past_locks: u64,
    clears: u64,
    forgotten_locks: u64,
    gone: u64,
}

struct World {
    pool: PagePool,
    tree: RadixTree,
    /// Requested again each time that the tree is cleared, so that the model takes them for other namespaces.
    namespaces: Vec<Namespace>,
    model: Model,
    locks: Vec<(PrefixLock, Lock)>,
    mirror: Mirror,
}

impl World {
    fn new(policy: Policy) -> Self {
        let config = TreeConfig {
            page_tokens: PAGE as u32,
            policy,
            identity: PageHash([7; 32]),
            max_namespaces: NAMESPACES as usize,
            seed: 3,
        };
        let mut tree = RadixTree::new(&config);
        let namespaces = (0..NAMESPACES).map(|each| tree.namespace(&key(each)).unwrap()).collect();
        let (pool, model) = (PagePool::new(POOL), Model::new(policy));
        Self { pool, tree, namespaces, model, locks: Vec::new(), mirror: Mirror::default() }
    }

    fn take(&mut self, step: &Step, seen: &mut Seen) {
        self.model.step += 1;
        match step {
            Step::Lock { namespace, tokens } => {
                let id = self.namespaces[*namespace as usize];
                let whole: Prefix = [&[number(id)], &tokens[..]].concat();
                let expected = self.model.matched(&whole).len() / PAGE;
                assert_eq!(self.tree.peek(id, tokens), expected);
                let lock = self.tree.lock(id, tokens);
                seen.whole_matches += u64::from(expected > 0 && expected == tokens.len() / PAGE);
                seen.partial_matches += u64::from(expected > 0 && expected < tokens.len() / PAGE);
                self.locks.push((lock, self.model.lock(&whole, true)));
            }
            Step::LockAgain { which } => {
                if let Some(at) = which.checked_rem(self.locks.len()) {
                    let again = self.tree.lock_again(&self.locks[at].0);
                    let prefix = self.locks[at].1.prefix.clone();
                    self.locks.push((again, self.model.lock(&prefix, false)));
                }
            }
            Step::Insert { which, more, spare, priority } => {
                self.insert(*which, more, *spare, *priority, seen)
            }
            Step::Unlock { which } => {
                if let Some(at) = which.checked_rem(self.locks.len()) {
                    let (lock, expected) = self.locks.swap_remove(at);
                    self.unlock(lock, &expected, seen);
                }
            }
            Step::Evict { pages } => {
                let (before, locked) = (self.tree.counts(), self.model.locked());
                self.evict(*pages);
                let after = self.tree.counts();
                seen.partial_evictions +=
                    u64::from(after.nodes == before.nodes && after.pages < before.pages);
                seen.evictions_past_locks += u64::from(after.pages < before.pages && locked > 0);
            }
            Step::Flush => {
                let locked = self.model.locked();
                let flushed = self.tree.flush(&mut self.mirror);
                let expected = self.model.evict(usize::MAX);
                assert_eq!(sorted(flushed.ids()), sorted(&expected));
                seen.flushes_past_locks += u64::from(locked > 0 && !expected.is_empty());
                seen.clears += u64::from(locked == 0 && !expected.is_empty());
                self.pool.release_cached(flushed);
            }
            Step::Clear => {
                let cleared = self.tree.clear(&mut self.mirror);
                assert_eq!(sorted(cleared.ids()), sorted(&self.model.evict(usize::MAX)));
                self.pool.release_cached(cleared);
                self.namespaces =
                    (0..NAMESPACES).map(|each| self.tree.namespace(&key(each)).unwrap()).collect();
                seen.forgotten_locks += self.model.locked() as u64;
            }
        }
    }

    /// Whether the tree was cleared since a lock was taken.
    fn forgotten(&self, lock: &Lock) -> bool {
        lock.prefix[0] < number(self.namespaces[0])
    }

    fn unlock(&mut self, lock: PrefixLock, expected: &Lock, seen: &mut Seen) {
        self.tree.unlock(lock);
        self.model.unlock(expected);
        let gone = self.tree.gone();
        let model = if self.forgotten(expected) { self.model.forget(&expected.prefix) } else { Vec::new() };
        assert_eq!(
            sorted(gone.ids()),
            sorted(&model),
            "pages that cannot be found stay until no request has them"
        );
        seen.gone += model.len() as u64;
        self.pool.release_cached(gone);
    }

    fn evict(&mut self, wanted: usize) {
        let evicted = self.tree.evict(wanted, &mut self.mirror);
        let expected = self.model.evict(wanted);
        assert_eq!(sorted(evicted.ids()), sorted(&expected), "other pages evicted than the policy says");
        self.pool.release_cached(evicted);
    }

    fn insert(&mut self, which: usize, more: &[u32], spare: usize, priority: i32, seen: &mut Seen) {
        let Some(at) = which.checked_rem(self.locks.len()) else { return };
        let start = self.locks[at].1.pages();
        let whole = [&self.locks[at].1.prefix[..], more].concat();
        let pages = (whole.len() - 1) / PAGE - start + spare;
        // As a scheduler does: takes free pages, then evicts, and otherwise leaves the insertion out.
        self.evict(pages.saturating_sub(self.pool.counts().free));
        let Some(owned) = self.pool.allocate(pages) else { return };
        let offered = owned.ids().to_vec();
        let (lock, expected_lock) = self.locks.swap_remove(at);
        if self.forgotten(&expected_lock) {
            let kept = lock.pages();
            let inserted =
                self.tree.insert(&mut self.pool, lock, &whole[1..], owned, priority, &mut self.mirror);
            assert_eq!((inserted.taken, inserted.duplicates.ids()), (0, &[][..]), "they could not be found");
            assert_eq!((inserted.lock.pages(), inserted.rest.ids()), (kept, &offered[..]));
            self.pool.release(inserted.duplicates);
            self.pool.release(inserted.rest);
            self.locks.push((inserted.lock, expected_lock));
            return;
        }
        let Inserted { lock, taken, duplicates, rest } =
            self.tree.insert(&mut self.pool, lock, &whole[1..], owned, priority, &mut self.mirror);
        let (expected, longer) = self.model.insert(&expected_lock, &whole, &offered, priority);
        assert_eq!(duplicates.ids(), expected);
        assert_eq!(taken, offered.len() - spare - expected.len());
        assert_eq!(rest.ids(), &offered[offered.len() - spare..]);
        seen.duplicates += expected.len() as u64;
        seen.taken += taken as u64;
        self.pool.release(duplicates);
        self.pool.release(rest);
        self.locks.push((lock, longer));
    }

    fn check(&mut self) {
        self.pool.audit();
        self.tree.audit();
        let (pool, tree) = (self.pool.counts(), self.tree.counts());
        assert_eq!((pool.held, pool.quarantined), (0, 0), "no request holds pages between steps");
        assert_eq!(pool.cached, tree.pages, "pages that are cached are in the tree");
        assert_eq!((tree.pages, tree.locked), (self.model.pages.len(), self.model.locked()));
        assert_eq!(tree.locks, self.locks.len());
        for (lock, expected) in &self.locks {
            let mut pages = Vec::new();
            self.tree.pages(lock, &mut pages);
            let model = (1..=expected.pages())
                .map(|count| self.model.pages[&expected.prefix[..1 + count * PAGE]].page);
            assert_eq!(pages, model.collect::<Vec<_>>(), "a locked prefix changed its pages");
        }
        let told: BTreeMap<&Prefix, PageId> =
            self.mirror.pages.iter().map(|(page, prefix)| (prefix, *page)).collect();
        let known = |prefix: &Prefix| prefix[0] >= number(self.namespaces[0]);
        let there = self.model.pages.iter().filter(|(prefix, _)| known(prefix));
        let there = there.map(|(prefix, page)| (prefix, page.page)).collect();
        assert_eq!(told, there, "events tell other contents");
    }

    /// Ends every request, and checks that all pages can be freed.
    fn drain(&mut self) {
        for (lock, expected) in std::mem::take(&mut self.locks) {
            self.unlock(lock, &expected, &mut Seen::default());
        }
        assert_eq!((self.tree.counts().locked, self.tree.counts().locks), (0, 0));
        let all = self.tree.flush(&mut self.mirror);
        self.pool.release_cached(all);
        assert_eq!(self.pool.counts().free, POOL as usize);
        assert_eq!(self.tree.counts().nodes, 0);
        self.tree.audit();
        self.pool.audit();
    }
}

fn sorted(pages: &[PageId]) -> Vec<PageId> {
    let mut pages = pages.to_vec();
    pages.sort_unstable();
    pages
}

fn equals_the_model(policy: Policy) {
    let seen = RefCell::new(Seen::default());
    let mut runner = TestRunner::new(Config {
        cases: 2_000,
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..Config::default()
    });
    let result = runner.run(&vec(step(), 1..80), |steps| {
        let mut world = World::new(policy);
        for step in &steps {
            world.take(step, &mut seen.borrow_mut());
            world.check();
        }
        world.drain();
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
    let seen = seen.into_inner();
    println!("{policy:?}: {seen:?}");
    let Seen { partial_matches, whole_matches, duplicates, taken, .. } = seen;
    let Seen { partial_evictions, evictions_past_locks, flushes_past_locks, clears, .. } = seen;
    let Seen { forgotten_locks, gone, .. } = seen;
    let all = [partial_matches, whole_matches, duplicates, taken, partial_evictions, forgotten_locks, gone];
    assert!(all.into_iter().chain([evictions_past_locks, flushes_past_locks, clears]).all(|count| count > 0));
}

#[test]
fn lru_equals_the_model() {
    equals_the_model(Policy::Lru);
}

#[test]
fn lfu_equals_the_model() {
    equals_the_model(Policy::Lfu);
}

#[test]
fn slru_equals_the_model() {
    equals_the_model(Policy::Slru);
}

#[test]
fn priority_equals_the_model() {
    equals_the_model(Policy::Priority);
}
