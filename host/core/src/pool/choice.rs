//! Choosing among the free pages, and disabling a source that chooses other pages.

use std::collections::BTreeSet;

use super::{Component, HeldPages, PagePool, PageSource, PageState};
use crate::ids::PageId;

/// Chooses among the free pages.
#[derive(Debug)]
pub(super) enum Chooser {
    /// The pool itself: pages that came back last are taken first.
    Own(Vec<PageId>),
    /// A source, whose answers are checked.
    Other(Box<dyn PageSource>),
}

impl Chooser {
    /// The chooser of a pool in which all pages are free.
    pub(super) fn new(pages: u32, source: Option<Box<dyn PageSource>>) -> Self {
        source.map_or_else(|| Chooser::Own((0..pages).rev().map(PageId).collect()), Chooser::Other)
    }

    /// The pool's own list, if it chooses.
    pub(super) fn own(&self) -> Option<&[PageId]> {
        match self {
            Chooser::Own(free) => Some(free),
            Chooser::Other(_) => None,
        }
    }
}

impl PagePool {
    /// Takes free pages. The caller has checked that there are so many.
    pub(super) fn take(&mut self, component: Component, count: usize) -> HeldPages {
        if count == 0 {
            return HeldPages::none();
        }
        let pages = match &mut self.chooser {
            Chooser::Own(free) => last(free, count),
            Chooser::Other(source) => {
                let mut pages = vec![PageId(u32::MAX); count];
                let taken = source.take(component, &mut pages);
                match taken.and_then(|()| not_free(&self.states, &pages).map_or(Ok(()), Err)) {
                    Ok(()) => pages,
                    Err(fault) => last(self.choose_for_itself(fault), count),
                }
            }
        };
        for page in &pages {
            self.transition(*page, PageState::Free, PageState::Held);
            self.components[page.0 as usize] = component;
        }
        self.used[component as usize] += count;
        self.counts.free -= count;
        self.counts.held += count;
        self.check();
        HeldPages(pages)
    }

    /// Tells the source of pages that have become free.
    pub(super) fn offer(&mut self, pages: &[PageId]) {
        for page in pages {
            self.used[self.components[page.0 as usize] as usize] -= 1;
        }
        match &mut self.chooser {
            Chooser::Own(free) => free.extend_from_slice(pages),
            Chooser::Other(source) => {
                let given = Component::ALL.iter().try_for_each(|component| {
                    let of: Vec<PageId> = pages
                        .iter()
                        .copied()
                        .filter(|page| self.components[page.0 as usize] == *component)
                        .collect();
                    if of.is_empty() { Ok(()) } else { source.give(*component, &of) }
                });
                if let Err(fault) = given {
                    self.choose_for_itself(fault);
                }
            }
        }
    }

    /// Disables the source. Returns the pool's own list of free pages.
    fn choose_for_itself(&mut self, fault: String) -> &mut Vec<PageId> {
        if let Chooser::Other(source) = &self.chooser {
            self.fault = Some(format!("{} {fault}", source.name()));
            let states = self.states.iter().enumerate().rev();
            let free = states.filter(|(_, state)| **state == PageState::Free);
            // There are as many places as pages, so each place fits into a `u32`.
            let free = free.map(|(page, _)| PageId(u32::try_from(page).unwrap_or(u32::MAX)));
            self.chooser = Chooser::Own(free.collect());
        }
        match &mut self.chooser {
            Chooser::Own(free) => free,
            Chooser::Other(_) => unreachable!("it was replaced just now"),
        }
    }
}

/// The last `count` pages of the list.
fn last(free: &mut Vec<PageId>, count: usize) -> Vec<PageId> {
    free.split_off(free.len() - count)
}

/// The fault of pages that should be free and different, if they are not, as the end of a sentence.
fn not_free(states: &[PageState], pages: &[PageId]) -> Option<String> {
    let mut seen = BTreeSet::new();
    pages.iter().find_map(|page| match states.get(page.0 as usize) {
        None => Some(format!("handed out page {}, the pool has {}", page.0, states.len())),
        Some(PageState::Free) if seen.insert(*page) => None,
        Some(PageState::Free) => Some(format!("handed out page {} twice", page.0)),
        Some(state) => Some(format!("handed out page {}, which is {state:?}", page.0).to_lowercase()),
    })
}

#[cfg(test)]
mod tests {
    use super::super::PoolLimits;
    use super::*;

    /// Hands pages out from the front, and answers one call wrongly.
    #[derive(Debug)]
    struct Scripted {
        free: Vec<PageId>,
        /// The call that is answered wrongly, counted from 1, and what it hands out instead.
        wrong: (usize, Result<u32, &'static str>),
        calls: usize,
        given: Vec<(Component, Vec<PageId>)>,
    }

    impl Scripted {
        fn new(pages: u32, wrong: (usize, Result<u32, &'static str>)) -> Box<Self> {
            Box::new(Self { free: (0..pages).map(PageId).collect(), wrong, calls: 0, given: Vec::new() })
        }
    }

    impl PageSource for Scripted {
        fn name(&self) -> &str {
            "plugin \"scripted\""
        }
        fn take(&mut self, _component: Component, pages: &mut [PageId]) -> Result<(), String> {
            self.calls += 1;
            pages.copy_from_slice(&self.free[..pages.len()]);
            self.free.drain(..pages.len());
            match self.wrong {
                (call, Ok(page)) if call == self.calls => pages[0] = PageId(page),
                (call, Err(text)) if call == self.calls => return Err(text.to_owned()),
                _ => {}
            }
            Ok(())
        }
        fn give(&mut self, component: Component, pages: &[PageId]) -> Result<(), String> {
            self.given.push((component, pages.to_vec()));
            self.free.extend_from_slice(pages);
            if self.wrong.0 == usize::MAX { Err("refused pages".to_owned()) } else { Ok(()) }
        }
    }

    #[test]
    fn pages_go_back_to_the_component_that_they_were_taken_for() {
        let mut pool = PagePool::open(PoolLimits::shared(8), Some(Scripted::new(8, (0, Ok(0)))));
        let mut held = pool.allocate(2).unwrap();
        held.append(pool.allocate_window(3).unwrap());
        assert_eq!((pool.used(Component::Full), pool.used(Component::Window)), (2, 3));
        pool.audit();
        pool.release(held);
        assert_eq!((pool.used(Component::Full), pool.used(Component::Window)), (0, 0));
        let Chooser::Other(source) = &pool.chooser else { panic!("it was replaced: {:?}", pool.fault()) };
        let told = format!("{source:?}");
        let given = "given: [(Full, [PageId(0), PageId(1)]), (Window, [PageId(2), PageId(3), PageId(4)])]";
        assert!(told.contains(given), "{told}");
    }

    #[test]
    fn a_component_gets_no_more_than_its_limit_and_both_no_more_than_the_pool() {
        let limits = PoolLimits { total: 8, full: 8, window: 4 };
        let mut pool = PagePool::open(limits, None);
        assert!(!pool.fits(0, 5) && !pool.fits(5, 4) && pool.fits(4, 4));
        let window = pool.allocate_window(4).unwrap();
        assert_eq!(pool.allocate_window(1), None);
        let full = pool.allocate(4).unwrap();
        assert_eq!(pool.allocate(1), None);
        pool.release(full);
        assert_eq!(pool.allocate_window(1), None, "pages are free, but not for windows");
        pool.release(window);
        assert!(pool.fits(8, 0));
        pool.audit();
    }

    #[test]
    fn a_source_that_answers_nonsense_is_named_and_costs_no_page() {
        for (wrong, says) in [
            (Ok(0), "plugin \"scripted\" handed out page 0, which is held"),
            (Ok(3), "plugin \"scripted\" handed out page 3 twice"),
            (Ok(8), "plugin \"scripted\" handed out page 8, the pool has 8"),
            (Err("panicked"), "plugin \"scripted\" panicked"),
        ] {
            let mut pool = PagePool::open(PoolLimits::shared(8), Some(Scripted::new(8, (2, wrong))));
            let first = pool.allocate(2).unwrap();
            assert_eq!(pool.fault(), None);
            // The source takes pages 2, 3 and 4, and hands out `wrong` instead of page 2.
            let second = pool.allocate(3).unwrap();
            assert_eq!(pool.fault(), Some(says));
            let all: BTreeSet<_> = first.ids().iter().chain(second.ids()).collect();
            assert_eq!(all.len(), 5, "{first:?} {second:?}");
            let rest = pool.allocate(3).unwrap();
            assert_eq!(pool.allocate(1), None);
            for pages in [first, second, rest] {
                pool.release(pages);
            }
            pool.audit();
        }
    }

    #[test]
    fn a_source_that_refuses_pages_is_named_and_they_are_free_all_the_same() {
        let mut pool = PagePool::open(PoolLimits::shared(4), Some(Scripted::new(4, (usize::MAX, Ok(0)))));
        let held = pool.allocate(4).unwrap();
        pool.release(held);
        assert_eq!(pool.fault(), Some("plugin \"scripted\" refused pages"));
        pool.audit();
        assert!(pool.allocate(4).is_some_and(|held| held.ids().len() == 4));
    }
}
