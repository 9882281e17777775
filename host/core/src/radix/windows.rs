//! Window parts of cached pages, for models of which some layers slide ([`crate::window`]).
//!
//! A page in the tree may have its window part in the tree, or not (a *tombstone*). The pages of the pool that the part takes
//! are named here by the full part's page, so that whatever happens to nodes needs no correction. A worker that computes goes
//! on where the whole window is there, or behind all that is cached if the window there is soon recomputed
//! ([`RadixTree::hold_window`]). Where the window is there, the receipt keeps its parts too, for as long as its holder says.
//!
//! Parts that no receipt keeps are given up alone. First go those where no request has gone on and none is likely to. A long
//! prompt leaves its parts all along, so that others can go on anywhere, and what that takes is the first to be had. Then go
//! those that were used least recently, before pages that were used later. So what stays of a long sequence is the full part,
//! the parts of its end, where the next turn of a conversation goes on, and those of places where others went on.

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
    /// Receipts that keep it.
    pins: u32,
    /// Whether a request went on from here, or is likely to.
    useful: bool,
    /// When the last receipt gave the part up. Parts given up together have the same.
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
    /// Its pages and their names, if they are to be saved.
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
    /// Those that no receipt keeps, those that are not useful first, by when that began.
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

    /// The part to give up first: whether it is useful, since when no receipt keeps it, and whose it is.
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

    /// One receipt more.
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

    /// One receipt less for each of these.
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

    /// The part is to be saved, under its page's name, when it is evicted.
    pub(super) fn name(&mut self, page: PageId, name: PageHash) {
        if let Some(part) = self.parts.get_mut(&page) {
            part.name = Some(name);
        }
    }

    /// The part is to be kept.
    pub(super) fn mark(&mut self, page: PageId) {
        let Some(part) = self.parts.get_mut(&page) else { return };
        let moves = self.order.remove(&part.place(page));
        part.useful = true;
        if moves {
            self.order.insert(part.place(page));
        }
    }

    /// Takes the part of a page out that leaves the tree, or is to be a tombstone.
    pub(super) fn remove(&mut self, page: PageId) -> Option<EvictedWindow> {
        let part = self.parts.remove(&page)?;
        assert_eq!(part.pins, 0, "a receipt keeps the window part of {page:?}");
        self.order.remove(&part.place(page));
        self.pages -= part.pages.ids().len();
        Some(EvictedWindow { name: part.name, pages: part.pages })
    }

    /// # Panics
    /// When something counted along the way is wrong. `cached` says whether a page is in the tree.
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
    /// Locks the longest cached prefix of these tokens behind which can be computed, and the window that is seen there.
    /// If less is to be computed then ([`WindowShape::reach`]), this locks all that is cached of them instead, to
    /// recompute the window at its end ([`PrefixLock::from`]). As [`hold`](Self::hold), it counts as no use yet: the
    /// window counts for no more than before until a request goes on there.
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

    /// Says that others are likely to go on from token page `at` of a locked prefix, or that a request does: its window
    /// stays as long as pages that were used as recently. Parts of which that is never said go first of all.
    pub fn mark_window(&mut self, lock: &PrefixLock, at: usize, shape: WindowShape) {
        let mut path = Vec::new();
        self.pages(lock, &mut path);
        let seen = shape.first_live(at * self.page_tokens, self.page_tokens)..at;
        path.get(seen).into_iter().flatten().for_each(|page| self.windows.mark(*page));
    }

    /// Gives the tree the window parts of a locked prefix from token page `first` on: behind those that the receipt
    /// keeps already, `own` in order. It takes what it has not, up to the end of the prefix, and the receipt keeps all of
    /// them. Returns the pages of all that it keeps, then those that the tree had already, and those behind the prefix.
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

    /// Lets the first `count` window parts go that a receipt keeps.
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

    /// The window part to give up first, if some must be.
    pub(super) fn first_window(&self) -> Option<PageId> {
        self.windows.first().map(|(_, _, page)| page)
    }

    /// The window part to give up before a leaf, if any: one that is not useful, or was not used since the leaf's end
    /// was. A leaf without a window at its end goes first: on a worker that computes it is of no use, and one that is
    /// sent its windows keeps only those that a preempted request left to go on with.
    pub(super) fn window_to_evict(&self, leaf: Option<NodeIndex>) -> Option<PageId> {
        let (useful, stamp, page) = self.windows.first()?;
        let last = leaf.and_then(|leaf| self.nodes[leaf].full().pages.ids().last());
        let used = last.map(|last| self.windows.stamp(*last));
        (!useful || used.is_none_or(|used| stamp < used)).then_some(page)
    }

    /// How many pages from its end on a leaf loses for so many pages of the pool, at least one and at most all.
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

    /// Makes a page's window part a tombstone. That is no event: the page stays.
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

/// What became of the window parts that were offered.
#[derive(Debug)]
#[must_use = "pages must go back"]
pub struct KeptWindows {
    /// The pages of all parts that the receipt keeps now.
    pub pages: Vec<PageId>,
    /// Those for which the tree had others already.
    pub duplicates: HeldPages,
    /// Those behind the prefix.
    pub rest: HeldPages,
}
