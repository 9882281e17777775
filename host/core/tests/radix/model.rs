//! A naive model of the radix tree: a map from every cached prefix to its page, without ranges, links or running counts.

use std::collections::BTreeMap;

use host_core::ids::PageId;
use host_core::radix::Policy;

/// Tokens in a page. Pages are small and the vocabulary too, so that most prompts share prefixes.
pub const PAGE: usize = 2;

/// The namespace, then whole pages of tokens.
pub type Prefix = Vec<u32>;

#[derive(Clone, Debug)]
pub struct Page {
    pub page: PageId,
    pub locks: u32,
    pub hits: u32,
    pub priority: i32,
    /// The step in which the page's last lock was released.
    pub released: u64,
}

/// A lock on all pages of a prefix.
#[derive(Clone, Debug)]
pub struct Lock {
    pub prefix: Prefix,
}

impl Lock {
    pub fn pages(&self) -> usize {
        (self.prefix.len() - 1) / PAGE
    }
}

#[derive(Debug)]
pub struct Model {
    pub policy: Policy,
    pub pages: BTreeMap<Prefix, Page>,
    pub step: u64,
}

/// The prefixes of `whole`, one for each page, shortest first.
pub fn prefixes(whole: &[u32]) -> impl Iterator<Item = &[u32]> {
    (1..=(whole.len() - 1) / PAGE).map(|pages| &whole[..1 + pages * PAGE])
}

impl Model {
    pub fn new(policy: Policy) -> Self {
        Self { policy, pages: BTreeMap::new(), step: 0 }
    }

    pub fn matched<'a>(&self, whole: &'a [u32]) -> &'a [u32] {
        prefixes(whole).take_while(|prefix| self.pages.contains_key(*prefix)).last().unwrap_or(&whole[..1])
    }

    pub fn lock(&mut self, whole: &[u32], is_match: bool) -> Lock {
        let prefix = self.matched(whole).to_vec();
        for part in prefixes(&prefix) {
            let page = self.pages.get_mut(part).unwrap();
            page.locks += 1;
            page.hits += u32::from(is_match);
        }
        Lock { prefix }
    }

    pub fn unlock(&mut self, lock: &Lock) {
        for part in prefixes(&lock.prefix) {
            let page = self.pages.get_mut(part).unwrap();
            page.locks -= 1;
            if page.locks == 0 {
                page.released = self.step;
            }
        }
    }

    /// `owned` are pages behind the lock's. Returns the duplicates and the new lock.
    pub fn insert(
        &mut self,
        lock: &Lock,
        whole: &[u32],
        owned: &[PageId],
        priority: i32,
    ) -> (Vec<PageId>, Lock) {
        let mut duplicates = Vec::new();
        for (part, page) in prefixes(whole).skip(lock.pages()).zip(owned) {
            if self.pages.contains_key(part) {
                duplicates.push(*page);
            } else {
                let page = Page { page: *page, locks: 0, hits: 0, priority: i32::MIN, released: 0 };
                self.pages.insert(part.to_vec(), page);
            }
        }
        for part in prefixes(whole) {
            let page = self.pages.get_mut(part).unwrap();
            page.priority = page.priority.max(priority);
        }
        let longer = self.lock(whole, false);
        self.unlock(lock);
        (duplicates, longer)
    }

    /// Removes the pages of a prefix that are not locked, and returns them.
    pub fn forget(&mut self, prefix: &[u32]) -> Vec<PageId> {
        let unlocked: Vec<Prefix> =
            prefixes(prefix).filter(|part| self.pages[*part].locks == 0).map(<[u32]>::to_vec).collect();
        unlocked.iter().filter_map(|part| self.pages.remove(part)).map(|page| page.page).collect()
    }

    pub fn locked(&self) -> usize {
        self.pages.values().filter(|page| page.locks > 0).count()
    }

    /// The page to evict next: the first of its class among pages without a lock and without a page behind them.
    pub fn victim(&self) -> Option<Prefix> {
        let leaf = |prefix: &Prefix| {
            let longer = self.pages.range(prefix.clone()..).nth(1);
            longer.is_none_or(|(next, _)| !next.starts_with(prefix))
        };
        let class = |page: &Page| match self.policy {
            Policy::Lru => 0,
            Policy::Lfu => i64::from(page.hits),
            Policy::Slru => i64::from(page.hits >= 2),
            Policy::Priority => i64::from(page.priority),
        };
        let (prefix, _) = self
            .pages
            .iter()
            .filter(|(prefix, page)| page.locks == 0 && leaf(prefix))
            .min_by_key(|(_, page)| (class(page), page.released))?;
        Some(prefix.clone())
    }

    pub fn evict(&mut self, wanted: usize) -> Vec<PageId> {
        let mut evicted = Vec::new();
        while evicted.len() < wanted
            && let Some(prefix) = self.victim()
        {
            evicted.extend(self.pages.remove(&prefix).map(|page| page.page));
        }
        evicted
    }
}
