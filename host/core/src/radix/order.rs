//! The order in which nodes are evicted.
//!
//! The order persists: one queue per *class*, lowest class first, and within a class the node that was released
//! longest ago first. A node is in its queue exactly while nothing pins it, and joins at the end when its last pin goes.
//!
//! No heap is needed, because the head is always a leaf. A pinned node pins its ancestors, so a node joins before its
//! ancestors do. They join at the end of the same queue or of a higher one, because a match counts for every node on
//! its path, and priorities are raised up to the top. So all nodes below a node come out before it.

use std::collections::BTreeMap;

use super::node::{NO_NODE, Node, NodeIndex, Nodes};

/// Which nodes are evicted first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Those that were released longest ago.
    #[default]
    Lru,
    /// Those that were matched least often, and among equals those that were released longest ago.
    Lfu,
    /// Those that were matched less than twice, in LRU order, and then the others, in LRU order.
    Slru,
    /// Those with the lowest priority, and among equals those that were released longest ago.
    Priority,
}

/// Matches after which [`Policy::Slru`] protects a node.
pub(super) const SLRU_PROTECTED_HITS: u32 = 2;

impl Policy {
    /// The policy of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Policy::Lru, Policy::Lfu, Policy::Slru, Policy::Priority]
            .into_iter()
            .find(|policy| policy.as_str() == name)
    }

    /// As flags write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::Lfu => "lfu",
            Policy::Slru => "slru",
            Policy::Priority => "priority",
        }
    }

    fn class(self, node: &Node) -> u32 {
        match self {
            Policy::Lru => 0,
            Policy::Lfu => node.full().hits,
            Policy::Slru => u32::from(node.full().hits >= SLRU_PROTECTED_HITS),
            Policy::Priority => node.priority.cast_unsigned() ^ (1 << 31),
        }
    }
}

#[derive(Debug)]
struct Queue {
    head: NodeIndex,
    tail: NodeIndex,
}

/// The queues. The links between nodes lie in the nodes.
#[derive(Debug)]
pub(super) struct Order {
    policy: Policy,
    queues: BTreeMap<u32, Queue>,
}

impl Order {
    pub(super) fn new(policy: Policy) -> Self {
        Self { policy, queues: BTreeMap::new() }
    }

    /// The node to evict next: a leaf that nothing pins.
    pub(super) fn first(&self) -> Option<NodeIndex> {
        self.queues.first_key_value().map(|(_, queue)| queue.head)
    }

    /// Adds a node whose last pin has gone, or that was just split off and is about to be pinned.
    pub(super) fn push(&mut self, nodes: &mut Nodes, index: NodeIndex) {
        let class = self.policy.class(&nodes[index]);
        let queue = self.queues.entry(class).or_insert(Queue { head: index, tail: NO_NODE });
        let tail = std::mem::replace(&mut queue.tail, index);
        let part = nodes[index].full_mut();
        part.previous = tail;
        part.next = NO_NODE;
        if tail != NO_NODE {
            nodes[tail].full_mut().next = index;
        }
    }

    /// Removes a node that was pinned or evicted. The data that its class depends on must not have changed since it
    /// joined.
    pub(super) fn remove(&mut self, nodes: &mut Nodes, index: NodeIndex) {
        let part = nodes[index].full();
        let (previous, next) = (part.previous, part.next);
        if previous != NO_NODE {
            nodes[previous].full_mut().next = next;
        }
        if next != NO_NODE {
            nodes[next].full_mut().previous = previous;
        }
        if previous == NO_NODE || next == NO_NODE {
            let class = self.policy.class(&nodes[index]);
            let Some(queue) = self.queues.get_mut(&class) else {
                unreachable!("node {index} is not in the queue of its class")
            };
            match (previous, next) {
                (NO_NODE, NO_NODE) => {
                    assert!(queue.head == index, "node {index} is in another class's queue");
                    self.queues.remove(&class);
                }
                (NO_NODE, _) => queue.head = next,
                _ => queue.tail = previous,
            }
        }
    }

    /// Every node in the order, first to be evicted first.
    pub(super) fn iter<'a>(&'a self, nodes: &'a Nodes) -> impl Iterator<Item = NodeIndex> + 'a {
        self.queues.values().flat_map(move |queue| {
            std::iter::successors(Some(queue.head), move |index| {
                Some(nodes[*index].full().next).filter(|next| *next != NO_NODE)
            })
        })
    }
}
