//! Storage that was once slow or silent: how long the scheduler avoids it.

use std::collections::BTreeSet;
use std::time::Duration;

use host_core::hierarchy::{HierarchyConfig, PageEnd, TierAction, TierConfig, TierEvent, TierTag};
use host_core::message::Body;
use host_core::radix::PageHash;
use host_core::{Config, Event, Role};
use host_sim::Leg;

use super::leg::tokens;
use super::storage::{hierarchy, tier, with_offload};

fn queries(leg: &Leg) -> usize {
    leg.pending(|action| matches!(action, TierAction::Query { .. }))
}

/// Takes the only pending query, without answering it.
fn take_query(leg: &mut Leg) -> (TierTag, Vec<PageHash>) {
    let at = leg.tier_actions.iter().position(|action| matches!(action, TierAction::Query { .. })).unwrap();
    let TierAction::Query { tag, names, .. } = leg.tier_actions.remove(at) else { unreachable!() };
    (tag, names)
}

/// A worker that answered a prompt of 40 tokens in one step of 10 s and emptied all caches but storage.
fn forgotten(offload: HierarchyConfig) -> (Leg, BTreeSet<PageHash>) {
    let config = Config { chunk_tokens: 64, ..with_offload(Role::Aggregated, 64, offload) };
    let mut leg = Leg::with(config);
    let mut stored = BTreeSet::new();
    leg.submit(0, &tokens(0..40), 1);
    leg.serve(&mut stored);
    leg.now = leg.now.after(Duration::from_secs(10));
    end(&mut leg, &mut stored);
    (leg, stored)
}

/// Lets all work end, and empties all caches but storage.
fn end(leg: &mut Leg, stored: &mut BTreeSet<PageHash>) {
    leg.serve(stored);
    leg.compute_all();
    leg.serve(stored);
    leg.scheduler.flush_cache();
}

/// Whether a request whose pages are all in storage reads them. A read ends after `seconds`, computing after 10 s.
fn reads(leg: &mut Leg, stored: &mut BTreeSet<PageHash>, room: u64, seconds: u64) -> bool {
    leg.submit(room, &tokens(0..40), 1);
    leg.answer_query(|_| true);
    let read = leg.pending(|action| matches!(action, TierAction::Read { .. })) > 0;
    if read {
        leg.now = leg.now.after(Duration::from_secs(seconds));
    }
    leg.serve(stored);
    leg.now = leg.now.after(Duration::from_secs(10));
    end(leg, stored);
    read
}

#[test]
fn what_is_slow_is_left_alone_after_a_while_and_tried_again_until_it_is_quick() {
    let (mut leg, mut stored) = forgotten(hierarchy(32, 1));
    // One slow read does not make the scheduler avoid the tier.
    assert!(reads(&mut leg, &mut stored, 1, 400));
    leg.wait(Duration::from_secs(61));
    let slow = (2..200).find(|room| {
        let read = reads(&mut leg, &mut stored, *room, 400);
        leg.wait(Duration::from_secs(61));
        !read
    });
    let first = slow.expect("many are");
    assert!(first > 5, "request {first} did without");
    // The last request did not read. A trial is due every 30 s, and a trial that succeeds makes the next one due.
    leg.wait(Duration::from_secs(61));
    assert!(reads(&mut leg, &mut stored, 1000, 15), "a trial");
    assert!(!reads(&mut leg, &mut stored, 1001, 0), "the next one is not due");
    leg.wait(Duration::from_secs(61));
    let tried: Vec<bool> = (1002..1006).map(|room| reads(&mut leg, &mut stored, room, 0)).collect();
    assert_eq!(tried, [true; 4], "it is quick again");
    leg.offload_at_rest();
}

fn is_read(action: &TierAction) -> bool {
    matches!(action, TierAction::Read { .. })
}

/// Completes the request of a prefill worker.
fn commit(leg: &mut Leg, stored: &mut BTreeSet<PageHash>, room: u64) {
    leg.serve(stored);
    leg.compute_all();
    leg.settle();
    leg.message(room, 1, Body::Commit);
    end(leg, stored);
}

/// A prefill worker that takes 250 ms for a token and 15 s for a read, and has just decided not to read a prompt of 40
/// tokens from storage. Its next trial is due in 30 s.
fn slow() -> (Leg, BTreeSet<PageHash>) {
    let mut leg = Leg::with(with_offload(Role::Prefill, 64, hierarchy(32, 1)));
    let mut stored = BTreeSet::new();
    for room in 0..200 {
        leg.wait(Duration::from_secs(61));
        leg.submit(room, &tokens(0..40), 1);
        leg.reserve(room, &tokens(0..40), 0);
        leg.answer_query(|name| stored.contains(name));
        let read = leg.pending(is_read) > 0;
        leg.now = leg.now.after(Duration::from_secs(if read { 15 } else { 0 }));
        leg.serve(&mut stored);
        let computed = leg.batch.as_ref().map_or(0, |batch| 40 - batch.sequences[0].start);
        leg.now = leg.now.after(Duration::from_millis(250) * computed);
        commit(&mut leg, &mut stored, room);
        if room > 0 && !read {
            return (leg, stored);
        }
    }
    panic!("it is never left alone")
}

#[test]
fn what_is_slower_than_computing_is_read_while_others_are_computed() {
    // The order of room numbers is not the order in which requests arrived.
    for rooms in [[1001, 1002], [1002, 1001]] {
        let (mut leg, mut stored) = slow();
        // Computing the first prompt takes 10 s, and the second request starts 10 s later in any case.
        let prompts = [tokens(500..540), tokens(0..40)];
        let requests = [0, 1].map(|which| leg.request(rooms[which], &prompts[which], 1));
        leg.events(requests.map(Event::Submit));
        leg.answer_query(|name| stored.contains(name));
        assert_eq!(leg.pending(is_read), 1);
        leg.serve(&mut stored);
        for which in [0, 1] {
            leg.reserve(rooms[which], &prompts[which], 0);
            commit(&mut leg, &mut stored, rooms[which]);
        }
        leg.offload_at_rest();
    }
}

#[test]
fn a_request_that_waits_for_something_else_and_was_skipped_is_not_ahead() {
    let (mut leg, mut stored) = slow();
    leg.submit(1000, &tokens(500..540), 1);
    leg.answer_query(|_| false);
    leg.submit(1001, &tokens(700..740), 1);
    leg.answer_query(|_| false);
    leg.reserve(1001, &tokens(700..740), 0);
    leg.serve(&mut stored);
    leg.now = leg.now.after(Duration::from_secs(10));
    commit(&mut leg, &mut stored, 1001);
    leg.submit(1002, &tokens(0..40), 1);
    leg.answer_query(|name| stored.contains(name));
    assert_eq!(leg.pending(is_read), 0, "nothing is computed, and computing takes 10 s");
}

#[test]
fn no_request_waits_longer_than_told_for_an_answer_that_was_slow_once() {
    let (mut leg, mut stored) =
        forgotten(HierarchyConfig { wait_base: Duration::from_millis(200), ..hierarchy(32, 1) });
    leg.submit(1, &tokens(0..40), 1);
    let (tag, names) = take_query(&mut leg);
    leg.wait(Duration::from_secs(100));
    leg.event(Event::Tier(TierEvent::Answered { tag, found: vec![true; names.len()] }));
    end(&mut leg, &mut stored);
    leg.wait(Duration::from_secs(61));
    leg.submit(2, &tokens(0..40), 1);
    let (tag, names) = take_query(&mut leg);
    assert!(leg.batch.is_none());
    leg.wait(Duration::from_millis(200));
    assert!(leg.batch.is_some(), "it goes on without");
    leg.event(Event::Tier(TierEvent::Answered { tag, found: vec![true; names.len()] }));
    end(&mut leg, &mut stored);
    leg.wait(Duration::from_secs(61));
    leg.serve(&mut stored);
    leg.offload_at_rest();
}

#[test]
fn reads_that_hang_for_ever_leave_an_eighth_of_host_memory_to_what_goes_down() {
    let silent = TierConfig { writes: false, ..tier() };
    let offload = HierarchyConfig { tiers: vec![silent], ..hierarchy(32, 1) };
    let (mut leg, mut stored) = forgotten(offload);
    let mut hanging = Vec::new();
    for room in 1..7_u64 {
        leg.submit(room, &tokens(100 * room as u32..100 * room as u32 + 40), 1);
        leg.answer_query(|_| true);
        if leg.pending(|action| matches!(action, TierAction::Read { .. })) > 0 {
            hanging.push(leg.take_read());
        }
        leg.wait(Duration::from_secs(2));
        end(&mut leg, &mut stored);
        leg.wait(Duration::from_secs(61));
    }
    assert_eq!(hanging.iter().map(|(_, pages)| pages.len()).collect::<Vec<_>>(), [9, 9, 9, 1]);
    let before = leg.stats().hierarchy.saved;
    leg.submit(9, &tokens(900..917), 1);
    leg.answer_query(|_| false);
    end(&mut leg, &mut stored);
    assert_eq!(leg.stats().hierarchy.saved - before, 4);
    for (tag, pages) in hanging {
        leg.all_end(tag, pages.len(), PageEnd::Failed);
    }
    leg.offload_at_rest();
}

#[test]
fn what_is_late_together_is_held_against_a_tier_once() {
    let (mut leg, mut stored) = forgotten(hierarchy(32, 1));
    let mut taken = Vec::new();
    for room in 1..4 {
        leg.submit(room, &tokens(0..40), 1);
        taken.push(take_query(&mut leg));
    }
    leg.wait(Duration::from_millis(500));
    assert!(leg.batch.is_some(), "they go on without");
    leg.compute_all();
    leg.wait(Duration::from_secs(1));
    leg.scheduler.flush_cache();
    leg.submit(4, &tokens(0..40), 1);
    assert_eq!(queries(&leg), 1, "it rested for a second");
    for (tag, names) in taken {
        leg.event(Event::Tier(TierEvent::Answered { tag, found: vec![false; names.len()] }));
    }
    end(&mut leg, &mut stored);
    leg.offload_at_rest();
}
