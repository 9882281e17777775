//! Which pages admission may count on.

use host_core::{Config, Role, Room};
use host_sim::Leg;

use super::leg::{config, tokens};

fn leg(pages: u32) -> Leg {
    Leg::with(Config { reserved_decode_tokens: 1, ..config(Role::Decode, pages) })
}

#[test]
fn pages_that_a_request_is_about_to_lock_are_not_counted_as_free_for_it() {
    // Eight pages, four of them cached: the beginning of a prompt of nine pages' length.
    let mut leg = leg(8);
    leg.submit(0, &tokens(0..16), 1);
    leg.deliver(0);
    leg.submit(1, &tokens(100..108), 2);
    assert_eq!((leg.stats().pool.free, leg.stats().pool.cached), (2, 4));
    // The third request needs three pages beside the four cached ones, and two are free.
    leg.submit(2, &tokens(0..28), 1);
    assert!(!leg.reserves.contains_key(&Room(2)));
    assert_eq!(leg.stats().pool.cached, 4, "nothing was evicted for what cannot be");
    leg.deliver(1);
    leg.compute_all();
    assert_eq!(leg.reserves[&Room(2)].1.decode_prefix_len, 16);
    leg.deliver(2);
    leg.at_rest();
}

#[test]
fn one_eviction_serves_all_admissions_of_a_tick_and_takes_no_more_than_is_missing() {
    let mut leg = leg(8);
    leg.submit(0, &tokens(0..32), 1);
    leg.deliver(0);
    assert_eq!(leg.stats().pool.cached, 8);
    leg.submit(1, &tokens(100..108), 1);
    leg.submit(2, &tokens(200..204), 1);
    assert_eq!(leg.stats().evicted_pages, 3);
    leg.deliver(1);
    leg.deliver(2);
    // The beginning of the first prompt is still cached.
    leg.submit(3, &tokens(0..20), 1);
    assert_eq!(leg.reserves[&Room(3)].1.decode_prefix_len, 20);
    leg.deliver(3);
    leg.at_rest();
}

#[test]
fn locked_and_quarantined_pages_are_no_requests_reserve() {
    let mut leg = leg(8);
    leg.submit(1, &tokens(0..16), 1);
    leg.event(host_core::Event::Cancel(Room(1)));
    assert_eq!(leg.stats().pool.quarantined, 4);
    leg.submit(2, &tokens(100..120), 1);
    assert!(!leg.reserves.contains_key(&Room(2)), "five pages of four");
    leg.drained(1);
    assert!(leg.reserves.contains_key(&Room(2)));
    leg.deliver(2);
    leg.at_rest();
}

#[test]
fn a_prompt_that_can_never_fit_is_refused_at_once() {
    let mut leg = Leg::with(Config { max_tokens: 1000, ..config(Role::Decode, 8) });
    leg.submit(1, &tokens(0..33), 1);
    assert!(leg.failed[&Room(1)].message.contains("pages"), "{:?}", leg.failed);
    leg.at_rest();
}

#[test]
fn a_first_token_is_kept_until_the_second_can_be_computed() {
    // Five transfers for batches of two.
    let mut leg = Leg::with(Config { max_batch: 2, ..config(Role::Decode, 64) });
    for room in 1..=5 {
        leg.submit(room, &tokens(room as u32 * 100..room as u32 * 100 + 8), 4);
    }
    for room in 1..=5 {
        leg.deliver(room);
    }
    assert_eq!(leg.emitted.keys().copied().collect::<Vec<_>>(), [Room(1), Room(2)]);
    let mut steps = 0;
    while leg.compute() {
        steps += 1;
        let begun = leg.emitted.len() - leg.finished.len();
        assert!(begun <= 2, "step {steps}: {begun} answers have begun, and two are computed at a time");
    }
    assert_eq!((leg.emitted.len(), leg.finished.len()), (5, 5));
    assert!(leg.emitted.values().all(|tokens| tokens.len() == 4), "{:?}", leg.emitted);
    leg.at_rest();
}

#[test]
fn a_target_between_tokens_leaves_a_prefill_worker_alone() {
    let target_itl = Some(std::time::Duration::from_nanos(1));
    let mut leg = Leg::with(Config { target_itl, chunk_tokens: 1000, ..config(Role::Prefill, 64) });
    // Two steps for the cost model to learn from, each 5 ms long.
    for room in 1..=2 {
        let prompt = tokens(room as u32 * 100..room as u32 * 100 + 8);
        leg.submit(room, &prompt, 1);
        leg.reserve(room, &prompt, 0);
        leg.wait(std::time::Duration::from_millis(5));
        leg.compute_all();
    }
    let prompts: Vec<_> =
        (3..=10).map(|room| (room, tokens(room as u32 * 90..room as u32 * 90 + 8))).collect();
    for (room, prompt) in &prompts {
        leg.submit(*room, prompt, 1);
        leg.reserve(*room, prompt, 0);
    }
    // The first prompt was alone, so it has a step of its own. The others share the next step.
    leg.compute();
    assert_eq!(leg.batch.as_ref().map_or(0, |batch| batch.sequences.len()), 7);
}
