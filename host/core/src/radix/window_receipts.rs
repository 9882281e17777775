//! Receipts for prefixes and parts of their windows, for what goes to and comes from below the pool.

use std::ops::Range;

use super::RadixTree;
use super::chain::PageHash;
use super::lock::PrefixLock;
use super::namespace::Namespace;
use crate::window::{Reach, WindowShape};

impl RadixTree {
    /// Of the longest cached prefix of these tokens: which pages have their window parts here too.
    pub(crate) fn window_parts(&self, namespace: Namespace, tokens: &[u32]) -> Vec<bool> {
        self.path(namespace, tokens).into_iter().map(|page| self.windows.contains(page)).collect()
    }

    /// Locks what is cached of these tokens up to where somebody goes on; of the window that is seen there the parts that are
    /// here, up to the first that is not. As [`hold`](Self::hold), it counts as no use yet.
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
        let mut again = self.lock_again(lock);
        again.windows = lock.windows[places].to_vec();
        again.windows.iter().for_each(|page| self.windows.pin(*page));
        again
    }

    /// From some place on, the window parts that a receipt keeps are to be saved when they are evicted, under the names of
    /// their pages.
    pub(crate) fn name_windows(&mut self, lock: &PrefixLock, first: usize, names: &[PageHash]) {
        for (page, name) in lock.windows[first..].iter().zip(names) {
            self.windows.name(*page, *name);
        }
    }
}
