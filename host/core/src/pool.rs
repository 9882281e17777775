//! The pages of a worker, each in exactly one state.
//!
//! A page is *free*, *held* by one owner, *cached* in the [radix tree](crate::radix), or *quarantined*: not in use, but
//! something may still touch it (a peer's write, our own transfer reading it, a batch being computed). Pages leave the
//! pool and come back as values that can be neither copied nor dropped unnoticed, and a quarantined page becomes free
//! only against [`Settled`] evidence. There is no timer. An allocator may choose which free page is taken next
//! ([`PageSource`]). It never decides the state of a page.
//!
//! ```text
//! free ─allocate─► held ─cache─► cached ─release_cached─► free
//!                   ├─release─► free
//!                   └─quarantine─► quarantined ─clear─► free     (evicted pages that are being copied, too)
//! ```

mod choice;
mod declared;
mod source;

pub use declared::{Declared, LayerGroup, PoolPlan, Retained, sharing};
pub use source::{Component, PageSource, PoolLimits};

use crate::ids::PageId;
use choice::Chooser;

/// The state of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageState {
    Free,
    Held,
    Cached,
    Quarantined,
}

/// Pages with one owner. The default has no pages.
///
/// They must go back through [`PagePool::release`], [`PagePool::quarantine`] or [`PagePool::cache`].
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "pages must go back to the pool"]
pub struct HeldPages(Vec<PageId>);

impl HeldPages {
    /// The pages, in the order of the sequence that they hold.
    #[must_use]
    pub fn ids(&self) -> &[PageId] {
        &self.0
    }

    /// No pages.
    pub(crate) fn none() -> HeldPages {
        HeldPages(Vec::new())
    }

    /// Keeps the first `at` pages and returns the others, or none if there are not more than `at`.
    pub fn split_off(&mut self, at: usize) -> HeldPages {
        HeldPages(self.0.split_off(at.min(self.0.len())))
    }

    /// Adds the pages of another owner behind these.
    pub fn append(&mut self, mut other: HeldPages) {
        self.0.append(&mut other.0);
    }
}

/// Pages that hold KV for later requests. They belong to the tree, which gives them back by eviction.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "pages must go back to the pool"]
pub struct CachedPages(Box<[PageId]>);

impl CachedPages {
    /// The pages, in the order of the tokens whose KV they hold.
    #[must_use]
    pub fn ids(&self) -> &[PageId] {
        &self.0
    }

    /// Keeps the first `at` pages and returns the others.
    pub(crate) fn split_off(&mut self, at: usize) -> CachedPages {
        let mut pages = std::mem::take(&mut self.0).into_vec();
        let rest = pages.split_off(at);
        self.0 = pages.into_boxed_slice();
        CachedPages(rest.into_boxed_slice())
    }

    /// Takes out the pages at the places for which `wanted` is true, and keeps the others.
    pub(crate) fn extract(&mut self, wanted: impl Fn(usize) -> bool) -> CachedPages {
        let all = std::mem::take(&mut self.0);
        let (out, kept): (Vec<_>, Vec<_>) =
            all.into_iter().enumerate().partition(|(place, _)| wanted(*place));
        self.0 = kept.into_iter().map(|(_, page)| page).collect();
        CachedPages(out.into_iter().map(|(_, page)| page).collect())
    }

    /// All pages of many owners as one.
    pub(crate) fn concat(parts: Vec<CachedPages>) -> CachedPages {
        let mut pages = Vec::with_capacity(parts.iter().map(|part| part.0.len()).sum());
        for part in parts {
            pages.extend_from_slice(&part.0);
        }
        CachedPages(pages.into_boxed_slice())
    }
}

/// Pages that something may still touch.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "pages must go back to the pool"]
pub struct QuarantinedPages(Vec<PageId>);

impl QuarantinedPages {
    /// Number of pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Evidence that nothing touches some quarantined pages any more.
///
/// Only the quarantine of [`crate::cache`] makes it, when each use that it knows of has ended: every writer has acknowledged or was
/// fenced, every own transfer and copy has settled, and no batch runs.
#[derive(Debug)]
pub struct Settled(pub(crate) ());

/// Numbers of pages by their states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Ready to be allocated.
    pub free: usize,
    /// Owned by a request.
    pub held: usize,
    /// Owned by the radix tree, locked ones included.
    pub cached: usize,
    /// Waiting until nothing can touch them.
    pub quarantined: usize,
}

/// All pages of a worker.
#[derive(Debug)]
pub struct PagePool {
    states: Vec<PageState>,
    /// The component for which each page was taken. For a free page, the component for which it was taken last.
    components: Vec<Component>,
    limits: PoolLimits,
    /// Pages of each component that are not free.
    used: [usize; 2],
    chooser: Chooser,
    /// Why the source that the pool was opened with was disabled, if it was.
    fault: Option<String>,
    counts: PoolCounts,
}

impl PagePool {
    /// A pool of `pages` free pages.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        Self::open(PoolLimits::shared(pages), None)
    }

    /// A pool within these limits. `source` chooses its pages. Without a source the pool chooses itself.
    #[must_use]
    pub fn open(limits: PoolLimits, source: Option<Box<dyn PageSource>>) -> Self {
        let pages = limits.total;
        Self {
            states: vec![PageState::Free; pages as usize],
            components: vec![Component::Full; pages as usize],
            limits,
            used: [0; 2],
            chooser: Chooser::new(pages, source),
            fault: None,
            counts: PoolCounts { free: pages as usize, ..PoolCounts::default() },
        }
    }

    /// How many pages each component may have.
    #[must_use]
    pub fn limits(&self) -> PoolLimits {
        self.limits
    }

    /// Pages of a component that are not free, in any other state.
    #[must_use]
    pub fn used(&self, component: Component) -> usize {
        self.used[component as usize]
    }

    /// Whether so many free pages can be taken for both components together.
    #[must_use]
    pub fn fits(&self, full: usize, window: usize) -> bool {
        let within = |component, count| self.used(component) + count <= self.limits.of(component) as usize;
        within(Component::Full, full)
            && within(Component::Window, window)
            && full + window <= self.counts.free
    }

    /// The fault for which the source was disabled, if it was. Since then the pool chooses pages itself.
    #[must_use]
    pub fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    /// All pages of the pool, in any state.
    #[must_use]
    pub fn total(&self) -> usize {
        self.states.len()
    }

    /// Numbers of pages by their states.
    #[must_use]
    pub fn counts(&self) -> PoolCounts {
        self.counts
    }

    /// Takes `count` pages for the layers without a window, or none if there are fewer.
    pub fn allocate(&mut self, count: usize) -> Option<HeldPages> {
        self.fits(count, 0).then(|| self.take(Component::Full, count))
    }

    /// Takes `count` pages for the layers with a window, or none if there are fewer. One token page may take several of
    /// these pages. `count` is the number of all of them.
    pub fn allocate_window(&mut self, count: usize) -> Option<HeldPages> {
        self.fits(0, count).then(|| self.take(Component::Window, count))
    }

    /// Takes pages back that only their owner can touch.
    pub fn release(&mut self, pages: HeldPages) {
        for page in &pages.0 {
            self.transition(*page, PageState::Held, PageState::Free);
        }
        self.counts.held -= pages.0.len();
        self.counts.free += pages.0.len();
        self.offer(&pages.0);
        self.check();
    }

    /// Hands pages over to the tree: their KV is complete, and nothing writes them any more.
    pub fn cache(&mut self, pages: HeldPages) -> CachedPages {
        for page in &pages.0 {
            self.transition(*page, PageState::Held, PageState::Cached);
        }
        self.counts.held -= pages.0.len();
        self.counts.cached += pages.0.len();
        self.check();
        CachedPages(pages.0.into_boxed_slice())
    }

    /// Takes pages back that the tree has evicted.
    pub fn release_cached(&mut self, pages: CachedPages) {
        for page in &pages.0 {
            self.transition(*page, PageState::Cached, PageState::Free);
        }
        self.counts.cached -= pages.0.len();
        self.counts.free += pages.0.len();
        self.offer(&pages.0);
        self.check();
    }

    /// Sets pages aside that something may still touch.
    pub fn quarantine(&mut self, pages: HeldPages) -> QuarantinedPages {
        for page in &pages.0 {
            self.transition(*page, PageState::Held, PageState::Quarantined);
        }
        self.counts.held -= pages.0.len();
        self.counts.quarantined += pages.0.len();
        self.check();
        QuarantinedPages(pages.0)
    }

    /// Sets evicted pages aside that are still being copied.
    pub(crate) fn quarantine_cached(&mut self, pages: CachedPages) -> QuarantinedPages {
        for page in &pages.0 {
            self.transition(*page, PageState::Cached, PageState::Quarantined);
        }
        self.counts.cached -= pages.0.len();
        self.counts.quarantined += pages.0.len();
        self.check();
        QuarantinedPages(pages.0.into_vec())
    }

    /// Frees quarantined pages.
    pub fn clear(&mut self, pages: QuarantinedPages, _evidence: &Settled) {
        for page in &pages.0 {
            self.transition(*page, PageState::Quarantined, PageState::Free);
        }
        self.counts.quarantined -= pages.0.len();
        self.counts.free += pages.0.len();
        self.offer(&pages.0);
        self.check();
    }

    fn transition(&mut self, page: PageId, from: PageState, to: PageState) {
        let state = &mut self.states[page.0 as usize];
        assert_eq!(*state, from, "{page:?} is not what its owner says");
        *state = to;
    }

    /// The invariant: free + held + cached + quarantined = total.
    fn check(&self) {
        if let Some(free) = self.chooser.own() {
            assert_eq!(free.len(), self.counts.free, "the free list and its count differ");
        }
        assert_eq!(
            self.used.iter().sum::<usize>() + self.counts.free,
            self.states.len(),
            "what is not free is one component's"
        );
        assert_eq!(
            self.counts.free + self.counts.held + self.counts.cached + self.counts.quarantined,
            self.states.len(),
            "free + held + cached + quarantined = total"
        );
    }

    /// Recounts every page, for tests and for a worker that is idle.
    ///
    /// # Panics
    /// When the running counts are wrong.
    pub fn audit(&self) {
        let count = |state| self.states.iter().filter(|other| **other == state).count();
        let counted = PoolCounts {
            free: count(PageState::Free),
            held: count(PageState::Held),
            cached: count(PageState::Cached),
            quarantined: count(PageState::Quarantined),
        };
        assert_eq!(counted, self.counts, "pages counted one by one");
        for component in Component::ALL {
            let states = self.states.iter().zip(&self.components);
            let used = states.filter(|(state, of)| **state != PageState::Free && **of == component).count();
            assert_eq!(used, self.used(component), "{component:?} pages counted one by one");
            assert!(used <= self.limits.of(component) as usize, "more {component:?} pages than it may have");
        }
        if let Some(free) = self.chooser.own() {
            let mut free = free.to_vec();
            free.sort_unstable();
            free.dedup();
            assert_eq!(free.len(), self.counts.free, "a page is twice in the free list");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_is_all_or_nothing() {
        let mut pool = PagePool::new(3);
        assert_eq!(pool.allocate(4), None);
        assert_eq!(pool.counts().free, 3);
        let held = pool.allocate(3).unwrap();
        assert_eq!(pool.allocate(1), None);
        pool.release(held);
        pool.audit();
    }

    #[test]
    fn quarantined_pages_are_not_handed_out() {
        let mut pool = PagePool::new(2);
        let held = pool.allocate(2).unwrap();
        let quarantined = pool.quarantine(held);
        assert_eq!(pool.allocate(1), None);
        assert_eq!(pool.counts(), PoolCounts { quarantined: 2, ..PoolCounts::default() });
        pool.clear(quarantined, &Settled(()));
        assert_eq!(pool.counts().free, 2);
        pool.audit();
    }

    #[test]
    fn a_cached_page_is_free_again_only_through_the_tree() {
        let mut pool = PagePool::new(3);
        let mut held = pool.allocate(3).unwrap();
        let rest = held.split_off(2);
        let cached = pool.cache(held);
        assert_eq!(pool.counts(), PoolCounts { held: 1, cached: 2, ..PoolCounts::default() });
        pool.audit();
        pool.release(rest);
        assert_eq!(pool.allocate(2), None);
        pool.release_cached(cached);
        assert_eq!(pool.counts().free, 3);
        pool.audit();
    }

    #[test]
    #[should_panic(expected = "not what its owner says")]
    fn a_page_that_a_request_holds_cannot_be_evicted() {
        let mut pool = PagePool::new(1);
        let held = pool.allocate(1).unwrap();
        pool.release_cached(CachedPages(held.ids().into()));
    }

    #[test]
    #[should_panic(expected = "not what its owner says")]
    fn a_page_cannot_be_released_twice() {
        let mut pool = PagePool::new(2);
        let held = pool.allocate(1).unwrap();
        let copy = HeldPages(held.0.clone());
        pool.release(held);
        pool.release(copy);
    }
}
