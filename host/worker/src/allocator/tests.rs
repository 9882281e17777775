//! The adapter between a pool and an allocator that keeps its contract, or does not.

use std::sync::Mutex;

use host_core::pool::PagePool;
use host_plugin_api::{Grant, Growth};

use super::*;

const WINDOW: WindowShape = WindowShape { tokens: 40, parts: 3, layers: 5 };
const SHARED: PoolLimits = PoolLimits { total: 30, full: 30, window: 18 };
const APART: PoolLimits = PoolLimits { total: 30, full: 11, window: 18 };

/// Hands out the lowest free names of each component and remembers what it was asked.
struct Lowest {
    components: Vec<ComponentPool>,
    /// Names that are free; of components that share only the first set counts.
    free: Mutex<Vec<std::collections::BTreeSet<u32>>>,
    calls: Mutex<Vec<String>>,
    /// What it answers instead of the first page of the second call.
    lies: Option<u32>,
}

impl Lowest {
    fn open(limits: &PoolLimits, lies: Option<u32>) -> Arc<Self> {
        let components = components(limits, Some(WINDOW));
        let free = components.iter().map(|of| match of.parts() {
            Some(_) => (0..limits.total).collect(),
            None => (0..of.pages).collect(),
        });
        let free = Mutex::new(free.collect());
        Arc::new(Self { components, free, calls: Mutex::new(Vec::new()), lies })
    }

    fn place(&self, component: PluginComponent) -> usize {
        let shares = self.components[0].parts().is_some();
        if shares { 0 } else { component.0 as usize }
    }
}

impl PoolAllocator for Lowest {
    fn budgets(&self, budgets: &mut [Budget]) -> i32 {
        for (budget, of) in budgets.iter_mut().zip(&self.components) {
            *budget = Budget { component: of.component, total: of.pages, free: of.pages, reserved: 0 };
        }
        2
    }
    fn alloc(&self, component: PluginComponent, pages: &mut [PoolPage]) -> i32 {
        let mut free = self.free.lock().unwrap();
        let mut calls = self.calls.lock().unwrap();
        for page in &mut *pages {
            *page = PoolPage(free[self.place(component)].pop_first().unwrap());
        }
        calls.push(format!("alloc {} {pages:?}", component.0));
        if let (Some(lie), 2) = (self.lies, calls.len()) {
            pages[0] = PoolPage(lie);
        }
        0
    }
    fn free(&self, component: PluginComponent, pages: &[PoolPage]) -> i32 {
        let mut free = self.free.lock().unwrap();
        self.calls.lock().unwrap().push(format!("free {} {pages:?}", component.0));
        let fresh = pages.iter().all(|page| free[self.place(component)].insert(page.0));
        if fresh { 0 } else { ErrorCode::INVALID_ARGUMENT.0 }
    }
    fn need(&self, _growths: &[Growth], _tail: u32, _pages: &mut [u32]) -> i32 {
        ErrorCode::UNSUPPORTED.0
    }
    fn extend(&self, _growths: &[Growth], _grants: &mut [Grant], _pages: &mut [PoolPage]) -> i32 {
        ErrorCode::UNSUPPORTED.0
    }
    fn extend_tail(&self, _growths: &[Growth], _grants: &mut [Grant], _pages: &mut [PoolPage]) -> i32 {
        ErrorCode::UNSUPPORTED.0
    }
    fn step(&self, _held: &[u32], _grants: &mut [Grant], _pages: &mut [PoolPage]) -> i32 {
        ErrorCode::UNSUPPORTED.0
    }
    fn first_live(&self, _component: PluginComponent, _tokens: u32) -> i32 {
        ErrorCode::UNSUPPORTED.0
    }
}

fn pool(limits: PoolLimits, lies: Option<u32>) -> (PagePool, Arc<Lowest>) {
    let allocator = Lowest::open(&limits, lies);
    let source = AllocatorPages::new("lowest", allocator.clone(), &limits, Some(WINDOW)).unwrap();
    (PagePool::open(limits, Some(Box::new(source))), allocator)
}

#[test]
fn components_share_unless_what_they_may_have_fits() {
    let parts =
        |limits| components(&limits, Some(WINDOW)).iter().map(ComponentPool::parts).collect::<Vec<_>>();
    assert_eq!(parts(SHARED), [Some(1), Some(3)]);
    assert_eq!(parts(APART), [None, None]);
    assert_eq!(components(&PoolLimits::shared(7), None).len(), 1);
    assert_eq!(host_plugin_api::allocator::shared_pages(&components(&SHARED, Some(WINDOW))), Some(30));
}

#[test]
fn names_of_components_that_share_are_the_pools() {
    let (mut pool, allocator) = pool(SHARED, None);
    let full = pool.allocate(2).unwrap();
    let mut all = pool.allocate_window(6).unwrap();
    assert_eq!(all.ids(), [2, 3, 4, 5, 6, 7].map(PageId));
    all.append(full);
    pool.release(all);
    pool.audit();
    assert_eq!(pool.fault(), None);
    assert_eq!(allocator.free.lock().unwrap()[0].len(), 30);
}

#[test]
fn a_window_page_of_its_own_is_its_parts_behind_the_full_ones_and_goes_back_when_all_of_them_have() {
    let (mut pool, allocator) = pool(APART, None);
    let full = pool.allocate(11).unwrap();
    let mut first = pool.allocate_window(6).unwrap();
    assert_eq!(first.ids(), [11, 12, 13, 14, 15, 16].map(PageId));
    let rest = first.split_off(4);
    pool.release(first);
    let said = |allocator: &Lowest| allocator.calls.lock().unwrap().last().cloned().unwrap();
    assert_eq!(said(&allocator), "free 1 [PoolPage(0)]", "of the second page one part came back");
    pool.release(rest);
    assert_eq!(said(&allocator), "free 1 [PoolPage(1)]");
    pool.release(full);
    pool.audit();
    assert_eq!(pool.fault(), None);
    let free: Vec<usize> = allocator.free.lock().unwrap().iter().map(|names| names.len()).collect();
    assert_eq!(free, [11, 6]);
}

#[test]
fn an_allocator_that_answers_nonsense_is_named_and_no_page_has_two_owners() {
    for (limits, lie, says) in [
        (SHARED, 0, "plugin \"lowest\" handed out page 0, which is held"),
        (SHARED, 30, "plugin \"lowest\" handed out page 30, the pool has 30"),
        (APART, 6, "plugin \"lowest\" handed out page 6 of component 1, which has 6"),
        (APART, u32::MAX, "plugin \"lowest\" handed out page 4294967295 of component 1, which has 6"),
    ] {
        let (mut pool, _allocator) = pool(limits, Some(lie));
        let full = pool.allocate(4).unwrap();
        let windows = pool.allocate_window(9).unwrap();
        assert_eq!(pool.fault(), Some(says));
        let both: std::collections::BTreeSet<_> = full.ids().iter().chain(windows.ids()).collect();
        assert_eq!(both.len(), 13, "{full:?} {windows:?}");
        pool.release(full);
        pool.release(windows);
        pool.audit();
    }
}

#[test]
fn an_allocator_with_other_budgets_than_it_was_opened_with_is_refused() {
    let allocator = Lowest::open(&SHARED, None);
    let other = PoolLimits { window: 9, ..SHARED };
    let refused = AllocatorPages::new("lowest", allocator, &other, Some(WINDOW)).unwrap_err();
    assert!(refused.starts_with("plugin \"lowest\" was opened with the components"), "{refused}");
}

/// Answers codes.
struct Answering {
    budgets: i32,
    alloc: i32,
    free: i32,
}

impl PoolAllocator for Answering {
    fn budgets(&self, budgets: &mut [Budget]) -> i32 {
        budgets[0] = Budget { component: PluginComponent::FULL, total: 8, free: 8, reserved: 0 };
        self.budgets
    }
    fn alloc(&self, _component: PluginComponent, pages: &mut [PoolPage]) -> i32 {
        (0..).zip(pages).for_each(|(name, page)| *page = PoolPage(name));
        self.alloc
    }
    fn free(&self, _component: PluginComponent, _pages: &[PoolPage]) -> i32 {
        self.free
    }
    fn need(&self, _growths: &[Growth], _tail: u32, _pages: &mut [u32]) -> i32 {
        ErrorCode::UNSUPPORTED.0
    }
    fn extend(&self, _growths: &[Growth], _grants: &mut [Grant], _pages: &mut [PoolPage]) -> i32 {
        ErrorCode::UNSUPPORTED.0
    }
    fn extend_tail(&self, _growths: &[Growth], _grants: &mut [Grant], _pages: &mut [PoolPage]) -> i32 {
        ErrorCode::UNSUPPORTED.0
    }
    fn step(&self, _held: &[u32], _grants: &mut [Grant], _pages: &mut [PoolPage]) -> i32 {
        ErrorCode::UNSUPPORTED.0
    }
    fn first_live(&self, _component: PluginComponent, _tokens: u32) -> i32 {
        ErrorCode::UNSUPPORTED.0
    }
}

#[test]
fn what_an_allocator_does_wrong_is_told_as_the_page_says() {
    let limits = PoolLimits::shared(8);
    let open = |budgets, alloc, free| {
        AllocatorPages::new("acme", Arc::new(Answering { budgets, alloc, free }), &limits, None)
    };
    let panicked = ErrorCode::PANICKED.0;
    let mut said = vec![open(panicked, 0, 0).unwrap_err()];
    for (alloc, free) in [(panicked, 0), (0, panicked)] {
        let mut pool = PagePool::open(limits, Some(Box::new(open(1, alloc, free).unwrap())));
        let pages = pool.allocate(3).unwrap();
        pool.release(pages);
        said.push(pool.fault().unwrap().to_owned());
        pool.audit();
    }
    let (mut lying, _allocator) = pool(SHARED, Some(30));
    let pages = [lying.allocate(1).unwrap(), lying.allocate(1).unwrap()];
    said.push(lying.fault().unwrap().replace("lowest", "acme"));
    pages.into_iter().for_each(|pages| lying.release(pages));
    crate::told::compare("### An allocator", &said);
}
