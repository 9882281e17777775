//! One node of the tree, and the memory of all nodes.

use super::namespace::Namespace;
use crate::pool::CachedPages;

/// The place of a node among the tree's nodes.
pub(super) type NodeIndex = u32;

/// No node.
pub(super) const NO_NODE: NodeIndex = u32::MAX;

/// A kind of data that a node keeps for its tokens.
///
/// Every node has the KV of full attention. Data that some nodes lack (of a sliding window, of a recurrent state) is
/// kept beside the nodes, for models that need it (`windows.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeData {
    /// KV of layers that attend to the whole sequence.
    Full,
}

impl NodeData {
    /// The number of components.
    pub const COUNT: usize = 1;
}

/// The owner of a node: its parent, or its namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Owner(pub(super) u32);

const NAMESPACE_BIT: u32 = 1 << 31;

impl Owner {
    pub(super) fn namespace(namespace: Namespace) -> Self {
        Self(namespace.0 | NAMESPACE_BIT)
    }

    pub(super) fn parent(node: NodeIndex) -> Self {
        debug_assert!(node < NAMESPACE_BIT);
        Self(node)
    }

    /// The parent, or the namespace of a node at the top.
    pub(super) fn get(self) -> Result<NodeIndex, Namespace> {
        match self.0 & NAMESPACE_BIT {
            0 => Ok(self.0),
            _ => Err(Namespace(self.0 & !NAMESPACE_BIT)),
        }
    }
}

/// The pages that a node keeps for one [`NodeData`].
#[derive(Debug)]
pub(super) struct ComponentPages {
    /// One page for each page of tokens.
    pub pages: CachedPages,
    /// Locks that end here, plus children that are pinned. Above zero, the node stays.
    pub pins: u32,
    /// Neighbours in the order of eviction, unless pinned.
    pub previous: NodeIndex,
    pub next: NodeIndex,
    /// Matches that used these pages.
    pub hits: u32,
}

impl ComponentPages {
    /// Pages with so many pins, not yet in the order of eviction.
    pub(super) fn new(pages: CachedPages, pins: u32, hits: u32) -> Self {
        Self { pages, pins, previous: NO_NODE, next: NO_NODE, hits }
    }
}

/// A range of pages whose tokens were always used together: one cache line, whatever the range's length.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Node {
    /// The tokens of the edge that leads here, whole pages.
    pub tokens: Box<[u32]>,
    pub parts: [ComponentPages; NodeData::COUNT],
    pub owner: Owner,
    /// Children in the tree.
    pub children: u32,
    /// Pages from the start of the sequence to the end of this node.
    pub end: u32,
    /// The highest priority of all insertions in this node or below it.
    pub priority: i32,
}

impl Node {
    pub(super) fn full(&self) -> &ComponentPages {
        &self.parts[NodeData::Full as usize]
    }

    pub(super) fn full_mut(&mut self) -> &mut ComponentPages {
        &mut self.parts[NodeData::Full as usize]
    }

    /// Pages of this node alone.
    pub(super) fn pages(&self) -> usize {
        self.full().pages.ids().len()
    }
}

/// All nodes. Indices of removed nodes are used again.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    slots: Vec<Node>,
    vacant: Vec<NodeIndex>,
}

impl Nodes {
    pub(super) fn insert(&mut self, node: Node) -> NodeIndex {
        if let Some(index) = self.vacant.pop() {
            self.slots[index as usize] = node;
            return index;
        }
        let index = self.slots.len() as NodeIndex;
        assert!(index < NAMESPACE_BIT, "more nodes than a pool can have pages");
        self.slots.push(node);
        index
    }

    /// Takes a node out, and leaves an empty one in its place.
    pub(super) fn remove(&mut self, index: NodeIndex) -> Node {
        self.vacant.push(index);
        let empty = Node {
            tokens: Box::default(),
            parts: [ComponentPages::new(CachedPages::default(), 0, 0)],
            owner: Owner(NO_NODE),
            children: 0,
            end: 0,
            priority: 0,
        };
        std::mem::replace(&mut self.slots[index as usize], empty)
    }

    /// Every node in the tree.
    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeIndex, &Node)> {
        (0..).zip(&self.slots).filter(|(_, node)| !node.tokens.is_empty())
    }
}

impl std::ops::Index<NodeIndex> for Nodes {
    type Output = Node;

    fn index(&self, index: NodeIndex) -> &Node {
        &self.slots[index as usize]
    }
}

impl std::ops::IndexMut<NodeIndex> for Nodes {
    fn index_mut(&mut self, index: NodeIndex) -> &mut Node {
        &mut self.slots[index as usize]
    }
}

const _: () = assert!(size_of::<Node>() == 64, "a node is one cache line");
