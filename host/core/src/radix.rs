//! The radix tree: which cached pages hold the KV of which tokens.
//!
//! A node owns a *range* of pages and the raw tokens of the edge that leads to it. Matching compares tokens, so no
//! collision can serve another prompt's KV. Everything is in whole pages. The life of a request:
//!
//! ```text
//! lock    the longest cached prefix, as a receipt ([`PrefixLock`]) that keeps it from being evicted
//! insert  what was received or computed, as often as wanted (the receipt then names the longer prefix)
//! unlock  once, at the end, however it ends
//! ```
//!
//! and once per tick, for all admissions together, [`RadixTree::evict`] gives back exactly as many pages as are wanted,
//! if so many are not locked. The order of eviction persists between calls (see [`Policy`]). Time is the order of
//! calls: there is no clock.
//!
//! If a prefix ends inside a node, the node is split there first, so a lock never keeps more than its prefix. The lower
//! half keeps the index of the node, so receipts, children and pins below a split need no correction.

mod chain;
mod changes;
mod children;
mod event;
mod eviction;
mod insertion;
mod lock;
mod namespace;
mod node;
mod order;
mod window_receipts;
mod windows;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

pub use chain::PageHash;
pub use changes::{After, CacheChanges, CacheEvent};
pub use event::{EventSink, TreeEvent};
pub use insertion::Inserted;
pub use lock::PrefixLock;
pub use namespace::{Namespace, NamespaceKey};
pub use node::NodeData;
pub use order::Policy;
pub use windows::KeptWindows;

use crate::ids::PageId;
use crate::pool::CachedPages;
use children::Children;
use namespace::Namespaces;
use node::{NO_NODE, NodeIndex, Nodes, Owner};
use order::Order;
use windows::Windows;

/// The configuration of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeConfig {
    /// Tokens in a page.
    pub page_tokens: u32,
    /// Which nodes are evicted first.
    pub policy: Policy,
    /// Digest of everything beside namespace and tokens that makes KV differ: model weights, dtype, layout, page size,
    /// TP shard. Hash chains start from it.
    pub identity: PageHash,
    /// Most namespaces at a time. Beyond it the oldest namespace without pages and receipts is forgotten.
    pub max_namespaces: usize,
    /// Any number that clients do not know: it keeps them from choosing tokens that are slow to look up.
    pub seed: u64,
}

/// Counts of what is in a tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeCounts {
    /// Pages.
    pub pages: usize,
    /// Pages that some receipt keeps. The others can be evicted.
    pub locked: usize,
    /// Additional pages of the pool that hold window parts of some of these pages.
    pub window_pages: usize,
    /// Nodes.
    pub nodes: usize,
    /// Receipts that have not come back.
    pub locks: usize,
    /// Pages evicted since start.
    pub evicted: u64,
    /// Namespaces that hold pages or receipts.
    pub namespaces: usize,
}

/// The tree of one pool.
#[derive(Debug)]
pub struct RadixTree {
    page_tokens: usize,
    identity: PageHash,
    namespaces: Namespaces,
    nodes: Nodes,
    children: Children,
    order: Order,
    counts: TreeCounts,
    /// Hash of a node's last page, for nodes for which it was needed.
    hashes: BTreeMap<NodeIndex, PageHash>,
    /// Events sent.
    events: u64,
    /// Pages of a cleared tree whose last receipt has come back.
    gone: Vec<CachedPages>,
    windows: Windows,
}

impl RadixTree {
    /// An empty tree.
    ///
    /// # Panics
    /// When a page has no tokens.
    #[must_use]
    pub fn new(config: &TreeConfig) -> Self {
        assert!(config.page_tokens > 0, "a page needs tokens");
        Self {
            page_tokens: config.page_tokens as usize,
            identity: config.identity,
            namespaces: Namespaces::new(config.max_namespaces),
            nodes: Nodes::default(),
            children: Children::new(config.seed),
            order: Order::new(config.policy),
            counts: TreeCounts::default(),
            hashes: BTreeMap::new(),
            events: 0,
            gone: Vec::new(),
            windows: Windows::default(),
        }
    }

    /// The namespace of this key. `None` when the allowed number of other namespaces hold pages or receipts: the
    /// request must then run without the cache. The tree may forget a namespace if nothing in it is locked before the
    /// caller asks for the next one.
    pub fn namespace(&mut self, key: &NamespaceKey) -> Option<Namespace> {
        self.namespaces.intern(key, &self.identity)
    }

    /// Counts of the tree's contents.
    #[must_use]
    pub fn counts(&self) -> TreeCounts {
        TreeCounts {
            nodes: self.children.len(),
            namespaces: self.namespaces.in_use(),
            window_pages: self.windows.pages(),
            ..self.counts
        }
    }

    /// Pages that [`evict`](Self::evict) could give back now, window parts included.
    #[must_use]
    pub fn evictable(&self) -> usize {
        self.counts.pages - self.counts.locked + self.windows.evictable()
    }

    /// The same as two numbers: pages of sequences, and pages of window parts.
    #[must_use]
    pub fn evictable_parts(&self) -> (usize, usize) {
        (self.counts.pages - self.counts.locked, self.windows.evictable())
    }

    /// How many pages a lock on these tokens would get. Changes nothing, the order of eviction included.
    #[must_use]
    pub fn peek(&self, namespace: Namespace, tokens: &[u32]) -> usize {
        if !self.namespaces.contains(namespace) {
            return 0;
        }
        self.walk(namespace, NO_NODE, 0, tokens).pages()
    }

    /// The pages of a locked prefix, in order, behind what `into` holds already.
    pub fn pages(&self, lock: &PrefixLock, into: &mut Vec<PageId>) {
        let start = into.len();
        into.resize(start + lock.pages(), PageId(0));
        for (_, node) in self.upwards(lock.node) {
            let end = start + node.end as usize;
            into[end - node.pages()..end].copy_from_slice(node.full().pages.ids());
        }
    }

    /// The names of a locked prefix's pages behind the first `known`, in order, or none once its namespace is
    /// forgotten. Every node remembers the name of its last page once it was asked for, so naming newly inserted pages
    /// costs one hash for each of them.
    pub fn page_hashes(&mut self, lock: &PrefixLock, known: usize) -> Vec<PageHash> {
        match self.namespaces.contains(lock.namespace) {
            true => self.node_hashes(lock.node, known),
            false => Vec::new(),
        }
    }

    /// The names of the pages that lead to a node's end, behind the first `known`.
    fn node_hashes(&mut self, end: NodeIndex, known: usize) -> Vec<PageHash> {
        let top = self.upwards(end).last().map(|(_, node)| node.owner.get());
        let Some(Err(namespace)) = top else { return Vec::new() };
        let Some(mut last) = self.namespaces.seed(namespace) else { return Vec::new() };
        let mut hashes = Vec::new();
        let mut path = Vec::new();
        for (index, node) in self.upwards(end) {
            if let Some(hash) = self.hashes.get(&index).filter(|_| node.end as usize <= known) {
                last = *hash;
                break;
            }
            path.push(index);
        }
        for index in path.into_iter().rev() {
            let node = &self.nodes[index];
            let start = node.end as usize - node.pages();
            for (page, tokens) in (start..).zip(node.tokens.chunks_exact(self.page_tokens)) {
                last = last.next(tokens);
                if page >= known {
                    hashes.push(last);
                }
            }
            self.hashes.insert(index, last);
        }
        hashes
    }

    /// Whether a locked prefix can still be found. It cannot after the tree was [cleared](Self::clear).
    pub(crate) fn is_found(&self, lock: &PrefixLock) -> bool {
        self.namespaces.contains(lock.namespace)
    }

    /// Whether only `receipts` receipts like this one keep the last pages of its prefix, or one of its window parts.
    pub(crate) fn is_kept_by(&self, lock: &PrefixLock, receipts: usize) -> bool {
        lock.node != NO_NODE && self.nodes[lock.node].full().pins as usize == receipts
            || lock.windows.iter().any(|page| self.windows.pins(*page) as usize == receipts)
    }

    /// How often the pages of a locked prefix were matched, by ranges of pages, the last range first.
    pub(crate) fn hits(&self, lock: &PrefixLock) -> Vec<(Range<usize>, u32)> {
        let pages = |node: &node::Node| node.end as usize - node.pages()..node.end as usize;
        self.upwards(lock.node).map(|(_, node)| (pages(node), node.full().hits)).collect()
    }

    /// A node and its ancestors.
    fn upwards(&self, node: NodeIndex) -> impl Iterator<Item = (NodeIndex, &node::Node)> {
        let first = Some(node).filter(|node| *node != NO_NODE);
        std::iter::successors(first, |index| self.nodes[*index].owner.get().ok())
            .map(|index| (index, &self.nodes[index]))
    }

    fn tell(&mut self, sink: &mut (impl EventSink + ?Sized), event: TreeEvent<'_>) {
        self.events += 1;
        sink.event(self.events, event);
    }

    /// Recounts everything, for tests and for a worker that is idle.
    ///
    /// # Panics
    /// When a running count is wrong, or the order of eviction would not start with a leaf.
    pub fn audit(&self) {
        let mut counts = TreeCounts {
            locks: self.counts.locks,
            evicted: self.counts.evicted,
            namespaces: self.namespaces.in_use(),
            window_pages: self.windows.pages(),
            ..TreeCounts::default()
        };
        let mut children: BTreeMap<Owner, (u32, u32)> = BTreeMap::new();
        let mut roots = 0;
        for (index, node) in self.nodes.iter() {
            let pinned = node.full().pins > 0;
            counts.nodes += 1;
            counts.pages += node.pages();
            counts.locked += if pinned { node.pages() } else { 0 };
            assert_eq!(
                node.tokens.len(),
                node.pages() * self.page_tokens,
                "node {index}: tokens of its pages"
            );
            let (above, parent_pinned) = match node.owner.get() {
                Ok(parent) => (self.nodes[parent].end, self.nodes[parent].full().pins > 0),
                Err(namespace) => {
                    roots += u32::from(self.namespaces.contains(namespace));
                    (0, true)
                }
            };
            assert_eq!(node.end as usize, above as usize + node.pages(), "node {index}: where it ends");
            assert!(parent_pinned || !pinned, "node {index} is pinned and its parent is not");
            let found = self.find_child(node.owner, &node.tokens);
            assert_eq!(found, Some(index), "node {index} is found from its parent");
            let count = children.entry(node.owner).or_default();
            count.0 += 1;
            count.1 += u32::from(pinned);
        }
        assert_eq!(counts, self.counts(), "counted one by one");
        assert_eq!(roots, self.namespaces.roots(), "nodes at the top");
        let cached: BTreeSet<PageId> =
            self.nodes.iter().flat_map(|(_, node)| node.full().pages.ids()).copied().collect();
        self.windows.audit(|page| cached.contains(&page));
        let mut locks = 0;
        for (index, node) in self.nodes.iter() {
            let (all, pinned) = children.get(&Owner::parent(index)).copied().unwrap_or_default();
            assert_eq!(node.children, all, "node {index}: its children");
            assert!(node.full().pins >= pinned, "node {index}: a pinned child does not pin it");
            locks += (node.full().pins - pinned) as usize;
        }
        assert!(self.namespaces.locks() <= self.counts.locks, "locks of namespaces");
        assert!(locks <= self.counts.locks, "{locks} locks on nodes, {} given out", self.counts.locks);
        let mut gone: BTreeMap<Owner, u32> = BTreeMap::new();
        let mut ordered = 0;
        for index in self.order.iter(&self.nodes) {
            let node = &self.nodes[index];
            ordered += node.pages();
            assert_eq!(node.full().pins, 0, "node {index} is pinned and could be evicted");
            let before = gone.get(&Owner::parent(index)).copied().unwrap_or_default();
            assert_eq!(before, node.children, "node {index} would be evicted before a child of it");
            *gone.entry(node.owner).or_default() += 1;
        }
        assert_eq!(
            ordered,
            self.counts.pages - self.counts.locked,
            "pages that can be evicted are in the order of eviction"
        );
    }
}
