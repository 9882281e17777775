//! When pages are saved to offload tiers, and how that affects requests in the pool.

use std::collections::BTreeSet;
use std::time::Duration;

use host_core::hierarchy::{Direction, HierarchyConfig, PageEnd, TierAction, WritePolicy};
use host_core::{Config, Event, Role, Room};
use host_sim::{DRAWN, Leg, names};

use super::leg::tokens;
use super::storage::{hierarchy, with_offload};

fn answer(leg: &mut Leg, room: u64, prompt: &[u32], count: u32) {
    leg.submit(room, prompt, count);
    leg.serve(&mut BTreeSet::new());
    leg.compute_all();
}

#[test]
fn write_through_takes_what_enters_the_cache_and_takes_it_once() {
    let mut leg = Leg::with(with_offload(Role::Aggregated, 64, hierarchy(32, 2)));
    let mut stored = BTreeSet::new();
    leg.submit(0, &tokens(0..16), 1);
    leg.serve(&mut stored);
    leg.compute_all();
    let (tag, pages) = leg.take_copy(Direction::Save);
    assert_eq!(pages.len(), 4);
    assert_eq!(leg.stats().locked_pages, 4, "what is copied stays");
    leg.all_end(tag, 4, PageEnd::Done);
    assert_eq!(leg.stats().locked_pages, 0);
    assert_eq!(leg.pending(|action| matches!(action, TierAction::Write { .. })), 2, "both tiers");
    leg.serve(&mut stored);
    assert_eq!(stored, names(&tokens(0..16)).into_iter().collect());
    // The four new pages are saved, and none of the first four again.
    leg.submit(1, &tokens(0..32), 1);
    leg.serve(&mut stored);
    leg.compute_all();
    assert_eq!(leg.take_copy(Direction::Save).1.len(), 4);
}

#[test]
fn answers_are_written_so_that_the_next_turn_finds_them() {
    for role in [Role::Aggregated, Role::Decode] {
        let mut leg = Leg::with(with_offload(role, 64, hierarchy(32, 1)));
        let mut stored = BTreeSet::new();
        leg.submit(0, &tokens(0..16), 9);
        leg.serve(&mut stored);
        if role == Role::Decode {
            leg.deliver(0);
        }
        leg.compute_all();
        leg.serve(&mut stored);
        leg.answer_messages();
        leg.offload_at_rest();
        let said = [&tokens(0..16)[..], &[DRAWN; 8]].concat();
        assert_eq!(stored, names(&said).into_iter().collect(), "{role:?}");
    }
}

#[test]
fn selective_takes_what_was_used_often_enough() {
    let offload = HierarchyConfig { write: WritePolicy::WriteThroughSelective, ..hierarchy(32, 1) };
    let mut leg = Leg::with(with_offload(Role::Aggregated, 64, offload));
    let saves = |leg: &Leg| leg.pending(|action| matches!(action, TierAction::Copy { .. }));
    answer(&mut leg, 0, &tokens(0..17), 1);
    assert_eq!(saves(&leg), 0);
    answer(&mut leg, 1, &tokens(0..17), 1);
    assert_eq!(saves(&leg), 0, "one match");
    answer(&mut leg, 2, &tokens(0..21), 1);
    assert_eq!(leg.take_copy(Direction::Save).1.len(), 4, "two matches, and the rest has none");
}

#[test]
fn waiting_for_pages_is_no_use_of_a_prefix() {
    let offload = HierarchyConfig { write: WritePolicy::WriteThroughSelective, ..hierarchy(32, 0) };
    let mut leg = Leg::with(with_offload(Role::Aggregated, 12, offload));
    answer(&mut leg, 0, &tokens(0..17), 1);
    leg.submit(1, &tokens(100..128), 3);
    leg.submit(2, &tokens(0..17), 1);
    for _ in 0..5 {
        leg.wait(Duration::from_millis(1));
        assert_eq!(leg.stats().queued, 1, "it lacks pages");
    }
    leg.compute_all();
    assert_eq!(leg.finished, [Room(0), Room(1), Room(2)]);
    assert_eq!(leg.tier_actions, [], "one match");
    answer(&mut leg, 3, &tokens(0..17), 1);
    assert_eq!(leg.take_copy(Direction::Save).1.len(), 4, "two matches");
}

#[test]
fn what_was_flushed_is_not_written_when_its_request_goes_on() {
    let offload = HierarchyConfig { write: WritePolicy::WriteThroughSelective, ..hierarchy(32, 0) };
    let mut leg = Leg::with(with_offload(Role::Aggregated, 64, offload));
    for room in 0..2 {
        answer(&mut leg, room, &tokens(0..17), 1);
    }
    leg.submit(2, &tokens(0..21), 1);
    assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 16, "the second match");
    leg.scheduler.flush_cache();
    leg.compute_all();
    assert_eq!(leg.finished.len(), 3);
    assert_eq!(leg.tier_actions, []);
    leg.offload_at_rest();
}

#[test]
fn a_preemption_frees_pages_although_they_are_to_be_copied() {
    let config = with_offload(Role::Aggregated, 12, hierarchy(64, 0));
    let mut leg = Leg::with(Config { chunk_tokens: 1_000, ..config });
    let requests =
        (0..3).map(|room| leg.request(room, &tokens(room as u32 * 100..room as u32 * 100 + 8), 30));
    let requests: Vec<_> = requests.collect();
    leg.events(requests.into_iter().map(Event::Submit));
    leg.compute();
    leg.serve(&mut BTreeSet::new());
    // Their answers grow alike, until all three lack a page in the same step.
    while leg.stats().retractions == 0 {
        assert!(leg.compute(), "nothing is computed");
    }
    assert_eq!(leg.stats().retractions, 1, "what the first one gave up is enough for the others");
    assert_eq!(leg.batch.as_ref().map(|batch| batch.sequences.len()), Some(2));
    while leg.compute() {
        leg.serve(&mut BTreeSet::new());
    }
    assert_eq!(leg.finished.len(), 3);
    leg.offload_at_rest();
}

#[test]
fn a_step_that_lacks_pages_gives_up_copies_that_have_not_begun_and_keep_pages_alone() {
    let offload = HierarchyConfig { copy_bytes: 1_000, ..hierarchy(64, 0) };
    let config = with_offload(Role::Aggregated, 12, offload);
    let mut leg = Leg::with(Config { chunk_tokens: 1_000, ..config });
    let prompt = |room: u64| tokens(room as u32 * 100..room as u32 * 100 + 8);
    // The first request's copy never ends, and the second one's waits for it: four pages that no request can take.
    for room in 0..2 {
        leg.submit(room, &prompt(room), 1);
        leg.compute();
    }
    assert_eq!((leg.finished.len(), leg.stats().locked_pages, leg.tier_actions.len()), (2, 4, 1));
    let requests = [2, 3].map(|room| leg.request(room, &prompt(room), 11));
    leg.events(requests.map(Event::Submit));
    // Each request grows to four pages, and then needs a fifth.
    for _ in 0..9 {
        leg.compute();
    }
    assert_eq!(leg.stats().pool.free, 0);
    let stats = leg.stats();
    assert_eq!((stats.retractions, stats.hierarchy.dropped, stats.evicted_pages), (0, 2, 2));
    leg.compute_all();
    leg.serve(&mut BTreeSet::new());
    // Prompts and answers of the two requests that ran, and the prompt whose copy had begun.
    assert_eq!((leg.stats().hierarchy.saved, leg.finished.len()), (2 + 4 + 4, 4));
    leg.offload_at_rest();
}

#[test]
fn write_back_takes_what_is_about_to_go_and_evicts_ahead_of_need() {
    let offload = HierarchyConfig { write: WritePolicy::WriteBack, write_back_ahead: 4, ..hierarchy(32, 0) };
    let mut leg = Leg::with(with_offload(Role::Aggregated, 16, offload));
    for room in 0..3 {
        answer(&mut leg, room, &tokens(room as u32 * 100..room as u32 * 100 + 16), 1);
    }
    assert_eq!(leg.tier_actions, [], "four pages are free");
    leg.submit(3, &tokens(300..308), 1);
    leg.compute_all();
    let (tag, pages) = leg.take_copy(Direction::Save);
    assert_eq!(pages.len(), 2, "as many as were taken");
    let stats = leg.stats();
    assert_eq!((stats.pool.free, stats.pool.quarantined, stats.hierarchy.writing_back), (2, 2, 2));
    leg.all_end(tag, 2, PageEnd::Done);
    let stats = leg.stats();
    assert_eq!((stats.pool.free, stats.hierarchy.saved, stats.hierarchy.dropped), (4, 2, 0));
    leg.offload_at_rest();
    // The end of the oldest prompt was saved: its first half is still in the pool.
    leg.submit(4, &tokens(0..17), 1);
    assert_eq!(leg.take_copy(Direction::Load).1.len(), 2);
}

#[test]
fn a_step_that_needs_pages_now_waits_for_no_copy() {
    let offload = HierarchyConfig { write: WritePolicy::WriteBack, write_back_ahead: 2, ..hierarchy(32, 0) };
    let mut leg = Leg::with(with_offload(Role::Aggregated, 16, offload));
    for room in 0..3 {
        leg.submit(room, &tokens(room as u32 * 100..room as u32 * 100 + 20), 1);
        leg.compute_all();
    }
    assert!(leg.stats().hierarchy.writing_back > 0, "a copy is under way, and never ends");
    leg.submit(9, &tokens(900..948), 1);
    assert!(leg.batch.is_some(), "it has its pages in the tick in which it came");
    assert!(leg.stats().hierarchy.dropped > 0, "at the cost of what was not copied yet");
    leg.compute_all();
    leg.serve(&mut BTreeSet::new());
    leg.offload_at_rest();
}

#[test]
fn a_tier_that_takes_nothing_keeps_a_share_of_host_memory_and_no_more() {
    // Limited by the queue, or by half of all slots.
    for (queued_writes, most) in [(6, 6), (1000, 8)] {
        let limits = HierarchyConfig { write_bytes: 3_000, batch_pages: 2, ..hierarchy(16, 1) };
        takes_nothing(HierarchyConfig { queued_writes, ..limits }, most);
    }
}

fn takes_nothing(offload: HierarchyConfig, most: usize) {
    let mut leg = Leg::with(with_offload(Role::Aggregated, 64, offload));
    for room in 0..8 {
        leg.submit(room, &tokens(room as u32 * 100..room as u32 * 100 + 16), 1);
        let queries = leg.tier_actions.iter().position(|action| matches!(action, TierAction::Query { .. }));
        if queries.is_some() {
            leg.answer_query(|_| false);
        }
        leg.compute_all();
        while leg.pending(|action| matches!(action, TierAction::Copy { .. })) > 0 {
            let (tag, pages) = leg.take_copy(Direction::Save);
            leg.all_end(tag, pages.len(), PageEnd::Done);
        }
    }
    let stats = leg.stats().hierarchy;
    assert!(stats.host_pinned <= 3 + most, "{stats:?}");
    assert!(stats.saved > 16, "others come and go in the rest");
    assert!(leg.scheduler.tier_stats()[0].write_dropped > 0);
    leg.wait(Duration::from_secs(31));
    assert_eq!(leg.pending(|action| matches!(action, TierAction::Cancel { .. })), 2, "it is told to give up");
    leg.serve(&mut BTreeSet::new());
    leg.wait(Duration::from_secs(120));
    leg.serve(&mut BTreeSet::new());
    leg.offload_at_rest();
}

#[test]
fn a_flush_forgets_host_memory_and_nothing_of_storage() {
    let mut leg = Leg::with(with_offload(Role::Aggregated, 64, hierarchy(32, 1)));
    let mut stored = BTreeSet::new();
    leg.submit(0, &tokens(0..16), 1);
    leg.serve(&mut stored);
    leg.compute_all();
    // A flush during the copy: the copy ends, and its pages are not kept.
    let (tag, _) = leg.take_copy(Direction::Save);
    leg.scheduler.flush_cache();
    leg.all_end(tag, 4, PageEnd::Done);
    leg.serve(&mut stored);
    leg.offload_at_rest();
    assert_eq!((stored.len(), leg.stats().hierarchy.host.free), (0, 32));
    leg.event(Event::Cancel(Room(0)));
}
