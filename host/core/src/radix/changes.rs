//! A tree's events as values that can leave the thread that owns the tree.

use super::RadixTree;
use super::chain::PageHash;
use super::event::{EventSink, TreeEvent};
use super::node::NodeIndex;
use crate::ids::PageId;

/// The page before a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// There is none: the page starts a sequence of the namespace whose hash chain starts here.
    Nothing(PageHash),
    /// This page.
    Page(PageId),
}

/// A [`TreeEvent`] that owns its data.
///
/// Tokens travel instead of hashes, so that the thread that owns the tree hashes nothing.
/// [`EventLog`](crate::routing::EventLog) hashes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// These pages are cached now, each behind the one before.
    Stored {
        /// The page before the first of them.
        after: After,
        /// The pages.
        pages: Vec<PageId>,
        /// Their tokens.
        tokens: Vec<u32>,
    },
    /// These pages are no longer cached.
    Removed(Vec<PageId>),
    /// No page is cached any more.
    Cleared,
}

/// Collects events until the caller takes them.
#[derive(Debug)]
pub struct CacheChanges {
    listened: bool,
    events: Vec<CacheEvent>,
}

impl CacheChanges {
    /// A collector without events. Without a listener it stays empty.
    #[must_use]
    pub fn new(listened: bool) -> Self {
        Self { listened, events: Vec::new() }
    }

    /// The events since the last call, if there are any.
    pub fn take(&mut self) -> Option<Vec<CacheEvent>> {
        (!self.events.is_empty()).then(|| std::mem::take(&mut self.events))
    }
}

impl EventSink for CacheChanges {
    fn event(&mut self, _sequence: u64, event: TreeEvent<'_>) {
        if !self.listened {
            return;
        }
        self.events.push(match event {
            TreeEvent::Stored { seed, parent, pages, tokens, .. } => CacheEvent::Stored {
                after: parent.map_or(After::Nothing(seed), After::Page),
                pages: pages.to_vec(),
                tokens: tokens.to_vec(),
            },
            TreeEvent::Removed { pages } => CacheEvent::Removed(pages.to_vec()),
            TreeEvent::Cleared => CacheEvent::Cleared,
        });
    }
}

impl RadixTree {
    /// Sends everything that is cached as events, as if the tree had just been filled: `Cleared`, then every node
    /// behind its parent. Uses up no sequence numbers.
    pub fn contents(&self, sink: &mut (impl EventSink + ?Sized)) {
        sink.event(self.events, TreeEvent::Cleared);
        let mut children: std::collections::BTreeMap<NodeIndex, Vec<NodeIndex>> =
            std::collections::BTreeMap::new();
        let mut next = Vec::new();
        for (index, node) in self.nodes.iter() {
            match node.owner.get() {
                Ok(parent) => children.entry(parent).or_default().push(index),
                Err(namespace) => {
                    next.extend(self.namespaces.seed(namespace).map(|seed| (index, namespace, seed, None)))
                }
            }
        }
        while let Some((index, namespace, seed, parent)) = next.pop() {
            let node = &self.nodes[index];
            let pages = node.full().pages.ids();
            sink.event(
                self.events,
                TreeEvent::Stored { namespace, seed, parent, pages, tokens: &node.tokens },
            );
            let last = pages.last().copied();
            next.extend(
                children
                    .remove(&index)
                    .unwrap_or_default()
                    .into_iter()
                    .map(|child| (child, namespace, seed, last)),
            );
        }
    }
}
