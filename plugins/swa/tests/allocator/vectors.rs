//! The window's tail against the numbers of the allocator that this one takes over.

use host_plugin_api::{Component, Growth, PoolAllocator};

use super::pool::Pool;

/// Tokens that the tail of a prompt covers, from SGLang 0.5.23 (`swa_tail_len` without a decode radix cache): window, page,
/// prompt, tail. With its radix cache on it allocates up to a page more (192 of 8192 tokens where it is 128 here), and
/// never writes them; here the tail is what is read, with a radix cache or without.
const TAILS: &[(u32, u32, u32, u32)] = &[
    (128, 64, 1, 1),
    (128, 64, 64, 64),
    (128, 64, 127, 127),
    (128, 64, 128, 128),
    (128, 64, 129, 129),
    (128, 64, 1000, 168),
    (128, 64, 8192, 128),
    (128, 64, 8193, 129),
    (128, 256, 1, 1),
    (128, 256, 64, 64),
    (128, 256, 127, 127),
    (128, 256, 128, 128),
    (128, 256, 129, 129),
    (128, 256, 1000, 232),
    (128, 256, 8192, 256),
    (128, 256, 8193, 257),
    (1024, 64, 1, 1),
    (1024, 64, 129, 129),
    (1024, 64, 1000, 1000),
    (1024, 64, 8192, 1024),
    (1024, 64, 8193, 1025),
];

fn pool(window: u32, page_tokens: u32, shared: Option<u32>) -> Pool {
    Pool { page_tokens, window, full: 1024, windows: 256, shared }
}

#[test]
fn a_tail_is_that_of_the_reference() {
    for shared in [None, Some(1), Some(3)] {
        for (window, page, prompt, tail) in TAILS {
            let opened = pool(*window, *page, shared).open();
            let (grants, pages) = opened.grow(Growth { held: 0, target: *prompt }, true).unwrap();
            let covered = prompt - grants[1].first * page;
            assert_eq!(covered, *tail, "window {window}, pages of {page}, {prompt} tokens");
            assert_eq!(grants[1].pages, tail.div_ceil(*page));
            assert_eq!(grants[0].pages, prompt.div_ceil(*page), "the full part has every token");
            assert_eq!(pages[1].len(), grants[1].pages as usize * shared.unwrap_or(1) as usize);
            // As the reference bounds it.
            assert!(covered < window + page);
        }
    }
}

#[test]
fn a_tail_is_page_aligned_and_one_page_shorter_where_the_token_before_it_is_all_that_a_page_would_add() {
    // SGLang keeps the token W before the next one, too: 8063 of 8191, the last of its page. Nothing reads it.
    let opened = pool(128, 64, None).open();
    let (grants, _) = opened.grow(Growth { held: 0, target: 8191 }, true).unwrap();
    assert_eq!((grants[1].first, grants[1].pages), (126, 2));
    assert_eq!(opened.allocator.first_live(Component::WINDOW, 8191), 126);
    assert_eq!(opened.allocator.first_live(Component::FULL, 8191), 0);
}

#[test]
fn a_request_that_was_retracted_comes_back_with_less_than_the_reference_counts_for_it() {
    // SGLang's `swa_retractable_len`: the tail of the prompt and the whole answer so far.
    for (window, page, prompt, tail) in TAILS {
        let opened = pool(*window, *page, None).open();
        for answer in [0, 1, 63, 64, 500, 4000] {
            let growth = Growth { held: 0, target: prompt + answer };
            let mut need = [0; 2];
            assert_eq!(opened.allocator.need(&[growth], 1, &mut need), 2);
            assert_eq!(need[0], (prompt + answer).div_ceil(*page), "the full part has every token");
            assert!(
                need[1] <= (tail + answer).div_ceil(*page),
                "window {window}, {prompt} + {answer} tokens"
            );
            assert!(need[1] <= (window - 1).div_ceil(*page) + 1, "and no more than a window");
        }
    }
}

#[test]
fn at_8192_tokens_the_window_takes_a_fraction_of_what_every_token_would() {
    for (page, fewer) in [(64, 64), (256, 32)] {
        let opened = pool(128, page, None).open();
        let growth = Growth { held: 0, target: 8192 };
        let mut need = [0; 2];
        assert_eq!(opened.allocator.need(&[growth], 1, &mut need), 2);
        let mut all = [0; 2];
        assert_eq!(opened.allocator.need(&[growth], 0, &mut all), 2);
        assert_eq!((all[1], all[1] / need[1]), (8192 / page, fewer));
    }
}

#[test]
fn decoding_takes_a_page_of_each_part_at_a_time_and_the_window_gives_as_many_back() {
    let (window, page) = (128, 64);
    let opened = pool(window, page, Some(2)).open();
    let (_, [full, mut windows]) = opened.grow(Growth { held: 0, target: 1000 }, true).unwrap();
    let mut first = 13;
    assert_eq!((full.len(), windows.len()), (16, 6));
    for tokens in 1000..4000 {
        let (grants, pages) = opened.grow(Growth { held: tokens, target: tokens + 1 }, false).unwrap();
        let boundary = tokens % page == 0;
        assert_eq!([grants[0].pages, grants[1].pages], [u32::from(boundary); 2], "at {tokens}");
        windows.extend(&pages[1]);
        let live = u32::try_from(opened.allocator.first_live(Component::WINDOW, tokens + 1)).unwrap();
        let dead: Vec<_> = windows.drain(..2 * (live - first) as usize).collect();
        opened.give(Component::WINDOW, &dead).unwrap();
        first = live;
        // The window, what it begins in and what it ends in.
        assert!(windows.len() <= 2 * (window / page + 1) as usize, "at {tokens}: {}", windows.len());
    }
    assert_eq!(opened.free_pages()[1], 256 - u32::try_from(windows.len()).unwrap() / 2);
}
