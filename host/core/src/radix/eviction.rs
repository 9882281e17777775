//! Getting pages back.

use super::RadixTree;
use super::chain::PageHash;
use super::event::{EventSink, TreeEvent};
use super::node::NodeIndex;
use crate::pool::CachedPages;

impl RadixTree {
    /// Evicts `wanted` pages, or all that are not locked if those are fewer, from the ends of sequences, and returns
    /// them for [`PagePool::release_cached`](crate::pool::PagePool::release_cached). A leaf that has more than are
    /// still wanted loses its last pages only. Costs O(log classes) per node and O(1) per page.
    pub fn evict(&mut self, wanted: usize, sink: &mut (impl EventSink + ?Sized)) -> CachedPages {
        let mut evicted = Vec::new();
        let mut missing = wanted;
        while missing > 0 {
            let Some(index) = self.order.first() else { break };
            let pages = match self.nodes[index].pages() <= missing {
                true => self.evict_leaf(index),
                false => self.trim_leaf(index, missing),
            };
            missing -= pages.ids().len();
            self.tell(sink, TreeEvent::Removed { pages: pages.ids() });
            evicted.push(pages);
        }
        let evicted = CachedPages::concat(evicted);
        self.counts.pages -= evicted.ids().len();
        self.counts.evicted += evicted.ids().len() as u64;
        evicted
    }

    /// [`evict`](Self::evict), with the names of the pages, node by node.
    pub(crate) fn evict_named(
        &mut self,
        wanted: usize,
        sink: &mut (impl EventSink + ?Sized),
    ) -> Vec<(Vec<PageHash>, CachedPages)> {
        let mut evicted = Vec::new();
        let mut missing = wanted;
        while missing > 0 {
            let Some(index) = self.order.first() else { break };
            let node = &self.nodes[index];
            let count = node.pages().min(missing);
            let names = self.node_hashes(index, node.end as usize - count);
            let pages = self.evict(count, sink);
            missing -= count;
            evicted.push((names, pages));
        }
        evicted
    }

    /// Evicts everything that is not locked. When nothing was, listeners are told so in one event.
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

    /// Forgets everything. What nobody keeps comes back at once; what is locked is found by nobody any more, stays for
    /// those who use it, and comes back through [`gone`](Self::gone) when its last receipt has. What is inserted with a
    /// receipt from before stays the caller's. Listeners are told that all is gone.
    pub fn clear(&mut self, sink: &mut (impl EventSink + ?Sized)) -> CachedPages {
        let before = (self.events, self.counts.evicted);
        let evicted = self.evict(usize::MAX, &mut ());
        (self.events, self.counts.evicted) = before;
        self.namespaces.forget_all();
        self.hashes.clear();
        self.tell(sink, TreeEvent::Cleared);
        evicted
    }

    /// Pages that went with the last receipt for them since the tree was [cleared](Self::clear). To be asked for after
    /// each [`unlock`](Self::unlock).
    pub fn gone(&mut self) -> CachedPages {
        CachedPages::concat(std::mem::take(&mut self.gone))
    }

    /// Takes a node whose namespace is forgotten away, and what led to it alone.
    pub(super) fn drop_forgotten(&mut self, mut index: NodeIndex) {
        while self.nodes[index].children == 0 && self.nodes[index].full().pins == 0 {
            let above = self.nodes[index].owner.get();
            let pages = self.evict_leaf(index);
            self.counts.pages -= pages.ids().len();
            self.gone.push(pages);
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
