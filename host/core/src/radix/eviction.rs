//! Eviction: getting pages back from the tree.

use super::RadixTree;
use super::chain::PageHash;
use super::event::{EventSink, TreeEvent};
use super::node::NodeIndex;
use super::windows::EvictedWindow;
use crate::pool::CachedPages;

impl RadixTree {
    /// Evicts `wanted` pages from the ends of sequences, or all that are not locked if those are fewer. Returns them
    /// for [`PagePool::release_cached`](crate::pool::PagePool::release_cached), with a few more if window parts go with
    /// them. A leaf that has more pages than are still wanted loses only its last ones. Costs O(log classes) per node
    /// and O(1) per page.
    pub fn evict(&mut self, wanted: usize, sink: &mut (impl EventSink + ?Sized)) -> CachedPages {
        let mut evicted = Vec::new();
        let mut missing = wanted;
        while missing > 0 {
            let leaf = self.order.first();
            if let Some(page) = self.window_to_evict(leaf) {
                let window = self.evict_window(page).pages;
                missing = missing.saturating_sub(window.ids().len());
                self.counts.evicted += window.ids().len() as u64;
                evicted.push(window);
                continue;
            }
            let Some(index) = leaf else { break };
            let count = self.pages_to_cut(index, missing);
            let (pages, windows) = self.cut_leaf(index, count, sink);
            let windows = windows.into_iter().map(|window| window.pages);
            for pages in std::iter::once(pages).chain(windows) {
                missing = missing.saturating_sub(pages.ids().len());
                evicted.push(pages);
            }
        }
        CachedPages::concat(evicted)
    }

    /// Evicts window parts only, until they amount to so many pages or no part is left to evict.
    pub fn evict_windows(&mut self, wanted: usize) -> CachedPages {
        let evicted = self.evict_windows_named(wanted);
        CachedPages::concat(evicted.into_iter().map(|(_, pages)| pages).collect())
    }

    /// The same, part by part, with names for the parts that are [to be saved](Self::name_windows).
    pub(crate) fn evict_windows_named(&mut self, wanted: usize) -> Vec<(Vec<PageHash>, CachedPages)> {
        let mut evicted = Vec::new();
        let mut missing = wanted;
        while missing > 0 {
            let Some(page) = self.first_window() else { break };
            let window = self.evict_window(page);
            missing = missing.saturating_sub(window.pages.ids().len());
            self.counts.evicted += window.pages.ids().len() as u64;
            evicted.push(window.named());
        }
        evicted
    }

    /// Like [`evict`](Self::evict), but `wanted` counts only pages of sequences, not the window parts that go with
    /// them.
    pub fn evict_pages(&mut self, wanted: usize, sink: &mut (impl EventSink + ?Sized)) -> CachedPages {
        let mut evicted = Vec::new();
        let mut missing = wanted;
        while missing > 0 {
            let Some(index) = self.order.first() else { break };
            let count = self.nodes[index].pages().min(missing);
            let (pages, windows) = self.cut_leaf(index, count, sink);
            missing -= count;
            evicted.push(pages);
            evicted.extend(windows.into_iter().map(|window| window.pages));
        }
        CachedPages::concat(evicted)
    }

    /// Takes `count` pages from the end of a leaf, with their window parts.
    fn cut_leaf(
        &mut self,
        index: NodeIndex,
        count: usize,
        sink: &mut (impl EventSink + ?Sized),
    ) -> (CachedPages, Vec<EvictedWindow>) {
        let pages = match self.nodes[index].pages() == count {
            true => self.evict_leaf(index),
            false => self.trim_leaf(index, count),
        };
        self.tell(sink, TreeEvent::Removed { pages: pages.ids() });
        self.counts.pages -= count;
        let windows = self.windows_of(&pages);
        let evicted = count + windows.iter().map(|window| window.pages.ids().len()).sum::<usize>();
        self.counts.evicted += evicted as u64;
        (pages, windows)
    }

    /// Like [`evict`](Self::evict), with the names of the pages: node by node, and for windows part by part. Only window
    /// parts that are [to be saved](Self::name_windows) have names.
    pub(crate) fn evict_named(
        &mut self,
        wanted: usize,
        sink: &mut (impl EventSink + ?Sized),
    ) -> Vec<(Vec<PageHash>, CachedPages)> {
        let mut evicted = Vec::new();
        let mut missing = wanted;
        while missing > 0 {
            let leaf = self.order.first();
            if let Some(page) = self.window_to_evict(leaf) {
                let window = self.evict_window(page);
                missing = missing.saturating_sub(window.pages.ids().len());
                self.counts.evicted += window.pages.ids().len() as u64;
                evicted.push(window.named());
                continue;
            }
            let Some(index) = leaf else { break };
            let count = self.pages_to_cut(index, missing);
            let names = self.node_hashes(index, self.nodes[index].end as usize - count);
            let (pages, windows) = self.cut_leaf(index, count, sink);
            missing = missing.saturating_sub(pages.ids().len());
            evicted.push((names, pages));
            for window in windows {
                missing = missing.saturating_sub(window.pages.ids().len());
                evicted.push(window.named());
            }
        }
        evicted
    }

    /// Evicts everything that is not locked. If nothing is locked, listeners get one `Cleared` event.
    pub fn flush(&mut self, sink: &mut (impl EventSink + ?Sized)) -> CachedPages {
        if self.counts.locked > 0 {
            return self.evict(usize::MAX, sink);
        }
        let before = self.events;
        let evicted = self.evict(usize::MAX, &mut ());
        self.events = before;
        self.tell(sink, TreeEvent::Cleared);
        evicted
    }

    /// Forgets everything. Returns the pages that no receipt keeps. Locked pages are not found any more, stay for their
    /// users, and come back through [`gone`](Self::gone) when their last receipt has come back. Pages that are inserted
    /// with an earlier receipt stay the caller's. Listeners get a `Cleared` event.
    pub fn clear(&mut self, sink: &mut (impl EventSink + ?Sized)) -> CachedPages {
        let before = (self.events, self.counts.evicted);
        let evicted = self.evict(usize::MAX, &mut ());
        (self.events, self.counts.evicted) = before;
        self.namespaces.forget_all();
        self.hashes.clear();
        self.tell(sink, TreeEvent::Cleared);
        evicted
    }

    /// Takes the pages of a [cleared](Self::clear) tree whose last receipt has come back. The caller must ask for them
    /// after each [`unlock`](Self::unlock).
    pub fn gone(&mut self) -> CachedPages {
        CachedPages::concat(std::mem::take(&mut self.gone))
    }

    /// Removes a node whose namespace is forgotten, and the ancestors that led to this node alone.
    pub(super) fn drop_forgotten(&mut self, mut index: NodeIndex) {
        while self.nodes[index].children == 0 && self.nodes[index].full().pins == 0 {
            let above = self.nodes[index].owner.get();
            let pages = self.evict_leaf(index);
            self.counts.pages -= pages.ids().len();
            let windows = self.windows_of(&pages);
            self.gone.push(pages);
            self.gone.extend(windows.into_iter().map(|window| window.pages));
            let Ok(parent) = above else { return };
            index = parent;
        }
    }

    fn evict_leaf(&mut self, index: NodeIndex) -> CachedPages {
        self.order.remove(&mut self.nodes, index);
        self.hashes.remove(&index);
        let node = self.nodes.remove(index);
        assert_eq!(node.children, 0, "only leaves are evicted");
        let hash = self.children.hash(node.owner, &node.tokens[..self.page_tokens]);
        self.children.remove(hash, index);
        match node.owner.get() {
            Ok(parent) => self.nodes[parent].children -= 1,
            Err(namespace) => self.namespaces.root_removed(namespace),
        }
        let [part] = node.parts;
        part.pages
    }

    fn trim_leaf(&mut self, index: NodeIndex, count: usize) -> CachedPages {
        self.hashes.remove(&index);
        let node = &mut self.nodes[index];
        assert_eq!(node.children, 0, "only leaves are evicted");
        let keep = node.pages() - count;
        let mut tokens = std::mem::take(&mut node.tokens).into_vec();
        tokens.truncate(keep * self.page_tokens);
        node.tokens = tokens.into_boxed_slice();
        node.end -= count as u32;
        node.full_mut().pages.split_off(keep)
    }
}
