//! Receipts for prefixes and parts of their windows, for saves to and restores from the offload tiers.

use std::ops::Range;

use super::RadixTree;
use super::chain::PageHash;
use super::lock::PrefixLock;
use super::namespace::Namespace;
use crate::window::{Reach, WindowShape};

impl RadixTree {
    /// For each page of the longest cached prefix of these tokens: whether its window part is cached, too.
    pub(crate) fn window_parts(&self, namespace: Namespace, tokens: &[u32]) -> Vec<bool> {
        self.path(namespace, tokens).into_iter().map(|page| self.windows.contains(page)).collect()
    }

    /// Locks the cached prefix of these tokens up to the place where a request continues (`reach`). Of the window that
    /// is seen there it locks the cached parts, up to the first one that is not cached. Like [`hold`](Self::hold), it
    /// does not count as a use yet.
    pub(crate) fn hold_front(
        &mut self,
        namespace: Namespace,
        tokens: &[u32],
        reach: Reach,
        shape: WindowShape,
    ) -> PrefixLock {
        let Reach { start, end } = reach;
        let mut lock = self.hold(namespace, &tokens[..end * self.page_tokens]);
        if start < end {
            lock.from = lock.from.min(start as u32);
            return lock;
        }
        let mut path = Vec::new();
        self.pages(&lock, &mut path);
        let seen = path.get(shape.seen_at(end, self.page_tokens).start..).unwrap_or_default();
        lock.windows = seen.iter().copied().take_while(|page| self.windows.contains(*page)).collect();
        lock.windows.iter().for_each(|page| self.windows.pin(*page));
        lock
    }

    /// Another receipt for the same prefix and some of the window parts that this one keeps, by their places among them.
    pub(crate) fn lock_windows_again(&mut self, lock: &PrefixLock, places: Range<usize>) -> PrefixLock {
        let mut second = self.lock_again(lock);
        second.windows = lock.windows[places].to_vec();
        second.windows.iter().for_each(|page| self.windows.pin(*page));
        second
    }

    /// Marks the window parts that a receipt keeps, from place `first` on, to be saved when they are evicted, under the
    /// names of their pages.
    pub(crate) fn name_windows(&mut self, lock: &PrefixLock, first: usize, names: &[PageHash]) {
        for (page, name) in lock.windows[first..].iter().zip(names) {
            self.windows.name(*page, *name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::PagePool;
    use crate::radix::{Inserted, NamespaceKey, Policy, TreeConfig};

    /// A request computes on, and copies that have not begun keep the window parts that it lets go of.
    #[test]
    fn parts_that_only_a_copy_keeps_are_seen_although_a_request_keeps_their_pages() {
        let identity = PageHash([0; 32]);
        let config = TreeConfig { page_tokens: 2, policy: Policy::Lru, identity, max_namespaces: 1, seed: 5 };
        let (mut tree, mut pool) = (RadixTree::new(&config), PagePool::new(12));
        let shape = WindowShape { tokens: 4, parts: 1, layers: 0 };
        let namespace = tree.namespace(&NamespaceKey::default()).unwrap();
        let tokens: Vec<u32> = (0..12).collect();
        let empty = tree.hold(namespace, &tokens);
        let owned = pool.allocate(6).unwrap();
        let Inserted { mut lock, duplicates, rest, .. } =
            tree.insert(&mut pool, empty, &tokens, owned, 0, &mut ());
        let own = pool.allocate_window(6).unwrap();
        let kept = tree.keep_windows(&mut pool, &mut lock, 0, shape, own);
        for pages in [duplicates, rest, kept.duplicates, kept.rest] {
            pool.release(pages);
        }
        let copies = [1..3, 1..3].map(|places| tree.lock_windows_again(&lock, places));
        assert!(!tree.is_kept_by(&copies[0], 2), "the request keeps all of them");
        tree.unlock_windows(&mut lock, 1);
        assert!(!tree.is_kept_by(&copies[0], 2), "not these yet");
        tree.unlock_windows(&mut lock, 1);
        assert!(tree.is_kept_by(&copies[0], 2), "one of them");
        assert!(!tree.is_kept_by(&copies[0], 1), "each is kept by two");
        let before = tree.evictable();
        copies.into_iter().for_each(|copy| tree.unlock(copy));
        assert_eq!(tree.evictable(), before + 1);
        tree.unlock(lock);
        tree.audit();
    }
}
