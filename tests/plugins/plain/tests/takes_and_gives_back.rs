//! Tests one component. `host plugins test` tests much more. Add your own tests here.

#![allow(clippy::unwrap_used)]

use host_plugin_api::allocator::TOO_FEW_PAGES;
use host_plugin_api::{Component, LayerGroup, LayerKind, PoolAllocator, PoolOpening, PoolPage, Retains};
use host_plugin_plain::open;

#[test]
fn full_layers_take_the_pages_of_the_pool_and_give_them_back() {
    let full = LayerGroup { kind: LayerKind::FULL, layers: 2, window: 0, parts: 1 };
    let (name, config) = ("test".into(), String::new());
    let allocator =
        open(&PoolOpening { name, config, page_tokens: 16, pages: 4, groups: vec![full] }).unwrap();

    let mut components = [Component::default()];
    assert_eq!(allocator.components(&mut components), 1);
    let full = components[0];
    assert_eq!((full.retains, full.pages), (Retains::ALL, 4));

    let mut pages = [PoolPage::default(); 4];
    assert_eq!(allocator.alloc(full.id, &mut pages), 0);
    assert_eq!(allocator.alloc(full.id, &mut [PoolPage::default()]), TOO_FEW_PAGES);
    assert_eq!(allocator.free(full.id, &pages[1..3]), 0);
    assert_eq!(allocator.alloc(full.id, &mut pages[1..3]), 0);
}
