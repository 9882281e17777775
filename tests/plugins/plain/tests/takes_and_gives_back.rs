//! One sequence. `host plugins test` asks for much more; this is the place for what is yours.

#![allow(clippy::unwrap_used)]

use host_plugin_api::{
    Budget, Component, ComponentPool, Grant, Growth, PoolAllocator, PoolOpening, PoolPage,
};
use host_plugin_plain::open;

#[test]
fn a_sequence_takes_the_pages_it_lacks_and_gives_them_back() {
    let full = ComponentPool { component: Component::FULL, pages: 4, window: 0, reserved: 0 };
    let opening =
        PoolOpening { name: "test".into(), config: String::new(), page_tokens: 16, components: vec![full] };
    let allocator = open(&opening).unwrap();
    let free = || {
        let mut budgets = [Budget::default()];
        assert_eq!(allocator.budgets(&mut budgets), 1);
        budgets[0].free
    };
    let (mut grants, mut pages) = ([Grant::default()], [PoolPage::default(); 4]);

    // From 16 to 40 tokens: the second and the third page are lacking.
    let taken = allocator.extend(&[Growth { held: 16, target: 40 }], &mut grants, &mut pages);
    assert_eq!((taken, grants[0]), (2, Grant { first: 1, pages: 2 }));
    assert_eq!(free(), 2);
    assert_eq!(allocator.free(Component::FULL, &pages[..2]), 0);
    assert_eq!(free(), 4);
}
