//! Window parts of cached pages, for models with sliding layers ([`crate::window`]).
//!
//! A page in the tree may have its window part in the tree, or not (a *tombstone*). The pages of the pool that the part takes
//! are found here by the full part's page, so changes of nodes need no correction. A worker that computes continues where the
//! whole window is cached, or behind the whole cached prefix if recomputing the window there costs less
//! ([`RadixTree::hold_window`]). If the window is cached, the receipt keeps its parts too, until its holder lets them go.
//!
//! Parts that no receipt keeps can be evicted without their pages. First go parts of windows where no request has continued
//! and none is likely to. A long prompt leaves parts along its whole length, so that other requests can continue anywhere,
//! and these parts are evicted first. Then go the least recently used parts, before pages that were used later. So a long
//! sequence keeps its full part, the parts of its end, where the next turn of a conversation continues, and the parts of
//! places where other requests continued.

use std::collections::{BTreeMap, BTreeSet};

use super::RadixTree;
use super::chain::PageHash;
use super::lock::PrefixLock;
use super::namespace::Namespace;
use super::node::{NO_NODE, NodeIndex};
use crate::ids::PageId;
use crate::pool::{CachedPages, HeldPages, PagePool};
use crate::window::{Reach, WindowShape};

/// The window part of one cached page.
#[derive(Debug)]
struct WindowPart {
    pages: CachedPages,
    /// Receipts that keep the part.
    pins: u32,
    /// Whether a request continued with this part in its window, or is likely to.
    useful: bool,
    /// When the last receipt gave the part up. Parts given up together have the same stamp.
    stamp: u64,
    /// The page's name, if the part is to be saved when it is evicted.
    name: Option<PageHash>,
}

impl WindowPart {
    /// Where the part comes in the order of eviction.
    fn place(&self, page: PageId) -> (bool, u64, PageId) {
        (self.useful, self.stamp, page)
    }
}

/// A window part that has left the tree.
#[derive(Debug, Default)]
pub(super) struct EvictedWindow {
    name: Option<PageHash>,
    pub pages: CachedPages,
}

impl EvictedWindow {
    /// The names of the part's pages, if they are to be saved, and the pages.
    pub(super) fn named(self) -> (Vec<PageHash>, CachedPages) {
        let name = |(part, _)| self.name.map(|name| name.window_part(part));
        let names = (0..).zip(self.pages.ids()).filter_map(name).collect();
        (names, self.pages)
    }
}

/// All window parts in a tree.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// By the full part's page.
    parts: BTreeMap<PageId, WindowPart>,
    /// Parts that no receipt keeps. Parts that are not useful come first. Among equals those come first that were given
    /// up earlier.
    order: BTreeSet<(bool, u64, PageId)>,
    last_stamp: u64,
    pages: usize,
    pinned: usize,
}

impl Windows {
    /// Pages of the pool.
    pub(super) fn pages(&self) -> usize {
        self.pages
    }

    /// Pages of the pool that could be given back now.
    pub(super) fn evictable(&self) -> usize {
        self.pages - self.pinned
    }

    /// The part to evict first: whether it is useful, since when no receipt keeps it, and the page that it belongs to.
    fn first(&self) -> Option<(bool, u64, PageId)> {
        self.order.first().copied()
    }

    /// Pages of the pool that a cached page's part takes, or 0 for a tombstone.
    fn size(&self, page: PageId) -> usize {
        self.parts.get(&page).map_or(0, |part| part.pages.ids().len())
    }

    pub(super) fn contains(&self, page: PageId) -> bool {
        self.parts.contains_key(&page)
    }

    /// Receipts that keep the part, or 0 for a tombstone.
    pub(super) fn pins(&self, page: PageId) -> u32 {
        self.parts.get(&page).map_or(0, |part| part.pins)
    }

    /// Since when no receipt keeps the part, or 0 for a tombstone.
    fn stamp(&self, page: PageId) -> u64 {
        self.parts.get(&page).map_or(0, |part| part.stamp)
    }

    fn insert(&mut self, page: PageId, pages: CachedPages) {
        self.pages += pages.ids().len();
        self.pinned += pages.ids().len();
        let earlier = self
            .parts
            .insert(page, WindowPart { pages, pins: 1, useful: false, stamp: u64::MAX, name: None });
        assert!(earlier.is_none(), "{page:?} has two window parts");
    }

    /// Counts one more receipt for the part.
    pub(super) fn pin(&mut self, page: PageId) {
        let Some(part) = self.parts.get_mut(&page) else {
            unreachable!("{page:?} has no window part to keep")
        };
        part.pins += 1;
        if part.pins == 1 {
            self.pinned += part.pages.ids().len();
            self.order.remove(&part.place(page));
            part.stamp = u64::MAX;
        }
    }

    /// Counts one receipt less for each of these parts.
    fn unpin(&mut self, pages: impl Iterator<Item = PageId>) {
        self.last_stamp += 1;
        pages.for_each(|page| self.unpin_one(page));
    }

    fn unpin_one(&mut self, page: PageId) {
        let Some(part) = self.parts.get_mut(&page) else {
            unreachable!("{page:?} has no window part to let go")
        };
        part.pins -= 1;
        if part.pins == 0 {
            self.pinned -= part.pages.ids().len();
            part.stamp = self.last_stamp;
            self.order.insert(part.place(page));
        }
    }

    /// Marks the part to be saved, under its page's name, when it is evicted.
    pub(super) fn name(&mut self, page: PageId, name: PageHash) {
        if let Some(part) = self.parts.get_mut(&page) {
            part.name = Some(name);
        }
    }

    /// Marks the part as useful, so that it is evicted later.
    pub(super) fn mark(&mut self, page: PageId) {
        let Some(part) = self.parts.get_mut(&page) else { return };
        let moves = self.order.remove(&part.place(page));
        part.useful = true;
        if moves {
            self.order.insert(part.place(page));
        }
    }

    /// Takes out the part of a page that leaves the tree, or whose part becomes a tombstone.
    pub(super) fn remove(&mut self, page: PageId) -> Option<EvictedWindow> {
        let part = self.parts.remove(&page)?;
        assert_eq!(part.pins, 0, "a receipt keeps the window part of {page:?}");
        self.order.remove(&part.place(page));
        self.pages -= part.pages.ids().len();
        Some(EvictedWindow { name: part.name, pages: part.pages })
    }

    /// # Panics
    /// When a running count is wrong. `cached` says whether a page is in the tree.
    pub(super) fn audit(&self, cached: impl Fn(PageId) -> bool) {
        let count = |pinned: bool| {
            let parts = self.parts.values().filter(|part| (part.pins > 0) == pinned);
            parts.map(|part| part.pages.ids().len()).sum::<usize>()
        };
        assert_eq!((count(true), count(false)), (self.pinned, self.evictable()), "pages of window parts");
        let free = self.parts.iter().filter(|(_, part)| part.pins == 0);
        let ordered: BTreeSet<_> = free.map(|(page, part)| part.place(*page)).collect();
        assert_eq!(ordered, self.order, "the order of window parts");
        assert!(self.parts.keys().all(|page| cached(*page)), "a window part of a page that is not cached");
    }
}

impl RadixTree {
    /// Locks the longest cached prefix of these tokens at whose end the window is cached, and that window. If less has
    /// to be computed by recomputing the window at the end of the whole cached prefix ([`WindowShape::reach`]), it locks
    /// that prefix instead ([`PrefixLock::from`]). Like [`hold`](Self::hold), it does not count as a use yet: the window
    /// becomes useful only when a request continues there.
    pub fn hold_window(&mut self, namespace: Namespace, tokens: &[u32], shape: WindowShape) -> PrefixLock {
        let path = self.path(namespace, tokens);
        let page = self.page_tokens;
        let Reach { start, end } = shape.reach(path.len(), page, |at| self.windows.contains(path[at]));
        let mut lock = self.hold(namespace, &tokens[..end * page]);
        if start < end {
            lock.from = start as u32;
        } else if lock.pages() == end {
            let first = shape.first_live(end * page, page);
            lock.windows = path[first..end].to_vec();
            for page in &lock.windows {
                self.windows.pin(*page);
            }
        }
        lock
    }

    /// Marks the window at token page `at` of a locked prefix as useful, because a request continues there or others
    /// are likely to. It then stays as long as pages that were used as recently. Parts that are never marked are
    /// evicted first.
    pub fn mark_window(&mut self, lock: &PrefixLock, at: usize, shape: WindowShape) {
        let mut path = Vec::new();
        self.pages(lock, &mut path);
        let seen = shape.first_live(at * self.page_tokens, self.page_tokens)..at;
        path.get(seen).into_iter().flatten().for_each(|page| self.windows.mark(*page));
    }

    /// Gives the tree the window parts of a locked prefix from token page `first` on. `own` has the parts behind those
    /// that the receipt keeps already, in order. The tree takes the parts that it lacks, up to the end of the prefix, and
    /// the receipt keeps all of them. Returns the pages of all kept parts, parts that the tree had already, and parts
    /// behind the prefix.
    pub fn keep_windows(
        &mut self,
        pool: &mut PagePool,
        lock: &mut PrefixLock,
        first: usize,
        shape: WindowShape,
        mut own: HeldPages,
    ) -> KeptWindows {
        let mut duplicates = HeldPages::none();
        if self.namespaces.contains(lock.namespace) {
            let mut path = Vec::new();
            self.pages(lock, &mut path);
            for page in path.into_iter().skip(first + lock.windows.len()) {
                let rest = own.split_off(shape.parts as usize);
                let part = std::mem::replace(&mut own, rest);
                match self.windows.contains(page) {
                    true => {
                        self.windows.pin(page);
                        duplicates.append(part);
                    }
                    false => self.windows.insert(page, pool.cache(part)),
                }
                lock.windows.push(page);
            }
        }
        KeptWindows { pages: self.window_pages(lock), duplicates, rest: own }
    }

    /// The window parts that a receipt keeps, in order.
    #[must_use]
    pub fn window_pages(&self, lock: &PrefixLock) -> Vec<PageId> {
        let parts = lock.windows.iter().filter_map(|page| self.windows.parts.get(page));
        parts.flat_map(|part| part.pages.ids()).copied().collect()
    }

    /// Lets go of the first `count` window parts that a receipt keeps.
    pub fn unlock_windows(&mut self, lock: &mut PrefixLock, count: usize) {
        if count > 0 {
            self.windows.unpin(lock.windows.drain(..count));
        }
    }

    /// The pages of the longest cached prefix of some tokens.
    pub(super) fn path(&self, namespace: Namespace, tokens: &[u32]) -> Vec<PageId> {
        if !self.namespaces.contains(namespace) {
            return Vec::new();
        }
        let walk = self.walk(namespace, NO_NODE, 0, tokens);
        let (node, end, partly) = walk.into_parts();
        let mut path = vec![PageId(0); end];
        self.upwards(node).for_each(|(_, node)| {
            let end = node.end as usize;
            path[end - node.pages()..end].copy_from_slice(node.full().pages.ids());
        });
        if let Some((child, pages)) = partly {
            path.extend_from_slice(&self.nodes[child].full().pages.ids()[..pages]);
        }
        path
    }

    /// The window part to evict first, if there is one.
    pub(super) fn first_window(&self) -> Option<PageId> {
        self.windows.first().map(|(_, _, page)| page)
    }

    /// The window part to evict before a leaf, if any: a part that is not useful, or that was given up before the
    /// window part at the leaf's end. A leaf without a window part at its end goes before useful parts. A worker that
    /// computes has no use for such a leaf. A worker that is sent its windows keeps only those with which preempted
    /// requests are to continue.
    pub(super) fn window_to_evict(&self, leaf: Option<NodeIndex>) -> Option<PageId> {
        let (useful, stamp, page) = self.windows.first()?;
        let last = leaf.and_then(|leaf| self.nodes[leaf].full().pages.ids().last());
        let used = last.map(|last| self.windows.stamp(*last));
        (!useful || used.is_none_or(|used| stamp < used)).then_some(page)
    }

    /// How many pages a leaf must lose from its end to free `missing` pages of the pool, window parts included: at
    /// least one and at most all.
    pub(super) fn pages_to_cut(&self, leaf: NodeIndex, missing: usize) -> usize {
        let pages = self.nodes[leaf].full().pages.ids();
        let mut found = 0;
        let cut = pages.iter().rev().take_while(|page| {
            let wanted = found < missing;
            found += 1 + self.windows.size(**page);
            wanted
        });
        cut.count()
    }

    /// Evicts a page's window part and leaves a tombstone. There is no event, because the page stays.
    pub(super) fn evict_window(&mut self, page: PageId) -> EvictedWindow {
        self.windows.remove(page).unwrap_or_default()
    }

    /// The window parts of pages that left the tree.
    pub(super) fn windows_of(&mut self, pages: &CachedPages) -> Vec<EvictedWindow> {
        if self.windows.pages() == 0 {
            return Vec::new();
        }
        pages.ids().iter().filter_map(|page| self.windows.remove(*page)).collect()
    }
}

/// The result of offering window parts to the tree.
#[derive(Debug)]
#[must_use = "pages must go back"]
pub struct KeptWindows {
    /// The pages of all parts that the receipt keeps now.
    pub pages: Vec<PageId>,
    /// Pages of parts that the tree had already.
    pub duplicates: HeldPages,
    /// Pages of parts behind the prefix.
    pub rest: HeldPages,
}
