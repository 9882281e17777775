//! How long a request waits for storage: as long as computing or being sent the pages would take.

use std::collections::BTreeSet;
use std::time::Duration;

use host_core::Role;
use host_core::hierarchy::{Direction, HierarchyConfig, PageEnd, PrefetchPolicy, TierAction, TierConfig};
use host_core::message::Body;
use host_core::radix::PageHash;
use host_sim::{Leg, PAGE};

use super::leg::tokens;
use super::storage::{hierarchy, tier, with_offload};

const MS: Duration = Duration::from_millis(1);

/// An aggregated worker that computed a prompt of 40 tokens, 8 in each `step`, and emptied all caches but storage. Nine of
/// its pages can be restored from there.
fn forgotten(offload: HierarchyConfig, step: Duration) -> (Leg, BTreeSet<PageHash>) {
    let mut leg = Leg::with(with_offload(Role::Aggregated, 64, offload));
    let mut stored = BTreeSet::new();
    leg.submit(0, &tokens(0..40), 1);
    leg.serve(&mut stored);
    while leg.batch.is_some() {
        leg.now = leg.now.after(step);
        leg.compute();
    }
    end(&mut leg, &mut stored);
    (leg, stored)
}

/// Lets all work end, and empties all caches but storage.
fn end(leg: &mut Leg, stored: &mut BTreeSet<PageHash>) {
    leg.serve(stored);
    leg.compute_all();
    leg.serve(stored);
    leg.scheduler.flush_cache();
    leg.offload_at_rest();
}

fn reads(leg: &Leg) -> usize {
    leg.pending(|action| matches!(action, TierAction::Read { .. }))
}

#[test]
fn a_read_that_hangs_is_waited_for_as_long_as_computing_takes_unless_all_is_to_be_waited_for() {
    for (prefetch, waits) in
        [(PrefetchPolicy::Timeout, 36 * MS), (PrefetchPolicy::WaitComplete, Duration::from_secs(30))]
    {
        let (mut leg, mut stored) = forgotten(HierarchyConfig { prefetch, ..hierarchy(32, 1) }, 8 * MS);
        leg.submit(1, &tokens(0..40), 1);
        leg.answer_query(|_| true);
        let (tag, pages) = leg.take_read();
        leg.wait(waits - MS);
        assert!(leg.batch.is_none(), "{prefetch:?} gave up early");
        leg.wait(2 * MS);
        assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 0, "{prefetch:?}");
        leg.all_end(tag, pages.len(), PageEnd::Done);
        leg.wait(Duration::from_secs(61));
        end(&mut leg, &mut stored);
    }
}

#[test]
fn asking_is_part_of_the_wait() {
    let (mut leg, mut stored) = forgotten(hierarchy(32, 1), 8 * MS);
    leg.submit(1, &tokens(0..40), 1);
    leg.wait(20 * MS);
    leg.answer_query(|_| true);
    let (tag, pages) = leg.take_read();
    leg.wait(15 * MS);
    assert!(leg.batch.is_none());
    leg.wait(2 * MS);
    assert!(leg.batch.is_some(), "37 ms after it came");
    leg.all_end(tag, pages.len(), PageEnd::Done);
    end(&mut leg, &mut stored);
    // A tier that does not answer at all.
    leg.submit(2, &tokens(0..40), 1);
    leg.wait(37 * MS);
    assert!(leg.batch.is_some(), "it goes on without");
    leg.answer_query(|_| true);
    assert_eq!(reads(&leg), 0, "it is not needed any more");
    end(&mut leg, &mut stored);
}

#[test]
fn what_has_come_by_then_is_used_and_the_rest_is_computed() {
    let (mut leg, mut stored) = forgotten(HierarchyConfig { batch_pages: 3, ..hierarchy(32, 1) }, 8 * MS);
    leg.submit(1, &tokens(0..40), 1);
    leg.answer_query(|_| true);
    let (first, pages) = leg.take_read();
    leg.all_end(first, pages.len(), PageEnd::Done);
    leg.wait(35 * MS);
    assert_eq!(leg.stats().queued, 1);
    leg.wait(2 * MS);
    let (load, pages) = leg.take_copy(Direction::Load);
    leg.all_end(load, pages.len(), PageEnd::Done);
    assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start as usize, 3 * PAGE);
    end(&mut leg, &mut stored);
}

#[test]
fn a_request_that_would_be_computed_after_others_waits_that_much_longer() {
    let slow = TierConfig { latency: 10 * MS, ..tier() };
    let offload = HierarchyConfig { tiers: vec![slow], ..hierarchy(32, 1) };
    let (mut leg, mut stored) = forgotten(offload, 8 * MS);
    leg.submit(1, &tokens(500..540), 1);
    leg.answer_query(|_| false);
    assert!(leg.batch.is_some(), "40 ms of computing");
    leg.submit(2, &tokens(0..40), 1);
    leg.answer_query(|_| true);
    let (tag, pages) = leg.take_read();
    while leg.batch.is_some() {
        leg.now = leg.now.after(8 * MS);
        leg.compute();
    }
    leg.wait(35 * MS);
    assert_eq!(leg.stats().queued, 1);
    leg.wait(2 * MS);
    assert_eq!(leg.stats().queued, 0);
    leg.all_end(tag, pages.len(), PageEnd::Done);
    end(&mut leg, &mut stored);
}

#[test]
fn while_those_that_went_ahead_are_computed_the_wait_goes_on_once() {
    let slow = TierConfig { latency: 10 * MS, ..tier() };
    let offload = HierarchyConfig { tiers: vec![slow], ..hierarchy(32, 1) };
    let (mut leg, mut stored) = forgotten(offload, 8 * MS);
    leg.submit(1, &tokens(0..40), 1);
    leg.answer_query(|_| true);
    let (tag, pages) = leg.take_read();
    leg.submit(2, &tokens(500..540), 1);
    leg.answer_query(|_| false);
    assert!(leg.batch.is_some(), "40 ms of computing, which end late");
    leg.wait(37 * MS);
    assert_eq!(leg.stats().queued, 1);
    leg.wait(38 * MS);
    assert_eq!(leg.stats().queued, 1);
    leg.wait(3 * MS);
    assert_eq!(leg.stats().queued, 0);
    leg.all_end(tag, pages.len(), PageEnd::Done);
    end(&mut leg, &mut stored);
}

#[test]
fn what_is_nearly_there_is_not_left_alone_for_a_step_that_takes_nothing() {
    let fast = TierConfig { latency: MS / 10, bytes_per_second: 1e9, ..tier() };
    let offload = HierarchyConfig { tiers: vec![fast], ..hierarchy(32, 1) };
    let (mut leg, mut stored) = forgotten(offload, MS / 10);
    leg.submit(1, &tokens(0..40), 1);
    leg.wait(5 * MS);
    assert!(leg.batch.is_none(), "it waits for the answer");
    leg.answer_query(|_| true);
    let (tag, pages) = leg.take_read();
    leg.wait(9 * MS);
    assert!(leg.batch.is_none());
    leg.wait(2 * MS);
    assert!(leg.batch.is_some());
    leg.all_end(tag, pages.len(), PageEnd::Done);
    end(&mut leg, &mut stored);
}

#[test]
fn what_comes_late_is_used_by_a_request_that_had_to_wait_for_something_else() {
    let mut leg = Leg::with(with_offload(Role::Prefill, 64, hierarchy(32, 1)));
    let mut stored = BTreeSet::new();
    leg.submit(0, &tokens(0..40), 1);
    leg.reserve(0, &tokens(0..40), 0);
    leg.serve(&mut stored);
    while leg.batch.is_some() {
        leg.now = leg.now.after(8 * MS);
        leg.compute();
    }
    leg.settle();
    leg.message(0, 1, Body::Commit);
    end(&mut leg, &mut stored);
    leg.submit(1, &tokens(0..40), 1);
    // Longer than any request would wait for storage, but decode's reserve has not come yet.
    leg.wait(45 * MS);
    leg.answer_query(|name| stored.contains(name));
    let (tag, pages) = leg.take_read();
    leg.wait(30 * MS);
    leg.all_end(tag, pages.len(), PageEnd::Done);
    leg.reserve(1, &tokens(0..40), 0);
    leg.serve(&mut stored);
    assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 36);
    leg.compute_all();
    leg.settle();
    leg.message(1, 1, Body::Commit);
    end(&mut leg, &mut stored);
}
