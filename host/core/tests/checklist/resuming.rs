//! Preempted requests restore pages that were saved to offload tiers meanwhile, as new requests do. A failed restore never
//! fails the request.

use std::collections::BTreeSet;
use std::time::Duration;

use host_core::hierarchy::{Direction, HierarchyConfig, PageEnd, TierAction};
use host_core::radix::PageHash;
use host_core::{Config, Event, Role, Room};
use host_sim::{Leg, PAGE, names};

use super::leg::{config, tokens};
use super::storage::{hierarchy, with_offload};

const PROMPT: usize = 16;
const ANSWER: u32 = 24;
/// Pages of the pool: enough for both prompts, and for one of the two answers.
const PAGES: u32 = 12;

pub fn is_query(action: &TierAction) -> bool {
    matches!(action, TierAction::Query { .. })
}

pub fn is_load(action: &TierAction) -> bool {
    matches!(action, TierAction::Copy { direction: Direction::Load, .. })
}

/// Starts two requests that do not fit beside each other. Every tier action is done at once.
pub fn two(config: Config) -> (Leg, BTreeSet<PageHash>) {
    let decodes = config.role == Role::Decode;
    let mut leg = Leg::with(config);
    let mut stored = BTreeSet::new();
    for room in 0..2 {
        let first = 100 * room as u32;
        leg.submit(room, &tokens(first..first + PROMPT as u32), ANSWER);
        leg.serve(&mut stored);
        if decodes {
            leg.now = leg.now.after(Duration::from_secs(1));
            leg.deliver(room);
            leg.answer_messages();
            leg.serve(&mut stored);
        }
    }
    (leg, stored)
}

/// Computes a step that takes so long that anything else is faster.
pub fn step(leg: &mut Leg) {
    leg.now = leg.now.after(Duration::from_secs(1));
    assert!(leg.compute(), "nothing is computed: {:?}", leg.stats());
}

/// Computes until the second request has been preempted.
pub fn until_preemption(leg: &mut Leg, stored: &mut BTreeSet<PageHash>) {
    while leg.stats().retractions == 0 {
        step(leg);
        leg.serve(stored);
    }
    assert_eq!((leg.stats().queued, leg.stats().active), (1, 1));
}

/// Computes what is left, and does every tier action.
pub fn to_the_end(leg: &mut Leg, stored: &mut BTreeSet<PageHash>) {
    leg.serve(stored);
    while leg.batch.is_some() {
        step(leg);
        leg.serve(stored);
    }
    leg.answer_messages();
    assert!(leg.failed.is_empty(), "{:?}", leg.failed);
    assert_eq!(leg.finished.len(), 2);
    assert!(leg.emitted.values().all(|tokens| tokens.len() == ANSWER as usize), "{:?}", leg.emitted);
    leg.offload_at_rest();
}

/// A worker whose second request was preempted and can be admitted again, with nothing of its pages in the pool or in host
/// memory. The tier actions since then are pending.
fn only_stored(offload: HierarchyConfig) -> (Leg, BTreeSet<PageHash>) {
    only_stored_of(with_offload(Role::Aggregated, PAGES, offload))
}

/// Like [`only_stored`], for a worker of another configuration.
pub fn only_stored_of(config: Config) -> (Leg, BTreeSet<PageHash>) {
    let (mut leg, mut stored) = two(config);
    until_preemption(&mut leg, &mut stored);
    leg.scheduler.flush_cache().unwrap();
    while leg.finished.is_empty() {
        step(&mut leg);
        assert_eq!(leg.pending(is_load), 0, "nothing is there to be loaded");
        if leg.pending(is_query) == 0 {
            leg.serve(&mut stored);
        }
    }
    (leg, stored)
}

#[test]
fn what_was_evicted_of_a_preempted_request_comes_back_from_host_memory() {
    for role in [Role::Aggregated, Role::Decode] {
        let without = {
            let (mut leg, mut stored) = two(Config { reserved_decode_tokens: 1, ..config(role, PAGES) });
            until_preemption(&mut leg, &mut stored);
            to_the_end(&mut leg, &mut stored);
            leg.stats()
        };
        let (mut leg, mut stored) = two(with_offload(role, PAGES, hierarchy(32, 0)));
        until_preemption(&mut leg, &mut stored);
        let (reserves, before) = (leg.reserves.clone(), leg.stats());
        to_the_end(&mut leg, &mut stored);
        assert_eq!(leg.reserves, reserves, "prefill is not asked again");
        let stats = leg.stats();
        assert!(stats.hierarchy.loaded > 0, "{role:?}: {stats:?}");
        assert!(
            stats.recomputed_tokens + PAGE as u64 * stats.hierarchy.loaded <= without.recomputed_tokens,
            "{role:?}: {} of {} tokens computed again, {} pages loaded",
            stats.recomputed_tokens,
            without.recomputed_tokens,
            stats.hierarchy.loaded
        );
        assert!(stats.restored_tokens - before.restored_tokens >= PAGE as u64 * stats.hierarchy.loaded);
        assert_eq!(stats.restored_offload_tokens, PAGE as u64 * stats.hierarchy.loaded, "{role:?}");
        assert_eq!(stats.offload_tokens, 0, "no prompt was promised anything");
        assert_eq!(stats.hierarchy.loads_under_way, 0);
    }
}

#[test]
fn what_is_in_storage_alone_is_asked_for_when_there_are_pages_for_it() {
    let (mut leg, mut stored) = only_stored(hierarchy(32, 1));
    assert!(leg.batch.is_none(), "it waits for the answer");
    let queried = leg.answer_query(|name| stored.contains(name));
    assert_eq!(queried[..4], names(&tokens(100..116)), "its prompt");
    assert!(queried.len() > 4 && stored.contains(&queried[4]), "and its answer");
    let (tag, pages) = leg.take_read();
    assert!(leg.batch.is_none(), "it waits for the pages");
    assert_eq!(leg.stats().pool.held, 0, "and holds none meanwhile");
    leg.all_end(tag, pages.len(), PageEnd::Done);
    assert!(leg.batch.is_none(), "it waits for the copies");
    let (tag, loaded) = leg.take_copy(Direction::Load);
    assert_eq!(loaded.len(), pages.len());
    leg.all_end(tag, loaded.len(), PageEnd::Done);
    let sequence = &leg.batch.as_ref().unwrap().sequences[0];
    assert_eq!((sequence.room, sequence.start as usize), (Room(1), PAGE * pages.len()));
    to_the_end(&mut leg, &mut stored);
    assert_eq!(leg.stats().hierarchy.loaded_from_storage, pages.len() as u64);
}

#[test]
fn what_fails_to_come_back_is_computed_again() {
    // All pages fail or the second one, when they are read or when they are copied.
    for (read, all) in [(true, true), (true, false), (false, true), (false, false)] {
        let (mut leg, mut stored) = only_stored(hierarchy(32, 1));
        leg.answer_query(|name| stored.contains(name));
        let end = |leg: &mut Leg, tag, pages: usize, fails: bool| {
            let fails = |page| fails && (all || page == 1);
            let ends = (0..pages as u32)
                .map(|page| (page, if fails(page) { PageEnd::Failed } else { PageEnd::Done }));
            leg.event(Event::Tier(host_core::hierarchy::TierEvent::Ended { tag, pages: ends.collect() }));
        };
        let (tag, pages) = leg.take_read();
        end(&mut leg, tag, pages.len(), read);
        if leg.pending(is_load) > 0 {
            let (tag, pages) = leg.take_copy(Direction::Load);
            end(&mut leg, tag, pages.len(), !read);
        }
        let first = leg.batch.as_ref().unwrap().sequences[0].start as usize;
        assert_eq!(first, if all { 0 } else { PAGE }, "behind what is there");
        to_the_end(&mut leg, &mut stored);
    }
}

#[test]
fn a_preempted_request_waits_for_storage_no_longer_than_a_new_one() {
    for reads in [false, true] {
        let (mut leg, mut stored) = only_stored(hierarchy(32, 1));
        if reads {
            leg.answer_query(|name| stored.contains(name));
        }
        assert!(leg.batch.is_none());
        // The tier actions that hang get no answer.
        let hanging = std::mem::take(&mut leg.tier_actions);
        leg.wait(Duration::from_secs(40));
        assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 0, "it computes");
        leg.tier_actions.extend(hanging);
        to_the_end(&mut leg, &mut stored);
    }
}

#[test]
fn a_preempted_request_that_is_cancelled_while_it_comes_back_leaves_nothing_behind() {
    for until in 0..3 {
        let (mut leg, mut stored) = only_stored(hierarchy(32, 1));
        if until > 0 {
            leg.answer_query(|name| stored.contains(name));
        }
        if until > 1 {
            let (tag, pages) = leg.take_read();
            leg.all_end(tag, pages.len(), PageEnd::Done);
            assert_eq!(leg.pending(is_load), 1);
        }
        leg.event(Event::Cancel(Room(1)));
        let quarantined = leg.stats().pool.quarantined;
        assert_eq!(quarantined > 0, until > 1, "pages of a copy under way are set aside, and no others");
        leg.serve(&mut stored);
        leg.offload_at_rest();
    }
}

#[test]
fn a_request_without_a_cache_looks_for_nothing_when_it_comes_back() {
    let mut leg = Leg::with(with_offload(Role::Aggregated, PAGES, hierarchy(32, 1)));
    for room in 0..2 {
        let request = leg.request(room, &tokens(0..PROMPT as u32), ANSWER);
        leg.send(host_core::request::Request { no_cache: true, ..request });
    }
    while leg.batch.is_some() {
        step(&mut leg);
        assert!(leg.tier_actions.is_empty());
    }
    assert!(leg.stats().retractions > 0 && leg.finished.len() == 2);
    leg.offload_at_rest();
}
