//! Matching of tokens, and receipts that keep the matched prefixes.

use super::namespace::Namespace;
use super::node::{ComponentPages, NO_NODE, Node, NodeIndex, Owner};
use super::{NodeData, RadixTree};
use crate::ids::PageId;

/// A cached prefix that stays for as long as this receipt is out.
///
/// It cannot be copied. However a request ends, its receipt must go back to [`RadixTree::unlock`] (or to
/// [`RadixTree::insert`], which returns a new one). This holds for a receipt for no pages, too.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the prefix stays locked for ever unless the receipt goes back to the tree"]
pub struct PrefixLock {
    pub(super) namespace: Namespace,
    pub(super) node: NodeIndex,
    pub(super) pages: u32,
    /// Where computing begins, in pages.
    pub(super) from: u32,
    /// A range of the prefix's pages whose window parts stay as well.
    pub(super) windows: Vec<PageId>,
}

impl PrefixLock {
    /// Pages of the prefix.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages as usize
    }

    /// The page at which a worker that computes continues: the page behind the prefix, or an earlier one if the window
    /// at its end must be recomputed ([`crate::window::Reach`]).
    #[must_use]
    pub fn from(&self) -> usize {
        self.from as usize
    }

    /// Pages whose window parts the receipt keeps.
    #[must_use]
    pub fn windows(&self) -> usize {
        self.windows.len()
    }

    /// Whether another receipt keeps the same pages. Their window parts are not compared.
    pub(crate) fn is_like(&self, other: &PrefixLock) -> bool {
        (self.namespace, self.node, self.pages) == (other.namespace, other.node, other.pages)
    }
}

/// How far tokens match in the tree.
pub(super) struct Walk {
    /// The last node whose tokens match completely.
    node: NodeIndex,
    /// Pages up to the end of that node.
    end: usize,
    /// A child of that node of which only the first pages match, and their number.
    partly: Option<(NodeIndex, usize)>,
}

impl Walk {
    /// The last node that matches completely, the pages up to its end, and the child that matches partly with its
    /// number of matching pages.
    pub(super) fn into_parts(self) -> (NodeIndex, usize, Option<(NodeIndex, usize)>) {
        (self.node, self.end, self.partly)
    }

    pub(super) fn pages(&self) -> usize {
        self.end + self.partly.map_or(0, |(_, pages)| pages)
    }
}

impl RadixTree {
    /// Locks the longest cached prefix of these tokens, up to all of them. A worker that must compute at least one
    /// token of the prompt passes all but the last.
    ///
    /// Counts as a use of the prefix, for policies that count uses.
    pub fn lock(&mut self, namespace: Namespace, tokens: &[u32]) -> PrefixLock {
        let lock = self.hold(namespace, tokens);
        self.count_use(&lock);
        lock
    }

    /// Like [`lock`](Self::lock), for a request that may give the receipt back unused. Only
    /// [`count_use`](Self::count_use) counts a use.
    pub fn hold(&mut self, namespace: Namespace, tokens: &[u32]) -> PrefixLock {
        self.counts.locks += 1;
        if !self.namespaces.lock_added(namespace) {
            return PrefixLock { namespace, node: NO_NODE, pages: 0, from: 0, windows: Vec::new() };
        }
        let (node, pages) = self.descend(namespace, NO_NODE, 0, tokens);
        if node != NO_NODE {
            self.pin(node);
        }
        PrefixLock { namespace, node, pages: pages as u32, from: pages as u32, windows: Vec::new() }
    }

    /// Counts a use of a locked prefix, for policies that count uses. Also marks the window that the receipt keeps: a
    /// request continues there. The hits of a node must not change while it is in the order of eviction. Locked nodes are
    /// not in it.
    pub fn count_use(&mut self, lock: &PrefixLock) {
        lock.windows.iter().for_each(|page| self.windows.mark(*page));
        let mut at = lock.node;
        while at != NO_NODE {
            let node = &mut self.nodes[at];
            let part = node.full_mut();
            part.hits = part.hits.saturating_add(1);
            at = node.owner.get().unwrap_or(NO_NODE);
        }
    }

    /// Another receipt for the same prefix without its window, for a second request with the same prompt.
    pub fn lock_again(&mut self, lock: &PrefixLock) -> PrefixLock {
        self.counts.locks += 1;
        self.namespaces.lock_added(lock.namespace);
        if lock.node != NO_NODE {
            self.pin(lock.node);
        }
        let (node, pages) = (lock.node, lock.pages);
        PrefixLock { namespace: lock.namespace, node, pages, from: pages, windows: Vec::new() }
    }

    /// Takes a receipt back. Nodes that no other receipt keeps become evictable, as the most recently used of their
    /// class.
    pub fn unlock(&mut self, mut lock: PrefixLock) {
        let windows = lock.windows.len();
        self.unlock_windows(&mut lock, windows);
        self.counts.locks -= 1;
        self.namespaces.lock_removed(lock.namespace);
        if lock.node != NO_NODE {
            self.unpin(lock.node);
            if !self.namespaces.contains(lock.namespace) {
                self.drop_forgotten(lock.node);
            }
        }
    }

    /// Follows tokens down from the node `from`. Their first `start` pages lead to the end of that node.
    pub(super) fn walk(&self, namespace: Namespace, from: NodeIndex, start: usize, tokens: &[u32]) -> Walk {
        let page = self.page_tokens;
        let full = tokens.len() / page * page;
        let mut rest = &tokens[start * page..full];
        let mut owner = match from {
            NO_NODE => Owner::namespace(namespace),
            node => Owner::parent(node),
        };
        let mut walk = Walk { node: from, end: start, partly: None };
        while !rest.is_empty() {
            let Some(index) = self.find_child(owner, rest) else { break };
            let edge = &self.nodes[index].tokens;
            // The first page was compared by finding the child. A whole edge is one comparison of memory.
            if rest.len() < edge.len() || rest[page..edge.len()] != edge[page..] {
                let pages = edge.chunks_exact(page).zip(rest.chunks_exact(page));
                walk.partly = Some((index, pages.take_while(|(ours, theirs)| ours == theirs).count()));
                break;
            }
            walk.node = index;
            walk.end += edge.len() / page;
            owner = Owner::parent(index);
            rest = &rest[edge.len()..];
        }
        walk
    }

    /// Follows tokens down as far as they match, and splits a node if it goes on behind that place. Returns the node
    /// that ends there, and the pages up to its end.
    pub(super) fn descend(
        &mut self,
        namespace: Namespace,
        from: NodeIndex,
        start: usize,
        tokens: &[u32],
    ) -> (NodeIndex, usize) {
        let walk = self.walk(namespace, from, start, tokens);
        match walk.partly {
            Some((index, pages)) => (self.split(index, pages), walk.end + pages),
            None => (walk.node, walk.end),
        }
    }

    /// The child whose tokens start with the first page of these.
    pub(super) fn find_child(&self, owner: Owner, tokens: &[u32]) -> Option<NodeIndex> {
        let first = &tokens[..self.page_tokens];
        self.children.find(self.children.hash(owner, first), |index| {
            let node = &self.nodes[index];
            node.owner == owner && node.tokens[..first.len()] == *first
        })
    }

    /// Cuts a node after `at` pages and returns the new upper half. The lower half keeps the index of the node, so
    /// receipts and children that refer to it stay valid. If the lower half is pinned, it pins the upper one.
    fn split(&mut self, lower: NodeIndex, at: usize) -> NodeIndex {
        let cut = at * self.page_tokens;
        let node = &mut self.nodes[lower];
        assert!(at > 0 && cut < node.tokens.len(), "a split leaves pages on both sides");
        let pinned = node.full().pins > 0;
        let owner = node.owner;
        let mut tokens = std::mem::take(&mut node.tokens).into_vec();
        node.tokens = tokens.split_off(cut).into_boxed_slice();
        let rest = node.full_mut().pages.split_off(at);
        let pages = std::mem::replace(&mut node.full_mut().pages, rest);
        let upper = Node {
            tokens: tokens.into_boxed_slice(),
            parts: [ComponentPages::new(pages, u32::from(pinned), node.full().hits)],
            owner,
            children: 1,
            end: node.end - node.pages() as u32,
            priority: node.priority,
        };
        const { assert!(NodeData::COUNT == 1, "the upper half needs every component") };
        let hash = self.children.hash(owner, &upper.tokens[..self.page_tokens]);
        let upper = self.nodes.insert(upper);
        self.children.replace(hash, lower, upper);
        let owner = Owner::parent(upper);
        self.nodes[lower].owner = owner;
        let hash = self.children.hash(owner, &self.nodes[lower].tokens[..self.page_tokens]);
        self.children.insert(hash, lower);
        if !pinned {
            // The place in the order does not matter: the caller pins the upper half next.
            self.order.push(&mut self.nodes, upper);
        }
        upper
    }

    /// Adds a pin. A node's first pin pins its parent.
    pub(super) fn pin(&mut self, mut index: NodeIndex) {
        loop {
            let part = self.nodes[index].full_mut();
            part.pins += 1;
            if part.pins > 1 {
                return;
            }
            self.order.remove(&mut self.nodes, index);
            self.counts.locked += self.nodes[index].pages();
            let Ok(parent) = self.nodes[index].owner.get() else { return };
            index = parent;
        }
    }

    /// Takes a pin away. The last one unpins the parent.
    pub(super) fn unpin(&mut self, mut index: NodeIndex) {
        loop {
            let part = self.nodes[index].full_mut();
            part.pins -= 1;
            if part.pins > 0 {
                return;
            }
            self.order.push(&mut self.nodes, index);
            self.counts.locked -= self.nodes[index].pages();
            let Ok(parent) = self.nodes[index].owner.get() else { return };
            index = parent;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::pool::PagePool;
    use crate::radix::{NamespaceKey, PageHash, Policy, TreeConfig};

    #[test]
    fn prompts_whose_hashes_collide_keep_their_own_pages() {
        let identity = PageHash([0; 32]);
        let config = TreeConfig { page_tokens: 2, policy: Policy::Lru, identity, max_namespaces: 1, seed: 5 };
        let mut tree = RadixTree::new(&config);
        let namespace = tree.namespace(&NamespaceKey::default()).unwrap();
        let mut seen = BTreeMap::new();
        let colliding = (0..1_000_000).map(|token| [token, token + 1]).find_map(|page| {
            let hash = tree.children.hash(Owner::namespace(namespace), &page);
            seen.insert(hash, page).map(|other| [other, page])
        });
        let mut pool = PagePool::new(2);
        for page in colliding.unwrap() {
            let lock = tree.lock(namespace, &page);
            assert_eq!(lock.pages(), 0, "another prompt's page");
            let owned = pool.allocate(1).unwrap();
            let offered = owned.ids().to_vec();
            let inserted = tree.insert(&mut pool, lock, &page, owned, 0, &mut ());
            let mut pages = Vec::new();
            tree.pages(&inserted.lock, &mut pages);
            assert_eq!(pages, offered);
            pool.release(inserted.duplicates);
            pool.release(inserted.rest);
            tree.unlock(inserted.lock);
        }
        tree.audit();
        assert_eq!(tree.counts().pages, 2);
    }
}
