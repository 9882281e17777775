//! Prefixes whose pages are cached and whose window is not: the window is computed again from the pages.

use host_core::message::Body;
use host_core::pool::PoolLimits;
use host_core::window::WindowShape;
use host_core::{Batch, Config, Event, PageId, Role, Room};
use host_sim::{Leg, PAGE};

use super::leg::{config, tokens};

/// Three layers see two token pages, each of which takes one page of the pool. For a window that is gone, 8 + 2 x 7 tokens and the
/// rest of a page are computed again.
const WINDOW: WindowShape = WindowShape { tokens: 8, parts: 1, layers: 3 };

fn sliding(role: Role, pages: u32) -> Config {
    Config { window: Some(WINDOW), max_tokens: 400, reserved_decode_tokens: 1, ..config(role, pages) }
}

/// What the first sequence of a batch computes: its first position, the position behind its last, and the positions that are
/// computed for their window alone.
fn computes(batch: &Batch) -> (usize, usize, std::ops::Range<u32>) {
    let sequence = &batch.sequences[0];
    (sequence.start as usize, sequence.end(), sequence.recompute.clone())
}

/// A worker that served a prompt of 80 tokens and has lost its window at token 40, because window parts are evicted first for
/// another prompt. The other prompt's parts are evicted next, so that the parts of a third prompt stay.
fn without_window(config: Config) -> Leg {
    let mut leg = Leg::with(config);
    complete(&mut leg, 1, &tokens(0..80));
    complete(&mut leg, 2, &tokens(500..620));
    leg.at_rest();
    leg
}

/// Serves a request. On a prefill worker, decode asks for all pages.
fn complete(leg: &mut Leg, room: u64, prompt: &[u32]) {
    leg.submit(room, prompt, 1);
    if leg.batch.is_none() {
        leg.reserve(room, prompt, 0);
    }
    leg.compute_all();
    if !leg.writes.is_empty() {
        leg.settle();
        leg.message(room, 1, Body::Commit);
    }
}

/// The first 40 tokens of the long prompt, and 20 others.
fn forked() -> Vec<u32> {
    [&tokens(0..40)[..], &tokens(700..720)].concat()
}

#[test]
fn a_window_that_is_gone_is_computed_again_and_nothing_else_of_the_prefix() {
    let mut leg = without_window(sliding(Role::Aggregated, 83));
    let before = leg.stats();
    leg.submit(3, &forked(), 1);
    // The token at 40 sees 33..=40, from page 8 on: exact from 32 on after two layers that look back 7 tokens each.
    let mut pages: Option<Vec<PageId>> = None;
    let mut at = 16;
    while let Some(batch) = &leg.batch {
        let (start, end, again) = computes(batch);
        assert_eq!((start, &again), (at, &if start < 40 { 16..40 } else { 0..0 }));
        let sequence = &batch.sequences[0];
        assert_eq!(
            sequence.window.first as usize,
            WINDOW.first_kept(start, PAGE).max(4),
            "none before where it began"
        );
        assert_eq!(sequence.window.first as usize + sequence.window.pages.len(), end.div_ceil(PAGE));
        let cached = pages.get_or_insert_with(|| sequence.pages[..end / PAGE].to_vec());
        assert_eq!(sequence.pages[..cached.len()], cached[..], "the pages stay what they are");
        at = end;
        leg.compute();
    }
    assert_eq!(at, 60);
    let stats = leg.stats();
    assert_eq!(stats.window_recomputed_tokens, 24);
    assert_eq!(stats.prefill_tokens - before.prefill_tokens, 20);
    assert_eq!(stats.cached_tokens - before.cached_tokens, 16, "what was not computed at all");
    assert_eq!(leg.finished.last(), Some(&Room(3)));
    leg.at_rest();
    // The window is cached again, for requests that continue from the same place. The window parts before it are not.
    leg.submit(4, &[&tokens(0..40)[..], &tokens(800..804)].concat(), 1);
    assert_eq!(computes(leg.batch.as_ref().unwrap()).0, 40);
    leg.compute_all();
    leg.submit(5, &[&tokens(0..36)[..], &tokens(900..904)].concat(), 1);
    assert_eq!(
        computes(leg.batch.as_ref().unwrap()),
        (12, 20, 12..36),
        "from 28 on, less 14, less the rest of a page"
    );
    leg.compute_all();
    leg.at_rest();
}

#[test]
fn a_window_further_back_is_gone_on_from_where_that_is_less_to_compute() {
    for (deepest, (start, again)) in
        [(12, (16, 16..40)), (16, (16, 0..0)), (24, (24, 0..0)), (40, (40, 0..0))]
    {
        let mut leg = without_window(sliding(Role::Aggregated, 83));
        // Leaves a window from which other requests continue.
        leg.submit(3, &[&tokens(0..deepest)[..], &[999]].concat(), 1);
        leg.compute_all();
        leg.submit(4, &forked(), 1);
        let found = computes(leg.batch.as_ref().unwrap());
        assert_eq!((found.0, found.2), (start, again), "a window at {deepest}");
        leg.compute_all();
        leg.at_rest();
    }
}

#[test]
fn layers_that_look_far_back_make_a_prompt_be_computed_from_its_beginning() {
    let window = Some(WindowShape { layers: 6, ..WINDOW });
    let mut leg = without_window(Config { window, ..sliding(Role::Aggregated, 83) });
    leg.submit(3, &forked(), 1);
    assert_eq!(computes(leg.batch.as_ref().unwrap()), (0, 8, 0..0));
    leg.compute_all();
    assert_eq!(leg.stats().window_recomputed_tokens, 0);
    leg.at_rest();
}

#[test]
fn pages_that_are_cached_are_sent_while_the_window_is_computed_and_the_window_when_it_is() {
    let mut leg = without_window(sliding(Role::Prefill, 83));
    let prompt = forked();
    leg.submit(3, &prompt, 1);
    leg.reserve(3, &prompt, 0);
    assert_eq!(computes(leg.batch.as_ref().unwrap()).2, 16..40);
    let sent: Vec<_> = leg.writes.iter().map(|write| (write.first_page, write.source.len())).collect();
    assert_eq!(sent, [(0, 10)], "all that is cached");
    let mut exact = Vec::new();
    while leg.batch.is_some() {
        let sequence = &leg.batch.as_ref().unwrap().sequences[0];
        if sequence.end() == prompt.len() {
            // The token behind the prompt sees 53..=60, from page 13 on.
            exact = sequence.window.pages[13 - sequence.window.first as usize..].to_vec();
        }
        leg.compute();
    }
    let last = leg.writes.last().unwrap();
    assert!(last.notice.last && last.source.ends_with(&exact), "{last:?}");
    let places: usize = leg.writes.iter().map(|write| write.source.len()).sum();
    assert_eq!(places, 15 + exact.len(), "every page once");
    leg.settle();
    leg.message(3, 1, Body::Commit);
    leg.at_rest();
}

#[test]
fn a_prompt_alike_waits_for_the_window_that_is_being_computed() {
    let mut leg = without_window(sliding(Role::Aggregated, 83));
    leg.submit(3, &forked(), 1);
    leg.submit(4, &forked(), 1);
    // All pages of this prompt are cached, but not its window.
    leg.submit(5, &[&tokens(0..40)[..], &[777]].concat(), 1);
    assert_eq!(leg.batch.as_ref().unwrap().sequences.len(), 1);
    leg.compute_all();
    assert_eq!(leg.finished.len(), 5);
    assert_eq!((leg.stats().window_recomputed_tokens, leg.stats().shared_transfers), (24, 2));
    leg.at_rest();
}

#[test]
fn a_request_that_waits_for_a_window_waits_until_it_is_there_and_not_for_what_follows() {
    let mut leg = without_window(sliding(Role::Aggregated, 83));
    leg.submit(3, &[&tokens(0..40)[..], &tokens(700..820)].concat(), 1);
    leg.submit(4, &[&tokens(0..40)[..], &[777]].concat(), 1);
    while leg.batch.as_ref().unwrap().sequences[0].start < 40 {
        assert_eq!(leg.stats().queued, 1);
        leg.compute();
    }
    assert_eq!((leg.stats().queued, leg.stats().window_recomputed_tokens), (0, 24));
    leg.compute_all();
    assert_eq!(leg.stats().window_recomputed_tokens, 24);
    leg.at_rest();
}

#[test]
fn no_request_waits_for_a_prompt_that_has_passed_the_place_where_they_part() {
    for layers in [3, 50] {
        let limits = PoolLimits { total: 400, full: 400, window: 14 };
        let window = Some(WindowShape { layers, ..WINDOW });
        let config = Config { window, max_tokens: 900, ..sliding(Role::Aggregated, 400) };
        let mut leg = Leg::with_limits(config, limits);
        leg.submit(1, &tokens(0..800), 1);
        for _ in 0..20 {
            leg.compute();
        }
        assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 160);
        leg.submit(2, &forked(), 1);
        assert_eq!((leg.stats().queued, leg.stats().active), (0, 2), "{layers} layers");
        // A request with the same prompt still gets the window at the prompt's end.
        leg.submit(3, &tokens(0..800), 1);
        assert_eq!((leg.stats().queued, leg.stats().active), (1, 2), "{layers} layers");
        leg.compute_all();
        assert_eq!(leg.stats().shared_transfers, 1);
        assert_eq!(leg.finished.len(), 3);
        leg.at_rest();
    }
}

#[test]
fn what_is_given_up_while_a_window_is_computed_leaves_nothing_of_it() {
    let mut leg = without_window(sliding(Role::Aggregated, 83));
    leg.submit(3, &forked(), 1);
    leg.compute();
    assert_eq!(computes(leg.batch.as_ref().unwrap()), (24, 32, 16..40));
    let cached = leg.stats().pool.cached;
    leg.event(Event::Cancel(Room(3)));
    assert!(leg.stats().pool.quarantined > 0, "the batch still writes them");
    leg.compute();
    assert_eq!(leg.stats().pool.cached, cached);
    leg.at_rest();
    leg.submit(4, &forked(), 1);
    assert_eq!(computes(leg.batch.as_ref().unwrap()).2, 16..40, "the window is as gone as before");
    leg.compute_all();
    leg.at_rest();
}

#[test]
fn a_window_is_computed_in_pieces_where_pages_for_it_are_short() {
    let limits = PoolLimits { total: 60, full: 60, window: 6 };
    let config = Config { chunk_tokens: 64, ..sliding(Role::Aggregated, 60) };
    let mut leg = Leg::with_limits(config, limits);
    complete(&mut leg, 1, &tokens(0..80));
    leg.submit(2, &forked(), 1);
    let mut pieces = Vec::new();
    while let Some(batch) = &leg.batch {
        assert!(batch.sequences[0].window.pages.len() <= 6);
        let (start, end, again) = computes(batch);
        pieces.push((start, end, again.len()));
        leg.compute();
    }
    // Every piece is so short that its window parts fit in the six pages that windows may have.
    assert_eq!(pieces, [(16, 32, 24), (32, 48, 24), (48, 60, 0)]);
    leg.at_rest();
}

#[test]
fn a_request_that_lost_its_pages_goes_on_behind_them_without_its_window() {
    // Three answers of 12 pages each in a pool of 26 pages: window parts are evicted first.
    let mut leg = Leg::with(Config {
        window: Some(WindowShape { tokens: 4, parts: 1, layers: 2 }),
        ..sliding(Role::Decode, 26)
    });
    for room in [1, 2, 3] {
        leg.submit(room, &tokens(room as u32 * 100..room as u32 * 100 + 8), 40);
        leg.deliver(room);
    }
    leg.compute_all();
    let stats = leg.stats();
    assert!(stats.retractions > 0 && stats.window_recomputed_tokens > 0, "{stats:?}");
    assert_eq!(
        (leg.emitted[&Room(1)].len(), leg.emitted[&Room(2)].len(), leg.emitted[&Room(3)].len()),
        (40, 40, 40)
    );
    leg.at_rest();
}
