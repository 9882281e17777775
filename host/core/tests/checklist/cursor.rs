//! What prefill sends, part by part.

use host_core::message::Body;
use host_core::{Event, PageId, Role, Room};
use host_sim::{Leg, PAGE};

use super::leg::{config, tokens};

/// Pages of the prompt, from decode's prefix on, part by part in the order in which they were sent.
fn parts(leg: &Leg, room: u64) -> Vec<(Vec<PageId>, bool)> {
    let of_room = leg.writes.iter().filter(|write| write.notice.room == Room(room));
    of_room.map(|write| (write.target.clone(), write.notice.last)).collect()
}

#[test]
fn parts_cover_what_decode_lacks_once_and_in_order_wherever_its_prefix_ends() {
    // Chunks of 8 tokens, two pages.
    for length in [1, 3, 4, 7, 8, 9, 16, 22, 24, 31] {
        let prompt = tokens(0..length);
        for prefix in (0..=prompt.len() / PAGE).map(|pages| pages * PAGE) {
            let mut leg = Leg::with(config(Role::Prefill, 64));
            leg.submit(1, &prompt, 1);
            leg.reserve(1, &prompt, prefix);
            leg.compute_all();
            let parts = parts(&leg, 1);
            let what = format!("prompt of {length}, prefix {prefix}: {parts:?}");
            let sent: Vec<u32> =
                parts.iter().flat_map(|(pages, _)| pages.iter().map(|page| page.0)).collect();
            let expected = prompt.len().div_ceil(PAGE) - prefix / PAGE;
            assert_eq!(sent, (0..expected as u32).collect::<Vec<u32>>(), "{what}");
            let (last, others) = parts.split_last().unwrap();
            assert!(last.1 && others.iter().all(|(pages, last)| !last && !pages.is_empty()), "{what}");
            let aux = leg.writes.iter().filter(|write| write.aux.is_some()).count();
            assert_eq!(aux, 1, "{what}");
            assert!(leg.writes.last().unwrap().aux.is_some(), "{what}");
            let sequences: Vec<u32> = leg.writes.iter().map(|write| write.notice.sequence).collect();
            assert_eq!(sequences, (0..parts.len() as u32).collect::<Vec<u32>>(), "{what}");
        }
    }
}

#[test]
fn a_reserve_that_comes_twice_moves_no_cursor_back() {
    let prompt = tokens(0..22);
    let mut leg = Leg::with(config(Role::Prefill, 64));
    leg.submit(1, &prompt, 1);
    leg.reserve(1, &prompt, 4);
    leg.compute();
    let before = parts(&leg, 1);
    assert!(!before.is_empty());
    leg.reserve(1, &prompt, 4);
    assert_eq!(parts(&leg, 1), before, "a repeat sends nothing");
    leg.compute_all();
    leg.reserve(1, &prompt, 4);
    let pages: usize = parts(&leg, 1).iter().map(|(pages, _)| pages.len()).sum();
    assert_eq!(pages, 5);
    leg.settle();
    leg.message(1, 1, Body::Commit);
    leg.at_rest();
}

#[test]
fn another_attempt_begins_anew_when_the_writes_of_the_last_have_settled() {
    let prompt = tokens(0..22);
    let mut leg = Leg::with(config(Role::Prefill, 64));
    leg.submit(1, &prompt, 1);
    leg.reserve(1, &prompt, 8);
    leg.compute_all();
    let first: usize = leg.writes.iter().map(|write| write.target.len()).sum();
    let begun = leg.writes.len();
    leg.reserve_again(1, &prompt, 8, 2);
    assert_eq!(leg.writes.len(), begun, "the first attempt's writes are under way");
    leg.settle();
    let again: usize = leg.writes.iter().map(|write| write.target.len()).sum();
    assert_eq!(again, first);
    assert!(leg.writes.iter().all(|write| write.notice.attempt == 2));
    leg.settle();
    leg.message(1, 2, Body::Commit);
    leg.at_rest();
}

#[test]
fn a_write_that_fails_ends_the_request_and_tells_decode() {
    let prompt = tokens(0..22);
    let mut leg = Leg::with(config(Role::Prefill, 64));
    leg.submit(1, &prompt, 1);
    leg.reserve(1, &prompt, 0);
    leg.compute_all();
    let write = leg.writes.remove(0);
    leg.event(Event::Written { tag: write.tag, error: Some("no route".into()) });
    assert!(leg.failed[&Room(1)].message.contains("no route"));
    assert!(leg.sent.iter().any(|message| matches!(message.body, Body::PrefillFailed { .. })));
    leg.settle();
    leg.at_rest();
}
