//! The naive model of the radix tree with windows: every cached prefix has a window part, or none.

use std::collections::{BTreeMap, BTreeSet};

use host_core::ids::PageId;
use host_core::radix::Policy;

use super::model::{Lock, Model, PAGE, Prefix, prefixes};

#[derive(Clone, Debug)]
pub struct Part {
    pub pages: Vec<PageId>,
    pub pins: u32,
    pub useful: bool,
    /// The step in which the part's last receipt was released.
    released: u64,
}

/// A receipt: the locked prefix, and the prefixes whose window parts it keeps, in order.
#[derive(Clone, Debug)]
pub struct Receipt {
    pub lock: Lock,
    pub windows: Vec<Prefix>,
}

#[derive(Debug)]
pub struct Sliding {
    pub full: Model,
    pub parts: BTreeMap<Prefix, Part>,
    /// Tokens in a window.
    window: usize,
}

impl Sliding {
    pub fn new(policy: Policy, window: usize) -> Self {
        Self { full: Model::new(policy), parts: BTreeMap::new(), window }
    }

    /// The pages of a prefix that the token behind its first `end` pages sees, found token by token.
    fn seen<'a>(&self, whole: &'a [u32], end: usize) -> Vec<&'a [u32]> {
        let position = end * PAGE;
        let sees = |token: usize| token < position && token + self.window > position;
        let page = |(page, _): &(usize, &[u32])| (page * PAGE..(page + 1) * PAGE).any(sees);
        prefixes(whole).enumerate().filter(page).map(|(_, prefix)| prefix).collect()
    }

    /// Where a worker that computes can continue: the prefix, and the window parts that it needs there.
    pub fn matched(&self, whole: &[u32]) -> (Prefix, Vec<Prefix>) {
        let matched = self.full.matched(whole);
        let ends = (0..=(matched.len() - 1) / PAGE).rev();
        let at = ends.map(|end| (end, self.seen(matched, end)));
        let (end, seen) =
            at.into_iter().find(|(_, seen)| seen.iter().all(|page| self.parts.contains_key(*page))).unwrap();
        (matched[..1 + end * PAGE].to_vec(), seen.into_iter().map(<[u32]>::to_vec).collect())
    }

    /// Takes a receipt without counting a use: for the longest prefix with a whole window, or for all cached pages.
    pub fn hold(&mut self, whole: &[u32], with_window: bool) -> Receipt {
        let (prefix, windows) = match with_window {
            true => self.matched(whole),
            false => (self.full.matched(whole).to_vec(), Vec::new()),
        };
        for page in &windows {
            self.parts.get_mut(page).unwrap().pins += 1;
        }
        Receipt { lock: self.full.lock(&prefix, false), windows }
    }

    /// Counts a use: a request continues at the receipt's end.
    pub fn count_use(&mut self, receipt: &Receipt) {
        for prefix in prefixes(&receipt.lock.prefix) {
            self.full.pages.get_mut(prefix).unwrap().hits += 1;
        }
        for page in &receipt.windows {
            self.parts.get_mut(page).unwrap().useful = true;
        }
    }

    pub fn mark(&mut self, receipt: &Receipt, at: usize) {
        for page in self.seen(&receipt.lock.prefix, at) {
            if let Some(part) = self.parts.get_mut(page) {
                part.useful = true;
            }
        }
    }

    /// Adds the parts `own` behind the receipt's parts, which begin at page `first`. Returns the pages of parts that were there
    /// already.
    pub fn keep(&mut self, receipt: &mut Receipt, first: usize, own: &[Vec<PageId>]) -> Vec<PageId> {
        let mut duplicates = Vec::new();
        let kept = first + receipt.windows.len();
        for (page, offered) in prefixes(&receipt.lock.prefix).skip(kept).zip(own) {
            match self.parts.get_mut(page) {
                Some(part) => {
                    part.pins += 1;
                    duplicates.extend(offered);
                }
                None => {
                    let part = Part { pages: offered.clone(), pins: 1, useful: false, released: 0 };
                    self.parts.insert(page.to_vec(), part);
                }
            }
            receipt.windows.push(page.to_vec());
        }
        duplicates
    }

    /// Releases the first `count` parts of a receipt.
    pub fn let_go(&mut self, receipt: &mut Receipt, count: usize) {
        for page in receipt.windows.drain(..count) {
            let part = self.parts.get_mut(&page).unwrap();
            part.pins -= 1;
            if part.pins == 0 {
                part.released = self.full.step;
            }
        }
    }

    pub fn unlock(&mut self, mut receipt: Receipt) {
        let all = receipt.windows.len();
        self.let_go(&mut receipt, all);
        self.full.unlock(&receipt.lock);
    }

    /// Removes the pages of a prefix that are not locked, and the window parts without a page. Returns all of them.
    pub fn forget(&mut self, prefix: &[u32]) -> Vec<PageId> {
        let mut gone = self.full.forget(prefix);
        gone.extend(self.parts_without_a_page());
        gone
    }

    fn parts_without_a_page(&mut self) -> Vec<PageId> {
        let lost = self.parts.extract_if(.., |prefix, _| !self.full.pages.contains_key(prefix));
        lost.flat_map(|(_, part)| part.pages).collect()
    }

    /// The part to evict first among the parts that no receipt keeps.
    fn first_part(&self) -> Option<Prefix> {
        let free = self.parts.iter().filter(|(_, part)| part.pins == 0);
        let order =
            |(prefix, part): &(&Prefix, &Part)| (part.useful, part.released, self.full.pages[*prefix].page);
        free.min_by_key(order).map(|(prefix, _)| prefix.clone())
    }

    /// Evicts for one page that is needed. A part is evicted if it is not useful, or was released before the part of the page that
    /// would be evicted. Otherwise that page is evicted with its part.
    pub fn evict_one(&mut self) -> Vec<PageId> {
        let leaf = self.full.victim();
        let part = self.first_part().filter(|prefix| {
            let part = &self.parts[prefix];
            let used = |leaf: &Prefix| match self.parts.get(leaf) {
                Some(part) if part.pins > 0 => u64::MAX,
                Some(part) => part.released,
                None => 0,
            };
            !part.useful || leaf.as_ref().is_none_or(|leaf| part.released < used(leaf))
        });
        if let Some(prefix) = part {
            return self.parts.remove(&prefix).unwrap().pages;
        }
        let mut evicted: Vec<PageId> = self.full.evict(1);
        evicted.extend(self.parts_without_a_page());
        evicted
    }

    pub fn evict_windows(&mut self, wanted: usize) -> Vec<PageId> {
        let mut evicted = Vec::new();
        while evicted.len() < wanted
            && let Some(prefix) = self.first_part()
        {
            evicted.extend(self.parts.remove(&prefix).unwrap().pages);
        }
        evicted
    }

    pub fn evict_pages(&mut self, wanted: usize) -> Vec<PageId> {
        let mut evicted = self.full.evict(wanted);
        evicted.extend(self.parts_without_a_page());
        evicted
    }

    /// Repeats an eviction of many pages by the tree, and checks that it was allowed.
    pub fn follow(&mut self, evicted: &[PageId]) {
        let evicted: BTreeSet<PageId> = evicted.iter().copied().collect();
        let before = evicted.len();
        let pages: Vec<_> = self.full.pages.extract_if(.., |_, page| evicted.contains(&page.page)).collect();
        let parts: Vec<_> = self.parts.extract_if(.., |_, part| evicted.contains(&part.pages[0])).collect();
        assert!(pages.iter().all(|(_, page)| page.locks == 0), "a locked page was evicted");
        assert!(
            parts.iter().all(|(_, part)| part.pins == 0),
            "a window part was evicted that a receipt keeps"
        );
        let found = pages.len() + parts.iter().map(|(_, part)| part.pages.len()).sum::<usize>();
        assert_eq!(found, before, "pages were evicted that the model does not have");
        assert_eq!(self.parts_without_a_page(), [], "parts stay without their page");
        for prefix in self.full.pages.keys() {
            let above = prefixes(prefix).all(|above| self.full.pages.contains_key(above));
            assert!(above, "pages stay without what leads to them");
        }
    }

    /// Pages of all parts, and of those that receipts keep.
    pub fn part_pages(&self) -> (usize, usize) {
        let count = |kept: bool| {
            let parts = self.parts.values().filter(|part| !kept || part.pins > 0);
            parts.map(|part| part.pages.len()).sum()
        };
        (count(false), count(true))
    }
}
