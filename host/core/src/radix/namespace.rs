//! Namespaces separate prompts that must not share KV although their tokens are equal.

use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest, Sha256};

use super::chain::PageHash;

/// Everything beside the tokens that makes KV differ between requests of one worker, or that must keep them apart.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamespaceKey {
    /// The model's name.
    pub model: String,
    /// LoRA adapter, or any other text by which the client separates requests.
    pub extra_key: String,
    /// The tenant's salt: without it, one tenant could learn from timing what another has asked.
    pub salt: String,
}

impl NamespaceKey {
    /// Longest `extra_key` and `salt`, in bytes: clients choose them, and every worker keeps those that hold pages.
    pub const MAX_PART: usize = 256;

    /// Whether the parts that clients choose are short enough.
    #[must_use]
    pub fn is_bounded(&self) -> bool {
        self.extra_key.len() <= Self::MAX_PART && self.salt.len() <= Self::MAX_PART
    }

    /// The number by which two workers check that they mean the same namespace: the first 8 bytes, big-endian, of the
    /// [chain seed](PageHash::namespace) of a worker without an identity.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let seed = PageHash([0; 32]).namespace(self);
        seed.0[..8].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}

impl PageHash {
    /// The hash from which a namespace's chains start: SHA-256 over the worker's identity (`self`) and the key's three
    /// parts, each behind its length as u64 LE, so that two keys never give the same bytes.
    #[must_use]
    pub fn namespace(&self, key: &NamespaceKey) -> PageHash {
        let mut hasher = Sha256::new();
        hasher.update(self.0);
        for part in [&key.model, &key.extra_key, &key.salt] {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        PageHash(hasher.finalize().into())
    }
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
    /// Receipts that have not come back.
    locks: u32,
}

/// The namespaces of a tree. Clients choose salts, so there is a limit: beyond it, the oldest namespace that holds
/// neither pages nor receipts is forgotten.
#[derive(Debug)]
pub(super) struct Namespaces {
    limit: usize,
    by_key: BTreeMap<NamespaceKey, Namespace>,
    entries: BTreeMap<Namespace, Entry>,
    /// Namespaces without pages and receipts.
    idle: BTreeSet<Namespace>,
    next: u32,
}

impl Namespaces {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, by_key: BTreeMap::new(), entries: BTreeMap::new(), idle: BTreeSet::new(), next: 0 }
    }

    pub(super) fn intern(&mut self, key: &NamespaceKey, identity: &PageHash) -> Option<Namespace> {
        if let Some(namespace) = self.by_key.get(key) {
            return Some(*namespace);
        }
        if self.entries.len() >= self.limit
            && let Some(oldest) = self.idle.pop_first()
            && let Some(entry) = self.entries.remove(&oldest)
        {
            self.by_key.remove(&entry.key);
        }
        // The top bit tells a namespace from a node.
        if self.entries.len() >= self.limit || self.next == u32::MAX >> 1 {
            return None;
        }
        let namespace = Namespace(self.next);
        self.next += 1;
        self.by_key.insert(key.clone(), namespace);
        let seed = identity.namespace(key);
        self.entries.insert(namespace, Entry { key: key.clone(), seed, roots: 0, locks: 0 });
        self.idle.insert(namespace);
        Some(namespace)
    }

    /// Where the hash chain of a namespace starts, or `None` once it is forgotten.
    pub(super) fn seed(&self, namespace: Namespace) -> Option<PageHash> {
        self.entries.get(&namespace).map(|entry| entry.seed)
    }

    /// Whether a namespace is not forgotten, so that pages may still be added.
    pub(super) fn contains(&self, namespace: Namespace) -> bool {
        self.entries.contains_key(&namespace)
    }

    pub(super) fn root_added(&mut self, namespace: Namespace) {
        let _known = self.change(namespace, |entry| entry.roots += 1);
    }

    pub(super) fn root_removed(&mut self, namespace: Namespace) {
        let _known = self.change(namespace, |entry| entry.roots -= 1);
    }

    /// Counts a receipt. False when the namespace is forgotten.
    pub(super) fn lock_added(&mut self, namespace: Namespace) -> bool {
        self.change(namespace, |entry| entry.locks += 1)
    }

    pub(super) fn lock_removed(&mut self, namespace: Namespace) {
        let _known = self.change(namespace, |entry| entry.locks -= 1);
    }

    fn change(&mut self, namespace: Namespace, change: impl FnOnce(&mut Entry)) -> bool {
        let Some(entry) = self.entries.get_mut(&namespace) else { return false };
        let idle = |entry: &Entry| entry.roots == 0 && entry.locks == 0;
        let before = idle(entry);
        change(entry);
        // Every match comes here, and most namespaces have pages. Then the set of idle namespaces stays as it is.
        match (before, idle(entry)) {
            (false, true) => _ = self.idle.insert(namespace),
            (true, false) => _ = self.idle.remove(&namespace),
            _ => {}
        }
        true
    }

    /// Forgets all namespaces. From here on every key gets a new one.
    pub(super) fn forget_all(&mut self) {
        self.by_key.clear();
        self.entries.clear();
        self.idle.clear();
    }

    /// Namespaces that hold pages or receipts.
    pub(super) fn in_use(&self) -> usize {
        self.entries.len() - self.idle.len()
    }

    pub(super) fn roots(&self) -> u32 {
        self.entries.values().map(|entry| entry.roots).sum()
    }

    /// Receipts of all namespaces that are still known, for the audit.
    pub(super) fn locks(&self) -> usize {
        self.entries.values().map(|entry| entry.locks as usize).sum()
    }
}
