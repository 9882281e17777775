//! Giving pages to the tree.

use super::RadixTree;
use super::event::{EventSink, TreeEvent};
use super::lock::PrefixLock;
use super::node::{ComponentPages, NO_NODE, Node, NodeIndex, Owner};
use crate::ids::PageId;
use crate::pool::{HeldPages, PagePool};

/// The result of an insertion: what the tree did with each offered page.
#[derive(Debug)]
#[must_use = "pages and the receipt must go back"]
pub struct Inserted {
    /// The receipt for the whole pages of the inserted tokens. It replaces the receipt that was passed in.
    pub lock: PrefixLock,
    /// Pages that the tree took.
    pub taken: usize,
    /// Pages for which the tree had others already. The caller continues with the tree's pages ([`RadixTree::pages`])
    /// and releases these, once no work that uses them is under way.
    pub duplicates: HeldPages,
    /// Pages behind the last whole page of tokens, or all when the receipt's namespace is forgotten. They stay the caller's.
    pub rest: HeldPages,
}

impl RadixTree {
    /// Gives the tree the KV of `tokens`, which start with the locked prefix. `owned` are the pages behind the locked
    /// ones, in order. They must be complete up to the last whole page of `tokens`, and nothing may write them any
    /// more. `owned` may have further pages.
    ///
    /// `priority` is for [`Policy::Priority`](super::Policy::Priority): pages of a higher priority stay longer, and so
    /// do the pages before them.
    ///
    /// # Panics
    /// When there are fewer tokens than the lock covers, or fewer pages than tokens.
    pub fn insert(
        &mut self,
        pool: &mut PagePool,
        lock: PrefixLock,
        tokens: &[u32],
        mut owned: HeldPages,
        priority: i32,
        sink: &mut (impl EventSink + ?Sized),
    ) -> Inserted {
        let start = lock.pages();
        let whole = tokens.len() / self.page_tokens;
        assert!(whole >= start, "{whole} pages of tokens, {start} of them locked");
        assert!(owned.ids().len() >= whole - start, "{} pages for {}", owned.ids().len(), whole - start);
        debug_assert_eq!(
            self.walk(lock.namespace, NO_NODE, 0, tokens).pages().min(start),
            start,
            "not the locked tokens"
        );
        if !self.namespaces.contains(lock.namespace) {
            // The namespace was forgotten since the request began, so the pages could not be found again.
            let duplicates = HeldPages::none();
            return Inserted { lock, taken: 0, duplicates, rest: owned };
        }
        let (mut node, at) = self.descend(lock.namespace, lock.node, start, tokens);
        let rest = owned.split_off(whole - start);
        let new = owned.split_off(at - start);
        let mut end = at;
        if whole > at {
            end = whole;
            node = self.attach(
                pool,
                &lock,
                node,
                &tokens[at * self.page_tokens..whole * self.page_tokens],
                new,
                sink,
            );
        } else if node != NO_NODE {
            self.pin(node);
        }
        let taken = end - at;
        self.raise(node, priority);
        if lock.node != NO_NODE {
            self.unpin(lock.node);
        }
        let PrefixLock { namespace, windows, .. } = lock;
        let lock = PrefixLock { namespace, node, pages: end as u32, from: end as u32, windows };
        Inserted { lock, taken, duplicates: owned, rest }
    }

    /// Adds a new leaf with one pin.
    fn attach(
        &mut self,
        pool: &mut PagePool,
        lock: &PrefixLock,
        parent: NodeIndex,
        tokens: &[u32],
        pages: HeldPages,
        sink: &mut (impl EventSink + ?Sized),
    ) -> NodeIndex {
        let count = pages.ids().len();
        let (owner, above, before): (_, _, Option<PageId>) = match parent {
            NO_NODE => (Owner::namespace(lock.namespace), 0, None),
            parent => {
                let node = &self.nodes[parent];
                (Owner::parent(parent), node.end, node.full().pages.ids().last().copied())
            }
        };
        let index = self.nodes.insert(Node {
            tokens: tokens.into(),
            parts: [ComponentPages::new(pool.cache(pages), 1, 0)],
            owner,
            children: 0,
            end: above + count as u32,
            priority: i32::MIN,
        });
        self.children.insert(self.children.hash(owner, &tokens[..self.page_tokens]), index);
        match parent {
            NO_NODE => self.namespaces.root_added(lock.namespace),
            parent => {
                self.nodes[parent].children += 1;
                self.pin(parent);
            }
        }
        self.counts.pages += count;
        self.counts.locked += count;
        self.events += 1;
        let pages = self.nodes[index].full().pages.ids();
        let Some(seed) = self.namespaces.seed(lock.namespace) else {
            unreachable!("a namespace with pages is not forgotten")
        };
        sink.event(
            self.events,
            TreeEvent::Stored { namespace: lock.namespace, seed, parent: before, pages, tokens },
        );
        index
    }

    /// Raises the priority of a pinned node and its ancestors.
    fn raise(&mut self, mut index: NodeIndex, priority: i32) {
        while index != NO_NODE && self.nodes[index].priority < priority {
            self.nodes[index].priority = priority;
            index = self.nodes[index].owner.get().unwrap_or(NO_NODE);
        }
    }
}
