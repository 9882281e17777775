//! The adapter between a pool and allocators that keep their contract or break it.

use std::collections::BTreeSet;
use std::sync::Mutex;

use host_core::pool::{PagePool, PoolLimits};
use host_plugin_api::abi::{RSlice, open_guarded_allocator};
use host_plugins::LoadedAllocator;

use super::*;

const GROUPS: [LayerGroup; 2] = [
    LayerGroup { needs: Retained::All, layers: 2, parts: 1 },
    LayerGroup { needs: Retained::Newest(40), layers: 5, parts: 3 },
];
const PAGES: u32 = 30;

/// Hands out the lowest free pages and remembers what it was asked.
struct Lowest {
    components: Vec<api::Component>,
    free: Mutex<BTreeSet<u32>>,
    calls: Mutex<Vec<String>>,
    /// A page that it answers instead of the first page of the second call.
    lies: Option<u32>,
}

/// Its components. Their ids say nothing about the groups.
fn declared() -> Vec<api::Component> {
    let full = api::Component { id: ComponentId(7), pages: 30, ..api::Component::default() };
    let window = api::Component {
        id: ComponentId(3),
        group: 1,
        retains: Retains::NEWEST,
        tokens: 40,
        pages: 6,
        reserved: [0; 3],
    };
    vec![window, full]
}

impl Lowest {
    fn new(components: Vec<api::Component>, lies: Option<u32>) -> Arc<Self> {
        let (free, calls) = (Mutex::new((0..PAGES).collect()), Mutex::new(Vec::new()));
        Arc::new(Self { components, free, calls, lies })
    }
}

impl PoolAllocator for Lowest {
    fn components(&self, components: &mut [api::Component]) -> i32 {
        components[..self.components.len()].copy_from_slice(&self.components);
        self.components.len() as i32
    }
    fn alloc(&self, component: ComponentId, pages: &mut [PoolPage]) -> i32 {
        let (mut free, mut calls) = (self.free.lock().unwrap(), self.calls.lock().unwrap());
        for page in &mut *pages {
            *page = PoolPage(free.pop_first().unwrap());
        }
        calls.push(format!("alloc {} {pages:?}", component.0));
        if let (Some(lie), 2) = (self.lies, calls.len()) {
            pages[0] = PoolPage(lie);
        }
        0
    }
    fn free(&self, component: ComponentId, pages: &[PoolPage]) -> i32 {
        let mut free = self.free.lock().unwrap();
        self.calls.lock().unwrap().push(format!("free {} {pages:?}", component.0));
        if pages.iter().all(|page| free.insert(page.0)) { 0 } else { ErrorCode::INVALID_ARGUMENT.0 }
    }
}

fn open(allocator: Arc<Lowest>) -> Result<(AllocatorPages, PoolPlan), String> {
    AllocatorPages::open("lowest", allocator, PAGES, 16, &GROUPS)
}

fn pool(lies: Option<u32>) -> (PagePool, Arc<Lowest>) {
    let allocator = Lowest::new(declared(), lies);
    let (source, plan) = open(allocator.clone()).unwrap();
    assert_eq!(plan.limits, PoolLimits { total: PAGES, full: 30, window: 18 });
    (PagePool::open(plan.limits, Some(Box::new(source))), allocator)
}

#[test]
fn each_component_is_asked_by_the_name_that_the_allocator_gave_it() {
    let (mut pool, allocator) = pool(None);
    let full = pool.allocate(2).unwrap();
    let mut all = pool.allocate_window(3).unwrap();
    assert_eq!(all.ids(), [2, 3, 4].map(PageId));
    all.append(full);
    pool.release(all);
    pool.audit();
    assert_eq!(pool.fault(), None);
    let calls = allocator.calls.lock().unwrap().join("; ");
    assert!(calls.starts_with("alloc 7 [PoolPage(0), PoolPage(1)]; alloc 3 [PoolPage(2),"), "{calls}");
    assert!(calls.contains("free 7 [PoolPage(0), PoolPage(1)]") && calls.contains("free 3 ["), "{calls}");
    assert_eq!(allocator.free.lock().unwrap().len(), PAGES as usize);
}

#[test]
fn an_allocator_that_answers_nonsense_is_named_and_no_page_has_two_owners() {
    for (lie, says) in [
        (0, "plugin \"lowest\" handed out page 0, which is held"),
        (30, "plugin \"lowest\" handed out page 30, the pool has 30"),
        (u32::MAX, "plugin \"lowest\" handed out page 4294967295, the pool has 30"),
    ] {
        let (mut pool, _allocator) = pool(Some(lie));
        let full = pool.allocate(4).unwrap();
        let windows = pool.allocate_window(9).unwrap();
        assert_eq!(pool.fault(), Some(says));
        let both: BTreeSet<_> = full.ids().iter().chain(windows.ids()).collect();
        assert_eq!(both.len(), 13, "{full:?} {windows:?}");
        pool.release(full);
        pool.release(windows);
        pool.audit();
    }
}

#[test]
fn components_that_cannot_be_are_refused_with_what_was_declared() {
    let [window, full] = [declared()[0], declared()[1]];
    for (components, says) in [
        (vec![full], "not a component for each of"),
        (vec![full, full], "one component with a name of its own"),
        (vec![full, api::Component { id: full.id, ..window }], "one component with a name of its own"),
        (vec![full, api::Component { group: 2, ..window }], "one component with a name of its own"),
        (vec![full, api::Component { retains: Retains(9), ..window }], "does not know what that retains"),
        (vec![full, api::Component { tokens: 39, ..window }], "retains the newest 39 tokens of group 1"),
        (vec![full, api::Component { pages: 11, ..window }], "a budget of 11 pages of 3 pool pages each"),
    ] {
        let said = open(Lowest::new(components, None)).unwrap_err();
        assert!(said.starts_with("plugin \"lowest\" declares") && said.contains(says), "{said}");
    }
}

#[test]
fn without_an_allocator_all_groups_share_the_pool() {
    let own = Pages::own(PAGES, 16, &GROUPS).unwrap();
    assert_eq!(own.plan.limits, PoolLimits { total: PAGES, full: 30, window: 30 });
    let state = LayerGroup { needs: Retained::State, layers: 1, parts: 4 };
    let own = Pages::own(PAGES, 16, &[GROUPS[0], state]).unwrap();
    assert_eq!((own.plan.limits.window, own.plan.window.map(|of| of.parts)), (28, Some(4)));
}

/// Panics in one of its methods.
struct Panicking(&'static str);

impl Panicking {
    fn at(&self, method: &str) {
        assert!(self.0 != method, "told to panic in {method}");
    }
}

impl PoolAllocator for Panicking {
    fn components(&self, components: &mut [api::Component]) -> i32 {
        self.at("components");
        components[0] = api::Component { pages: 8, ..api::Component::default() };
        1
    }
    fn alloc(&self, _component: ComponentId, pages: &mut [PoolPage]) -> i32 {
        self.at("alloc");
        (0..).zip(pages).for_each(|(name, page)| *page = PoolPage(name));
        0
    }
    fn free(&self, _component: ComponentId, _pages: &[PoolPage]) -> i32 {
        self.at("free");
        0
    }
}

/// An allocator behind the guard that catches panics, as a loaded plugin is.
fn guarded(method: &'static str) -> Arc<dyn PoolAllocator> {
    let factory = |_: &api::PoolOpening| Ok(Panicking(method));
    let none = RSlice::from_slice(&[]);
    let object = open_guarded_allocator(factory, "acme".into(), "".into(), 8, 16, none).into_result();
    Arc::new(LoadedAllocator::new("acme", object.unwrap_or_else(|_| panic!("the factory cannot fail"))))
}

#[test]
fn what_an_allocator_does_wrong_is_told_as_the_page_says() {
    let open = |method| AllocatorPages::open("acme", guarded(method), 8, 16, &GROUPS[..1]);
    let mut said = vec![open("components").unwrap_err()];
    let short = Lowest::new(vec![declared()[1]], None);
    said.push(AllocatorPages::open("acme", short, PAGES, 16, &GROUPS).unwrap_err());
    for method in ["alloc", "free"] {
        let (source, plan) = open(method).unwrap();
        let mut pool = PagePool::open(plan.limits, Some(Box::new(source)));
        let pages = pool.allocate(3).unwrap();
        pool.release(pages);
        said.push(pool.fault().unwrap().to_owned());
        pool.audit();
    }
    let (mut lying, _allocator) = pool(Some(30));
    let pages = [lying.allocate(1).unwrap(), lying.allocate(1).unwrap()];
    said.push(lying.fault().unwrap().replace("lowest", "acme"));
    pages.into_iter().for_each(|pages| lying.release(pages));
    crate::told::compare("### An allocator", &said);
}
