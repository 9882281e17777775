//! Prompts that must not share KV although their tokens are equal.

use std::collections::BTreeMap;

use super::chain::PageHash;

/// Everything beside the tokens that makes KV differ between requests of one worker, or that must keep them apart.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamespaceKey {
    /// The model's name.
    pub model: String,
    /// LoRA adapter or whatever else the client asks to be kept apart by.
    pub extra_key: String,
    /// The tenant's salt: without it, one tenant could learn from timing what another has asked.
    pub salt: String,
}

/// A [`NamespaceKey`] as a number. Never given to another key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Namespace(pub(super) u32);

#[derive(Debug)]
struct Entry {
    key: NamespaceKey,
    seed: PageHash,
    /// Nodes at the top.
    roots: u32,
}

/// The namespaces of a tree. Clients choose salts, so there is a limit: beyond it, one that holds no page is forgotten.
#[derive(Debug)]
pub(super) struct Namespaces {
    limit: usize,
    by_key: BTreeMap<NamespaceKey, Namespace>,
    entries: BTreeMap<Namespace, Entry>,
    next: u32,
}

impl Namespaces {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, by_key: BTreeMap::new(), entries: BTreeMap::new(), next: 0 }
    }

    pub(super) fn intern(&mut self, key: &NamespaceKey, identity: &PageHash) -> Option<Namespace> {
        if let Some(namespace) = self.by_key.get(key) {
            return Some(*namespace);
        }
        if self.entries.len() >= self.limit {
            for (_, entry) in self.entries.extract_if(.., |_, entry| entry.roots == 0) {
                self.by_key.remove(&entry.key);
            }
        }
        // The top bit tells a namespace from a node.
        if self.entries.len() >= self.limit || self.next == u32::MAX >> 1 {
            return None;
        }
        let namespace = Namespace(self.next);
        self.next += 1;
        self.by_key.insert(key.clone(), namespace);
        self.entries.insert(namespace, Entry { key: key.clone(), seed: identity.namespace(key), roots: 0 });
        Some(namespace)
    }

    /// Where the hash chain of a namespace starts; `None` once forgotten.
    pub(super) fn seed(&self, namespace: Namespace) -> Option<PageHash> {
        self.entries.get(&namespace).map(|entry| entry.seed)
    }

    /// Whether pages may still be added.
    pub(super) fn contains(&self, namespace: Namespace) -> bool {
        self.entries.contains_key(&namespace)
    }

    pub(super) fn root_added(&mut self, namespace: Namespace) {
        if let Some(entry) = self.entries.get_mut(&namespace) {
            entry.roots += 1;
        }
    }

    pub(super) fn root_removed(&mut self, namespace: Namespace) {
        if let Some(entry) = self.entries.get_mut(&namespace) {
            entry.roots -= 1;
        }
    }

    pub(super) fn roots(&self) -> u32 {
        self.entries.values().map(|entry| entry.roots).sum()
    }
}
