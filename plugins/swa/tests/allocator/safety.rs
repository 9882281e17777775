//! The protection of SGLang's dummy slot, sentinel and zeroed map holds here without them.

use host_plugin_api::{ErrorCode, PoolAllocator, PoolPage};

use super::pool::Pool;

const INVALID: ErrorCode = ErrorCode::INVALID_ARGUMENT;
const TOO_FEW: ErrorCode = ErrorCode::WOULD_BLOCK;
const FULL: usize = 0;
const WINDOW: usize = 1;

/// A shared pool and a divided one: 16 pages, of which windows have 4 of 2.
fn both() -> [Pool; 2] {
    let shared = Pool { page_tokens: 64, window: 40, pages: 16, parts: 2, ratio: None };
    [shared, Pool { ratio: Some(0.5), ..shared }]
}

#[test]
fn page_0_is_handed_out_like_any_other_and_given_back_only_while_it_is_taken() {
    for pool in both() {
        let opened = pool.open();
        assert_eq!(opened.give(FULL, &[PoolPage(0)]), Err(INVALID), "{pool:?}: it was never taken");
        let (full, windows) = (opened.take(FULL, 1).unwrap(), opened.take(WINDOW, 1).unwrap());
        assert_eq!(full, [PoolPage(0)]);
        assert!(!windows.contains(&PoolPage(0)), "{pool:?}: {windows:?}");
        opened.give(FULL, &full).unwrap();
        assert_eq!(opened.give(FULL, &full), Err(INVALID), "{pool:?}: given back twice");
    }
}

#[test]
fn a_page_of_minus_one_is_none() {
    for pool in both() {
        let opened = pool.open();
        for which in [FULL, WINDOW] {
            assert_eq!(opened.give(which, &[PoolPage(u32::MAX)]), Err(INVALID));
        }
    }
}

#[test]
fn a_page_that_was_handed_out_again_is_not_freed_by_its_former_owner() {
    let opened = both()[0].open();
    let (full, windows) = (opened.take(FULL, 1).unwrap(), opened.take(WINDOW, 1).unwrap());
    opened.give(WINDOW, &windows).unwrap();
    // All that is free becomes full parts, the window's old pages among them.
    let all = opened.take(FULL, 15).unwrap();
    assert!(windows.iter().all(|page| all.contains(page)));
    assert_eq!(opened.give(WINDOW, &windows), Err(INVALID), "a stale list frees nothing");
    assert_eq!(opened.take(FULL, 1), Err(TOO_FEW));
    opened.give(FULL, &all).unwrap();
    opened.give(FULL, &full).unwrap();
}

#[test]
fn a_refused_free_takes_nothing_back() {
    for pool in both() {
        let opened = pool.open();
        let (full, windows) = (opened.take(FULL, 4).unwrap(), opened.take(WINDOW, 2).unwrap());
        for (which, wrong) in [
            (FULL, vec![full[0], full[1], full[0]]),
            (FULL, vec![full[3], PoolPage(99)]),
            (FULL, vec![full[0], windows[0]]),
            (WINDOW, vec![windows[0], full[0]]),
        ] {
            assert_eq!(opened.give(which, &wrong), Err(INVALID), "{wrong:?}");
        }
        // Each can still be given back, once.
        opened.give(FULL, &full).unwrap();
        opened.give(WINDOW, &windows).unwrap();
    }
}

#[test]
fn a_component_keeps_to_its_budget_and_what_does_not_fit_takes_nothing() {
    let [shared, divided] = both().map(Pool::open);
    assert_eq!(shared.take(FULL, 17), Err(TOO_FEW));
    assert_eq!(shared.take(WINDOW, 9), Err(TOO_FEW));
    let windows = shared.take(WINDOW, 8).unwrap();
    assert_eq!(shared.take(FULL, 1), Err(TOO_FEW), "windows have filled the pool");
    shared.give(WINDOW, &windows).unwrap();
    shared.take(FULL, 16).unwrap();

    // 16 / (1 + 0.5 * 2) = 8 full pages, 4 windows of 2.
    assert_eq!(divided.components.map(|of| of.pages), [8, 4]);
    divided.take(FULL, 8).unwrap();
    assert_eq!(divided.take(FULL, 1), Err(TOO_FEW), "what is free is for windows");
    divided.take(WINDOW, 4).unwrap();
    assert_eq!(divided.take(WINDOW, 1), Err(TOO_FEW));
}

#[test]
fn a_part_of_a_page_is_no_page() {
    let opened = both()[0].open();
    let mut one = [PoolPage::default()];
    assert_eq!(ErrorCode(opened.allocator.alloc(opened.id(WINDOW), &mut one)), INVALID);
    assert_eq!(opened.take(FULL, 16).map(|pages| pages.len()), Ok(16), "none was taken");
}

#[test]
fn full_parts_come_from_the_front_and_windows_from_the_end() {
    let opened = both()[0].open();
    assert_eq!(opened.take(FULL, 4).unwrap(), [0, 1, 2, 3].map(PoolPage));
    assert_eq!(opened.take(WINDOW, 3).unwrap(), [15, 14, 13, 12, 11, 10].map(PoolPage));
}
