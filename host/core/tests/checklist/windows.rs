//! Models with sliding layers: which pages of its window a request has, and when.

use host_core::message::{Body, Reserve};
use host_core::pool::PoolLimits;
use host_core::window::WindowShape;
use host_core::{Config, Event, PageId, Role, Room};
use host_sim::{Leg, PAGE};

use super::leg::{config, tokens};

/// A window of two token pages, each of which takes two pages of the pool. No window is recomputed.
const WINDOW: WindowShape = WindowShape { tokens: 8, parts: 2, layers: 0 };
/// The most pages of the pool that the window takes while a request computes one token a step.
const STEADY: usize = 6;

fn sliding(role: Role, pages: u32) -> Config {
    Config { window: Some(WINDOW), max_tokens: 400, reserved_decode_tokens: 1, ..config(role, pages) }
}

/// Computes until nothing is asked for, and returns the most pages that requests held meanwhile.
fn most_held(leg: &mut Leg) -> usize {
    let mut most = leg.stats().pool.held;
    while leg.batch.is_some() {
        most = most.max(leg.stats().pool.held);
        leg.compute();
    }
    most
}

#[test]
fn decode_asks_for_the_window_at_the_prompts_end_only_and_keeps_a_window_while_it_answers() {
    let mut leg = Leg::with(Config { radix_cache: None, ..sliding(Role::Decode, 64) });
    leg.submit(1, &tokens(0..40), 60);
    let reserve = leg.reserves[&Room(1)].1.clone();
    // The token at position 40 sees 33..=40: pages 8 and 9 of the prompt.
    assert_eq!((reserve.pages.len(), reserve.window.len()), (10, 4));
    assert_eq!(leg.stats().pool.held, 14);
    leg.arrive(1);
    assert_eq!(leg.verifying[&Room(1)].1, [reserve.pages, reserve.window].concat(), "all of it is verified");
    leg.verified(1, true);
    assert_eq!(leg.stats().pages_received, 14);
    while let Some(batch) = &leg.batch {
        let sequence = &batch.sequences[0];
        let first = WINDOW.first_live(sequence.start as usize, PAGE);
        assert!(sequence.window.first as usize <= first);
        let covered = sequence.window.first as usize + sequence.window.pages.len() / 2;
        assert_eq!(covered, sequence.end().div_ceil(PAGE), "to the page that is written");
        assert!(leg.stats().pool.held <= sequence.pages.len() + STEADY, "{sequence:?}");
        leg.compute();
    }
    assert_eq!(leg.emitted[&Room(1)].len(), 60);
    leg.at_rest();
}

#[test]
fn a_prompt_much_longer_than_what_is_there_for_windows_is_computed_and_its_window_sent_once() {
    // The prompt has 25 token pages. With window parts for each of them it would take 75 pages.
    let mut leg = Leg::with(Config { radix_cache: None, ..sliding(Role::Prefill, 36) });
    let prompt = tokens(0..100);
    leg.submit(1, &prompt, 1);
    leg.reserve(1, &prompt, 0);
    let most = most_held(&mut leg);
    assert!(most <= 25 + 2 * WINDOW.most_kept(8, PAGE) && most > 25 + 4, "{most}");
    // Pages 23 and 24, which the token at position 100 sees.
    assert_eq!(leg.stats().pool.held, 25 + 4, "what is sent stays until decode has it");
    let sent: Vec<(PageId, usize)> = leg
        .writes
        .iter()
        .flat_map(|write| write.target.iter().copied().zip(write.first_page as usize..))
        .collect();
    let places: Vec<usize> = sent.iter().map(|(_, place)| *place).collect();
    assert_eq!(places, (0..29).collect::<Vec<_>>(), "every page once");
    let last = leg.writes.last().unwrap();
    let window = (1_000..1_004).map(PageId).collect::<Vec<_>>();
    assert!(last.notice.last && last.target.ends_with(&window), "{last:?}");
    assert_eq!(last.aux.as_ref().map(|(row, _, _)| row.pages), Some(29));
    leg.settle();
    leg.message(1, 1, Body::Commit);
    leg.at_rest();
}

#[test]
fn a_window_arrives_again_where_it_was_damaged() {
    let mut leg = Leg::with(sliding(Role::Decode, 64));
    leg.submit(1, &tokens(0..40), 2);
    let first = leg.reserves[&Room(1)].1.window.clone();
    leg.arrive(1);
    leg.verified(1, false);
    let (attempt, again) = leg.reserves[&Room(1)].clone();
    assert_eq!((attempt, &again.window), (2, &first));
    leg.arrive(1);
    leg.verified(1, true);
    leg.compute_all();
    leg.at_rest();

    let mut leg = Leg::with(sliding(Role::Prefill, 64));
    leg.submit(1, &tokens(0..40), 1);
    leg.reserve(1, &tokens(0..40), 0);
    leg.compute_all();
    leg.settle();
    leg.reserve_again(1, &tokens(0..40), 36, 2);
    let write = &leg.writes[0];
    assert_eq!((write.target.len(), write.notice.pages, write.notice.last), (5, 5, true));
    leg.settle();
    // A span for which decode has the window already.
    leg.message(1, 3, Body::Reserve(leg.span(&tokens(0..40), 8, 2)));
    let write = &leg.writes[0];
    assert_eq!((write.target.len(), write.notice.pages, write.notice.last), (2, 2, true));
    leg.settle();
    leg.message(1, 3, Body::Commit);
    leg.at_rest();
}

#[test]
fn prefill_refuses_windows_that_cannot_be() {
    let prompt = tokens(0..40);
    for (pages, attempt, refused) in [(3, 1, true), (0, 1, true), (5, 1, true), (4, 1, false), (2, 2, true)] {
        let mut leg = Leg::with(sliding(Role::Prefill, 64));
        leg.submit(1, &prompt, 1);
        let window = (0..pages).map(|page| PageId(100 + page)).collect();
        let reserve = Reserve { window, ..leg.span(&prompt, 0, 10) };
        leg.message(1, attempt, Body::Reserve(reserve));
        let said = leg.sent.iter().any(|message| match &message.body {
            Body::Refused { message, .. } => message.contains("for the window, which takes 4"),
            _ => false,
        });
        assert_eq!(said, refused, "{pages} pages at attempt {attempt}");
    }
    let mut leg = Leg::with(config(Role::Prefill, 64));
    leg.submit(1, &prompt, 1);
    leg.message(1, 1, Body::Reserve(Reserve { window: vec![PageId(1)], ..leg.span(&prompt, 0, 10) }));
    assert!(matches!(leg.sent.last().unwrap().body, Body::Refused { .. }), "a model without windows");
}

#[test]
fn the_window_of_a_room_that_was_given_up_is_not_used_before_prefill_is_done_with_it() {
    let mut leg = Leg::with(sliding(Role::Decode, 20));
    leg.submit(1, &tokens(0..40), 4);
    leg.event(Event::Cancel(Room(1)));
    assert_eq!((leg.stats().pool.quarantined, leg.stats().pool.held), (14, 0));
    leg.submit(2, &tokens(100..124), 1);
    assert!(!leg.reserves.contains_key(&Room(2)), "six pages and a window of four");
    leg.drained(1);
    assert!(leg.reserves.contains_key(&Room(2)));
    leg.deliver(2);
    leg.at_rest();
}

#[test]
fn pieces_get_shorter_where_pages_for_the_window_are_short() {
    // The pool has 16 pages: 10 token pages and the 6 pages that a window takes token by token.
    let mut leg = Leg::with(Config { radix_cache: None, ..sliding(Role::Aggregated, 16) });
    leg.submit(1, &tokens(0..38), 2);
    let mut longest = 0;
    while let Some(batch) = &leg.batch {
        longest = longest.max(batch.sequences[0].tokens.len());
        leg.compute();
    }
    assert_eq!(leg.finished, [Room(1)]);
    assert!((1..=8).contains(&longest), "{longest}");
    leg.at_rest();
    leg.submit(2, &tokens(0..40), 2);
    let failure = &leg.failed[&Room(2)];
    assert!(failure.message.contains("17 pages of KV cache"), "{failure:?}");
}

#[test]
fn long_prompts_are_computed_side_by_side_where_the_windows_of_short_pieces_fit() {
    // Each prompt has 20 token pages. Window parts take at most 38 pages for a piece of 64 tokens, and 8 for a piece of one page.
    let mut leg = Leg::with(Config { radix_cache: None, chunk_tokens: 64, ..sliding(Role::Aggregated, 84) });
    leg.submit(1, &tokens(0..80), 2);
    assert_eq!(leg.stats().pool.held, 20 + 32, "64 tokens are computed");
    leg.submit(2, &tokens(100..180), 2);
    assert_eq!(leg.stats().pool.held, 20 + 32 + 20);
    leg.compute_all();
    assert_eq!(leg.finished.len(), 2);
    leg.at_rest();
}

#[test]
fn what_is_computed_goes_on_where_a_whole_window_is_cached_and_nowhere_else() {
    let mut leg = Leg::with(sliding(Role::Aggregated, 200));
    let started = |leg: &mut Leg, room, prompt: &[u32]| {
        leg.submit(room, prompt, 1);
        let start = leg.batch.as_ref().unwrap().sequences[0].start;
        leg.compute_all();
        start
    };
    assert_eq!(started(&mut leg, 1, &tokens(0..48)), 0);
    assert_eq!(started(&mut leg, 2, &tokens(0..60)), 48, "behind the prompt");
    assert_eq!(started(&mut leg, 3, &tokens(0..48)), 44, "all but a token of it");
    let middle = [&tokens(0..20)[..], &tokens(500..520)].concat();
    assert_eq!(
        started(&mut leg, 4, &middle),
        20,
        "a prompt leaves its windows all along while no request lacks pages"
    );
    assert_eq!(started(&mut leg, 5, &[&tokens(0..60)[..], &[7]].concat()), 60);
    leg.at_rest();
    // Window parts along a prompt are evicted before anything else.
    let mut leg = Leg::with(sliding(Role::Aggregated, 40));
    assert_eq!(started(&mut leg, 1, &tokens(0..48)), 0);
    leg.submit(9, &tokens(900..964), 1);
    leg.compute_all();
    assert_eq!(started(&mut leg, 2, &[&tokens(0..48)[..], &[7]].concat()), 48, "its end is there");
    assert_eq!(started(&mut leg, 4, &middle), 0, "pages are cached there, and no window");
    leg.at_rest();
}

#[test]
fn of_prompts_alike_the_second_waits_for_all_of_the_first_and_computes_its_end() {
    let mut leg = Leg::with(sliding(Role::Aggregated, 200));
    leg.submit(1, &tokens(0..48), 1);
    leg.submit(2, &tokens(0..48), 1);
    leg.compute_all();
    assert_eq!(leg.finished, [Room(1), Room(2)]);
    assert_eq!((leg.stats().prefill_tokens, leg.stats().shared_transfers), (48 + 4, 1));
    leg.at_rest();
}

#[test]
fn unused_window_parts_go_before_pages_that_were_used() {
    let mut leg = Leg::with(sliding(Role::Aggregated, 52));
    leg.submit(1, &tokens(0..40), 1);
    leg.compute_all();
    let before = leg.stats().pool.cached;
    assert!(before > 10 + 4, "the prompt, its last window, and what else was there at its end: {before}");
    // The next request continues from the prompt's end, so window parts before the window there are of no use any more.
    leg.submit(2, &tokens(0..80), 1);
    assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 40);
    leg.compute_all();
    leg.submit(3, &tokens(500..560), 1);
    leg.compute_all();
    assert!(leg.stats().evicted_pages > 0);
    leg.submit(4, &tokens(0..84), 1);
    assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 80, "its end is there");
    leg.compute_all();
    leg.at_rest();
}

#[test]
fn a_request_that_loses_its_pages_gives_its_window_up_and_goes_on_where_one_is_cached() {
    // Two answers of 12 pages and a window each, in a pool for one and a half of them, and a prompt that is cached.
    let mut leg = Leg::with(sliding(Role::Decode, 32));
    leg.submit(3, &tokens(500..540), 1);
    leg.deliver(3);
    for room in [1, 2] {
        leg.submit(room, &tokens(room as u32 * 100..room as u32 * 100 + 8), 40);
        leg.deliver(room);
    }
    leg.compute_all();
    let stats = leg.stats();
    assert!(stats.retractions > 0 && stats.restored_tokens > 0, "{stats:?}");
    assert_eq!((leg.emitted[&Room(1)].len(), leg.emitted[&Room(2)].len()), (40, 40));
    leg.at_rest();
}

#[test]
fn requests_wait_for_window_pages_that_may_be_had_though_others_are_free() {
    let limits = PoolLimits { total: 64, full: 64, window: 8 };
    let mut leg = Leg::with_limits(sliding(Role::Decode, 64), limits);
    for room in [1, 2] {
        leg.submit(room, &tokens(room as u32 * 100..room as u32 * 100 + 40), 4);
    }
    assert!(leg.reserves.contains_key(&Room(1)) && !leg.reserves.contains_key(&Room(2)));
    leg.deliver(1);
    leg.compute_all();
    assert!(leg.reserves.contains_key(&Room(2)), "the first one's window is free");
    leg.deliver(2);
    leg.compute_all();
    leg.at_rest();
    let limits = PoolLimits { total: 64, full: 10, window: 54 };
    let mut leg = Leg::with_limits(sliding(Role::Decode, 64), limits);
    leg.submit(1, &tokens(0..41), 4);
    assert!(leg.failed[&Room(1)].message.contains("11 pages of KV cache for the layers without a window"));
}

#[test]
fn a_flushed_cache_gives_windows_back_too() {
    let mut leg = Leg::with(sliding(Role::Aggregated, 64));
    leg.submit(1, &tokens(0..40), 1);
    leg.compute_all();
    leg.submit(2, &tokens(0..44), 4);
    let in_use = leg.stats().pool.cached;
    let flushed = leg.scheduler.flush_cache().unwrap();
    assert_eq!(flushed.freed + flushed.in_use, in_use);
    assert!(flushed.in_use >= 10 + 4, "{flushed:?}: the prompt and its window");
    leg.compute_all();
    leg.at_rest();
    assert_eq!(leg.stats().pool.free, 64);
}
