//! What a dummy slot, a sentinel and a zeroed map protect from elsewhere holds here without them.

use host_plugin_api::{Component, ComponentPool, ErrorCode, Growth, PoolAllocator, PoolOpening, PoolPage};

use super::pool::Pool;

const INVALID: ErrorCode = ErrorCode::INVALID_ARGUMENT;

fn both() -> [Pool; 2] {
    let independent = Pool { page_tokens: 16, window: 40, full: 8, windows: 8, shared: None };
    [independent, Pool { shared: Some(2), full: 16, windows: 8, ..independent }]
}

#[test]
fn page_0_is_handed_out_like_any_other_and_given_back_only_while_it_is_taken() {
    for pool in both() {
        let opened = pool.open();
        assert_eq!(
            opened.give(Component::FULL, &[PoolPage(0)]),
            Err(INVALID),
            "{pool:?}: it was never taken"
        );
        let (_, [full, windows]) = opened.grow(Growth { held: 0, target: 16 }, true).unwrap();
        assert_eq!(full, [PoolPage(0)]);
        assert!(pool.shared.is_none() || !windows.contains(&PoolPage(0)), "{pool:?}: {windows:?}");
        opened.give(Component::FULL, &full).unwrap();
        assert_eq!(opened.give(Component::FULL, &full), Err(INVALID), "{pool:?}: given back twice");
    }
}

#[test]
fn the_token_before_the_first_has_no_page_and_a_page_of_minus_one_is_none() {
    for pool in both() {
        let opened = pool.open();
        let before = opened.free_pages();
        assert_eq!(opened.give(Component::WINDOW, &[PoolPage(u32::MAX)]), Err(INVALID));
        assert_eq!(opened.give(Component::FULL, &[PoolPage(u32::MAX)]), Err(INVALID));
        assert_eq!(opened.free_pages(), before);
        // The first token's growth starts at the first page, whatever was there before.
        let (grants, _) = opened.grow(Growth { held: 0, target: 1 }, true).unwrap();
        assert_eq!((grants[0].first, grants[1].first), (0, 0));
        assert_eq!(opened.allocator.first_live(Component::WINDOW, 0), 0);
    }
}

#[test]
fn a_page_that_was_handed_out_again_is_not_freed_by_its_former_owner() {
    let [independent, shared] = both();
    let opened = shared.open();
    let (_, [full, windows]) = opened.grow(Growth { held: 0, target: 16 }, true).unwrap();
    opened.give(Component::WINDOW, &windows).unwrap();
    // All that is free becomes full parts, the window's old pages among them.
    let mut all = [PoolPage::default(); 15];
    assert_eq!(opened.allocator.alloc(Component::FULL, &mut all), 0);
    assert!(windows.iter().all(|page| all.contains(page)));
    assert_eq!(opened.give(Component::WINDOW, &windows), Err(INVALID), "a stale list frees nothing");
    assert_eq!(opened.free_pages(), [0, 0]);
    opened.give(Component::FULL, &all).unwrap();
    opened.give(Component::FULL, &full).unwrap();
    assert_eq!(opened.free_pages(), [16, 8]);

    // With pages of their own, equal names are different pages.
    let opened = independent.open();
    let (_, [full, windows]) = opened.grow(Growth { held: 0, target: 128 }, true).unwrap();
    let both = full.iter().find(|page| windows.contains(page)).copied().unwrap();
    opened.give(Component::WINDOW, &[both]).unwrap();
    assert_eq!(opened.give(Component::WINDOW, &[both]), Err(INVALID));
    opened.give(Component::FULL, &[both]).unwrap();
}

#[test]
fn a_refused_free_takes_nothing_back() {
    for pool in both() {
        let opened = pool.open();
        let (_, [full, windows]) = opened.grow(Growth { held: 0, target: 128 }, true).unwrap();
        let before = opened.free_pages();
        for wrong in [vec![full[0], full[1], full[0]], vec![full[3], PoolPage(99)], vec![full[2], full[2]]] {
            assert_eq!(opened.give(Component::FULL, &wrong), Err(INVALID), "{wrong:?}");
            assert_eq!(opened.free_pages(), before, "{wrong:?}");
        }
        if pool.shared.is_some() {
            assert_eq!(opened.give(Component::FULL, &[full[0], windows[0]]), Err(INVALID));
            assert_eq!(opened.give(Component::WINDOW, &[windows[0], full[0]]), Err(INVALID));
            assert_eq!(opened.free_pages(), before);
        }
        opened.give(Component::FULL, &full).unwrap();
        opened.give(Component::WINDOW, &windows).unwrap();
    }
}

#[test]
fn what_does_not_fit_leaves_both_components_as_they_were() {
    for pool in both() {
        let opened = pool.open();
        let before = opened.free_pages();
        // More windows than there are, then more full parts than there are.
        let too_few = Err(ErrorCode::WOULD_BLOCK.0);
        assert_eq!(opened.grow(Growth { held: 0, target: 16 * 9 }, false), too_few, "{pool:?}");
        assert_eq!(opened.grow(Growth { held: 0, target: 16 * 17 }, true), too_few, "{pool:?}");
        assert_eq!(opened.free_pages(), before);
    }
    // Each alone fits, but not both: 11 full parts and 3 windows of 2 in 16 pages.
    let opened = both()[1].open();
    let too_few = Err(ErrorCode::WOULD_BLOCK.0);
    assert_eq!(opened.grow(Growth { held: 0, target: 16 * 11 }, true), too_few);
    let (grants, _) = opened.grow(Growth { held: 0, target: 16 * 10 }, true).unwrap();
    assert_eq!((grants[0].pages, grants[1].pages, opened.free_pages()), (10, 3, [0, 0]));
}

#[test]
fn full_parts_come_from_the_front_and_windows_from_the_end() {
    let opened = both()[1].open();
    let (_, [full, windows]) = opened.grow(Growth { held: 0, target: 64 }, true).unwrap();
    assert_eq!(full, [0, 1, 2, 3].map(PoolPage));
    assert_eq!(windows, [15, 14, 13, 12, 11, 10].map(PoolPage));
}

#[test]
fn pools_that_cannot_be_are_refused_with_the_reason() {
    let full = ComponentPool { component: Component::FULL, pages: 4, window: 0, reserved: 0 };
    let windows = ComponentPool { component: Component::WINDOW, pages: u32::MAX, window: 8, reserved: 0 };
    let opening = |page_tokens, components| PoolOpening {
        name: "test".to_owned(),
        config: String::new(),
        page_tokens,
        components,
    };
    for (page_tokens, components, says) in [
        (0, vec![full], "at least one token"),
        (16, vec![], "0 components"),
        (16, vec![full; 2], "component 0 is there twice"),
        (16, vec![full; 17], "17 components"),
        (16, vec![full.sharing(1), windows.sharing(2)], "more pages than can be named"),
    ] {
        let error = host_plugin_swa::open(&opening(page_tokens, components)).err().unwrap();
        assert_eq!(error.code, INVALID);
        assert!(error.message.contains(says), "{}", error.message);
    }
}
