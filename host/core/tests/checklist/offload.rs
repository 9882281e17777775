//! Pages from offload tiers on workers that compute: queries, waiting, reads, copies and giving up.

use std::collections::BTreeSet;
use std::time::Duration;

use host_core::hierarchy::{Direction, HierarchyConfig, PageEnd, PrefetchPolicy, TierAction, TierEvent};
use host_core::{Event, Role, Room};
use host_sim::{Leg, PAGE, names};

use super::leg::tokens;
use super::storage::{hierarchy, with_offload};

fn is_query(action: &TierAction) -> bool {
    matches!(action, TierAction::Query { .. })
}

fn is_read(action: &TierAction) -> bool {
    matches!(action, TierAction::Read { .. })
}

/// An aggregated worker that has answered a prompt of 40 tokens and emptied all caches but storage.
fn forgotten(offload: HierarchyConfig) -> (Leg, BTreeSet<host_core::radix::PageHash>) {
    let mut leg = Leg::with(with_offload(Role::Aggregated, 64, offload));
    let mut stored = BTreeSet::new();
    leg.submit(0, &tokens(0..40), 4);
    leg.serve(&mut stored);
    while leg.batch.is_some() {
        // Computing takes so long that anything else is faster.
        leg.now = leg.now.after(Duration::from_secs(10));
        leg.compute();
        leg.serve(&mut stored);
    }
    leg.offload_at_rest();
    assert_eq!(stored.len(), 10, "43 tokens have KV");
    leg.scheduler.flush_cache().unwrap();
    (leg, stored)
}

#[test]
fn one_query_per_tier_and_tick_asks_for_all_requests() {
    let mut leg = Leg::with(with_offload(Role::Aggregated, 64, hierarchy(32, 2)));
    let requests = [leg.request(1, &tokens(0..17), 1), leg.request(2, &tokens(100..109), 1)];
    leg.events(requests.map(Event::Submit));
    assert_eq!(leg.tier_actions.len(), 2, "{:?}", leg.tier_actions);
    for (tier, action) in leg.tier_actions.iter().enumerate() {
        let TierAction::Query { tier: queried, names: whose, .. } = action else { panic!("{action:?}") };
        assert_eq!(*queried, tier);
        assert_eq!(*whose, [&names(&tokens(0..16))[..], &names(&tokens(100..108))].concat());
    }
    leg.serve(&mut BTreeSet::new());
    leg.compute_all();
    leg.serve(&mut BTreeSet::new());
    leg.offload_at_rest();
}

#[test]
fn pages_that_were_named_before_are_not_named_again_and_the_others_are() {
    let prompt = tokens(0..17);
    for role in [Role::Aggregated, Role::Decode] {
        let mut leg = Leg::with(with_offload(role, 64, hierarchy(32, 1)));
        let mut request = leg.request(1, &prompt, 1);
        request.name(&host_core::radix::PageHash([0; 32]), PAGE as u32);
        assert_eq!(request.names, names(&prompt));
        // A name that no other worker would give this page.
        let first = request.names[0].window_part(7);
        request.names.truncate(1);
        request.names[0] = first;
        leg.send(request);
        let second = first.next(&prompt[4..8]);
        assert_eq!(leg.answer_query(|_| false)[..2], [first, second], "{role:?}");
    }
}

#[test]
fn what_storage_has_is_read_and_copied_and_not_computed() {
    let (mut leg, mut stored) = forgotten(hierarchy(32, 1));
    leg.submit(1, &tokens(0..40), 1);
    assert!(leg.batch.is_none(), "it waits for the answer");
    leg.answer_query(|name| stored.contains(name));
    let (tag, pages) = leg.take_read();
    assert!(leg.batch.is_none(), "it waits for the pages");
    assert_eq!(leg.stats().pool.held, 0, "and holds none meanwhile");
    leg.all_end(tag, pages.len(), PageEnd::Done);
    leg.serve(&mut stored);
    let sequence = &leg.batch.as_ref().unwrap().sequences[0];
    assert_eq!((sequence.start, sequence.tokens.len()), (36, 4), "the last token must be computed");
    leg.compute_all();
    assert_eq!(leg.finished, [Room(0), Room(1)]);
    leg.serve(&mut stored);
    leg.offload_at_rest();
}

#[test]
fn what_host_memory_has_is_copied_without_a_question() {
    let offload = hierarchy(32, 0);
    let mut leg = Leg::with(with_offload(Role::Aggregated, 12, offload));
    for (room, first) in [(0, 0), (1, 1000 - 40), (2, 500), (3, 0)] {
        leg.submit(room, &tokens(first..first + 33), 1);
        if room == 3 {
            let (tag, pages) = leg.take_copy(Direction::Load);
            assert_eq!(pages.len(), 8);
            assert!(leg.batch.is_none());
            leg.all_end(tag, pages.len(), PageEnd::Done);
            assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 32);
        }
        leg.compute_all();
        leg.serve(&mut BTreeSet::new());
    }
    leg.offload_at_rest();
    assert_eq!(leg.stats().hierarchy.loaded, 8);
}

#[test]
fn what_a_request_finds_in_host_memory_stays_while_storage_is_asked_for_the_rest() {
    let mut leg = Leg::with(with_offload(Role::Aggregated, 12, hierarchy(24, 1)));
    let mut stored = BTreeSet::new();
    for (room, first) in [(0, 0), (1, 300), (2, 600)] {
        leg.submit(room, &tokens(first..first + 33), 1);
        leg.serve(&mut stored);
        // Computing takes so long that anything else is faster.
        leg.now = leg.now.after(Duration::from_secs(10));
        leg.compute_all();
        leg.serve(&mut stored);
    }
    assert_eq!(leg.stats().hierarchy.host.ready, 24, "host memory is full");
    // Only the last two pages of the first prompt are missing in host memory, and its other pages there are the least
    // recently used. The other prompt needs nine slots.
    let (first, other) = (tokens(0..41), tokens(900..937));
    stored.extend([names(&first), names(&other)].concat());
    leg.events([leg.request(5, &other, 1), leg.request(9, &first, 1)].map(Event::Submit));
    leg.serve(&mut stored);
    let mut starts = Vec::new();
    while let Some(batch) = &leg.batch {
        starts.extend(batch.sequences.iter().map(|sequence| (sequence.room, sequence.start)));
        leg.compute();
        leg.serve(&mut stored);
    }
    assert_eq!(starts, [(Room(5), 36), (Room(9), 40)]);
    leg.offload_at_rest();
}

#[test]
fn a_copy_that_fails_in_part_leaves_the_rest_to_be_computed() {
    let (mut leg, mut stored) = forgotten(hierarchy(32, 1));
    leg.submit(1, &tokens(0..40), 1);
    leg.answer_query(|_| true);
    let (tag, pages) = leg.take_read();
    leg.all_end(tag, pages.len(), PageEnd::Done);
    let (tag, pages) = leg.take_copy(Direction::Load);
    let ends = (0..pages.len() as u32)
        .map(|place| (place, if place == 5 { PageEnd::Failed } else { PageEnd::Done }));
    leg.event(Event::Tier(TierEvent::Ended { tag, pages: ends.collect() }));
    assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start as usize, 5 * PAGE);
    leg.compute_all();
    leg.serve(&mut stored);
    leg.offload_at_rest();
}

#[test]
fn requests_wait_for_reads_as_long_as_the_policy_says() {
    let second = Duration::from_secs(1);
    for (prefetch, waits) in [
        (PrefetchPolicy::BestEffort, Duration::ZERO),
        (PrefetchPolicy::Timeout, Duration::from_millis(20)),
        (PrefetchPolicy::WaitComplete, 3 * second),
    ] {
        let offload = HierarchyConfig {
            prefetch,
            wait_base: Duration::from_millis(20),
            wait_per_1024_tokens: Duration::ZERO,
            longest_wait: 3 * second,
            ..hierarchy(32, 1)
        };
        let (mut leg, mut stored) = forgotten(offload);
        leg.submit(1, &tokens(0..40), 1);
        if waits > Duration::ZERO {
            leg.answer_query(|_| true);
            assert!(leg.batch.is_none(), "{prefetch:?}");
            leg.wait(waits - Duration::from_millis(1));
            assert!(leg.batch.is_none(), "{prefetch:?} gave up early");
            leg.wait(Duration::from_millis(1));
        }
        assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 0, "{prefetch:?}");
        leg.compute_all();
        leg.serve(&mut stored);
        // A tier that missed a deadline rests, and the pages to be written wait.
        leg.wait(Duration::from_secs(61));
        leg.serve(&mut stored);
        leg.offload_at_rest();
    }
}

#[test]
fn a_tier_that_does_not_answer_costs_a_moment_and_is_left_alone_for_a_while() {
    let (mut leg, mut stored) = forgotten(hierarchy(32, 1));
    leg.submit(1, &tokens(0..40), 1);
    let TierAction::Query { tag, names, .. } = leg.tier_actions.remove(0) else { unreachable!() };
    assert!(leg.batch.is_none());
    let patience = leg.scheduler.next_deadline().unwrap().since(leg.now);
    assert!(patience < Duration::from_millis(200), "{patience:?}");
    leg.wait(patience);
    assert!(leg.batch.is_some(), "it goes on without");
    leg.compute_all();
    leg.serve(&mut stored);
    leg.scheduler.flush_cache();
    leg.submit(2, &tokens(0..40), 1);
    assert_eq!(leg.pending(is_query), 0, "the tier rests");
    assert!(leg.batch.is_some());
    leg.event(Event::Tier(TierEvent::Answered { tag, found: vec![true; names.len()] }));
    leg.compute_all();
    leg.serve(&mut stored);
    leg.scheduler.flush_cache();
    leg.wait(Duration::from_secs(61));
    leg.submit(3, &tokens(0..40), 1);
    assert_eq!(leg.pending(is_query), 1, "it is asked again");
    leg.serve(&mut stored);
    leg.compute_all();
    leg.serve(&mut stored);
    leg.offload_at_rest();
}

#[test]
fn a_read_that_hangs_is_cancelled_and_its_slots_are_set_aside_until_it_ends() {
    let (mut leg, mut stored) = forgotten(hierarchy(12, 1));
    leg.submit(1, &tokens(0..40), 1);
    leg.answer_query(|_| true);
    let (tag, pages) = leg.take_read();
    assert_eq!(pages.len(), 9);
    let patience = leg.scheduler.next_deadline().unwrap().since(leg.now);
    leg.wait(patience);
    assert_eq!(leg.pending(|action| *action == TierAction::Cancel { tag, tier: 0 }), 1);
    assert_eq!(leg.stats().hierarchy.host.abandoned, 9);
    leg.compute_all();
    leg.serve(&mut stored);
    assert_eq!(leg.finished.len(), 2);
    assert_eq!(leg.stats().hierarchy.host.abandoned, 9, "time alone frees nothing");
    leg.wait(Duration::from_secs(3600));
    assert_eq!(leg.stats().hierarchy.host.abandoned, 9);
    // The read ends at last, and succeeds. No request waits for it any more.
    leg.all_end(tag, pages.len(), PageEnd::Done);
    leg.serve(&mut stored);
    leg.offload_at_rest();
}

#[test]
fn reads_under_way_are_bounded_by_bytes() {
    let offload = HierarchyConfig { read_bytes: 3_500, batch_pages: 2, ..hierarchy(32, 1) };
    let (mut leg, mut stored) = forgotten(offload);
    leg.submit(1, &tokens(0..40), 1);
    leg.answer_query(|_| true);
    let mut read = 0;
    while read < 9 {
        let under_way: Vec<_> = leg.tier_actions.iter().filter(|action| is_read(action)).cloned().collect();
        let pages = under_way.iter().map(|action| match action {
            TierAction::Read { pages, .. } => pages.len(),
            _ => 0,
        });
        let counts: Vec<usize> = pages.collect();
        let sum = counts.iter().sum::<usize>();
        assert!(sum <= 3 && counts.iter().all(|count| *count <= 2) && sum > 0, "{counts:?}");
        let (tag, pages) = leg.take_read();
        read += pages.len();
        leg.all_end(tag, pages.len(), PageEnd::Done);
    }
    leg.serve(&mut stored);
    leg.compute_all();
    leg.serve(&mut stored);
    leg.offload_at_rest();
}

#[test]
fn a_hit_that_takes_longer_than_computing_is_left_alone() {
    let (mut leg, mut stored) = forgotten(hierarchy(32, 1));
    // Computing takes no time at all here, and reading takes long.
    leg.submit(1, &tokens(0..40), 1);
    leg.answer_query(|_| true);
    let (tag, pages) = leg.take_read();
    leg.now = leg.now.after(Duration::from_secs(4));
    leg.all_end(tag, pages.len(), PageEnd::Done);
    leg.serve(&mut stored);
    leg.compute_all();
    leg.serve(&mut stored);
    leg.scheduler.flush_cache();
    for room in 10..50_u64 {
        let first = 41 + 20 * (room as u32 - 10);
        leg.submit(room, &tokens(first..first + 40), 1);
        leg.serve(&mut stored);
        leg.compute_all();
        leg.serve(&mut stored);
    }
    leg.submit(2, &tokens(0..40), 1);
    leg.answer_query(|_| true);
    assert_eq!(leg.pending(is_read), 0);
    assert!(leg.batch.is_some() && leg.stats().hierarchy.skipped_by_cost > 0);
    leg.compute_all();
    leg.serve(&mut stored);
    leg.offload_at_rest();
}

#[test]
fn cancelling_at_any_moment_gives_everything_back() {
    for stop in 0..4 {
        let (mut leg, mut stored) = forgotten(hierarchy(32, 1));
        leg.submit(1, &tokens(0..40), 1);
        let mut read = None;
        let mut load = None;
        if stop >= 1 {
            leg.answer_query(|_| true);
            read = Some(leg.take_read());
        }
        if stop >= 2
            && let Some((tag, pages)) = read.take()
        {
            leg.all_end(tag, pages.len(), PageEnd::Done);
            load = Some(leg.take_copy(Direction::Load));
        }
        leg.event(Event::Cancel(Room(1)));
        let quarantined = leg.stats().pool.quarantined;
        assert_eq!(quarantined > 0, stop >= 2, "pages that are being written are set aside");
        if let Some((tag, pages)) = read.or(load.map(|(tag, pages)| (tag, Vec::with_capacity(pages.len())))) {
            let count = if stop >= 2 { 9 } else { pages.len() };
            leg.all_end(tag, count, PageEnd::Done);
        }
        leg.serve(&mut stored);
        leg.offload_at_rest();
    }
}

#[test]
fn a_request_that_uses_no_cache_asks_nothing_and_leaves_nothing() {
    let mut leg = Leg::with(with_offload(Role::Aggregated, 64, hierarchy(32, 1)));
    let request = host_core::request::Request { no_cache: true, ..leg.request(1, &tokens(0..40), 1) };
    leg.send(request);
    leg.compute_all();
    assert_eq!(leg.tier_actions, []);
    leg.offload_at_rest();
}

#[test]
fn prefill_restores_too_and_sends_what_it_restored() {
    let mut leg = Leg::with(with_offload(Role::Prefill, 64, hierarchy(32, 1)));
    let stored: BTreeSet<_> = names(&tokens(0..40)).into_iter().collect();
    leg.submit(1, &tokens(0..40), 1);
    leg.reserve(1, &tokens(0..40), 0);
    leg.serve(&mut stored.clone());
    assert_eq!(leg.writes[0].source.len(), 9, "what is restored goes out before anything is computed");
    leg.compute_all();
    leg.settle();
    leg.message(1, 1, host_core::message::Body::Commit);
    leg.serve(&mut stored.clone());
    leg.offload_at_rest();
    assert_eq!(leg.stats().prefill_tokens, 4);
}
