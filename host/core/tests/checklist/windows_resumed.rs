//! Preempted requests of models with a window restore their pages and window parts from offload tiers.

use std::collections::BTreeSet;

use host_core::hierarchy::{Direction, PageEnd, TierEvent};
use host_core::{Config, Event, Role, Room};
use host_sim::{DRAWN, Leg, PAGE, names};

use super::leg::tokens;
use super::resuming::{is_load, is_query, only_stored_of, step, to_the_end, two, until_preemption};
use super::storage::hierarchy;
use super::windows_offload::{parts, sliding};

/// Pages of the pool: enough for both prompts with their windows, and for one of the two answers.
const PAGES: u32 = 24;
const ROLES: [Role; 2] = [Role::Aggregated, Role::Decode];

#[test]
fn what_was_evicted_of_a_preempted_request_comes_back_with_its_window() {
    for role in ROLES {
        let without = {
            let offload = Config { hierarchy: None, ..sliding(role, PAGES, hierarchy(64, 0)) };
            let (mut leg, mut stored) = two(offload);
            until_preemption(&mut leg, &mut stored);
            to_the_end(&mut leg, &mut stored);
            leg.stats()
        };
        let (mut leg, mut stored) = two(sliding(role, PAGES, hierarchy(64, 0)));
        until_preemption(&mut leg, &mut stored);
        let reserves = leg.reserves.clone();
        to_the_end(&mut leg, &mut stored);
        assert_eq!(leg.reserves, reserves, "prefill is not asked again");
        let stats = leg.stats();
        assert!(stats.hierarchy.promised_windows > 0, "{role:?}: {stats:?}");
        assert!(stats.hierarchy.loaded > stats.hierarchy.promised_windows, "{role:?}: {stats:?}");
        assert!(
            stats.recomputed_tokens < without.recomputed_tokens / 2,
            "{role:?}: {} of {} tokens computed again",
            stats.recomputed_tokens,
            without.recomputed_tokens
        );
        assert!(stats.restored_offload_tokens > 0, "{role:?}");
        assert_eq!(stats.offload_tokens, 0, "no prompt was promised anything");
    }
}

#[test]
fn storage_is_asked_for_the_window_and_waited_for_while_it_is_read() {
    for role in ROLES {
        let (mut leg, mut stored) = only_stored_of(sliding(role, PAGES, hierarchy(64, 1)));
        assert!(leg.batch.is_none(), "{role:?}: it waits for the answer");
        let queried = leg.answer_query(|name| stored.contains(name));
        // A prompt of four pages and as much of its answer as was computed.
        let known = [tokens(100..116), vec![DRAWN; 24]].concat();
        let pages = queried.iter().filter(|name| names(&known).contains(name)).count();
        assert!(pages > 4, "{role:?}: its prompt and its answer");
        assert!(
            queried.contains(&parts(&known, 0..pages)[2 * (pages - 1)]),
            "{role:?}: the last window part"
        );
        let (tag, read) = leg.take_read();
        assert!(leg.batch.is_none(), "{role:?}: it waits for the pages");
        assert_eq!(leg.stats().pool.held, 0, "{role:?}: and holds none meanwhile");
        let windows = read.len() - pages;
        assert!(windows > 0, "{role:?}: {} read", read.len());
        leg.all_end(tag, read.len(), PageEnd::Done);
        assert!(leg.batch.is_none(), "{role:?}: it waits for the copies");
        let (tag, loaded) = leg.take_copy(Direction::Load);
        assert_eq!(loaded.len(), read.len(), "{role:?}");
        leg.all_end(tag, loaded.len(), PageEnd::Done);
        let sequence = &leg.batch.as_ref().unwrap().sequences[0];
        assert_eq!((sequence.room, sequence.start as usize), (Room(1), PAGE * pages), "{role:?}");
        let before = leg.stats().recomputed_tokens;
        to_the_end(&mut leg, &mut stored);
        assert!(leg.stats().recomputed_tokens - before < PAGE as u64, "{role:?}");
    }
}

#[test]
fn a_prompt_that_is_computed_in_part_goes_on_behind_the_window_that_it_had() {
    // A request that decodes takes the pages of a request whose prompt is still being computed.
    let mut leg = Leg::with(sliding(Role::Aggregated, 39, hierarchy(64, 1)));
    let mut stored = BTreeSet::new();
    leg.submit(0, &tokens(0..16), 40);
    leg.serve(&mut stored);
    step(&mut leg);
    step(&mut leg);
    leg.submit(1, &tokens(100..180), 1);
    let mut computed = 0;
    while leg.stats().retractions == 0 {
        computed = leg
            .batch
            .iter()
            .flat_map(|batch| &batch.sequences)
            .find(|of| of.room == Room(1))
            .map_or(0, |of| of.end());
        step(&mut leg);
        leg.serve(&mut stored);
    }
    assert!((2 * PAGE..80).contains(&computed), "{computed} of its prompt were computed");
    leg.scheduler.flush_cache().unwrap();
    while leg.finished.is_empty() {
        step(&mut leg);
        leg.serve(&mut stored);
    }
    let sequence = &leg.batch.as_ref().unwrap().sequences[0];
    assert_eq!((sequence.room, sequence.start as usize), (Room(1), computed / PAGE * PAGE));
    while leg.batch.is_some() {
        step(&mut leg);
        leg.serve(&mut stored);
    }
    assert_eq!(leg.finished.len(), 2);
    leg.offload_at_rest();
}

#[test]
fn a_window_that_fails_to_come_back_is_computed_again_and_not_asked_for_twice() {
    for role in ROLES {
        for read in [true, false] {
            let (mut leg, mut stored) = only_stored_of(sliding(role, PAGES, hierarchy(64, 1)));
            leg.answer_query(|name| stored.contains(name));
            // The last page of each batch is a window part.
            let fail_last = |leg: &mut Leg, tag, pages: usize, fails: bool| {
                let end = |page: usize| match fails && page + 1 == pages {
                    true => PageEnd::Failed,
                    false => PageEnd::Done,
                };
                let pages = (0..pages).map(|page| (page as u32, end(page))).collect();
                leg.event(Event::Tier(TierEvent::Ended { tag, pages }));
            };
            let (tag, pages) = leg.take_read();
            fail_last(&mut leg, tag, pages.len(), read);
            if leg.pending(is_load) > 0 {
                let (tag, pages) = leg.take_copy(Direction::Load);
                fail_last(&mut leg, tag, pages.len(), !read);
            }
            assert_eq!(leg.pending(is_query), 0, "{role:?}");
            // Serves the tier actions that the worker starts instead.
            leg.serve(&mut stored);
            assert!(leg.batch.is_some(), "{role:?}, {read}: it computes");
            to_the_end(&mut leg, &mut stored);
        }
    }
}

#[test]
fn one_that_is_cancelled_while_its_window_comes_back_leaves_nothing_behind() {
    for (role, until) in ROLES.into_iter().flat_map(|role| (0..3).map(move |until| (role, until))) {
        let (mut leg, mut stored) = only_stored_of(sliding(role, PAGES, hierarchy(64, 1)));
        if until > 0 {
            leg.answer_query(|name| stored.contains(name));
        }
        if until > 1 {
            let (tag, pages) = leg.take_read();
            leg.all_end(tag, pages.len(), PageEnd::Done);
            assert_eq!(leg.pending(is_load), 1);
        }
        leg.event(Event::Cancel(Room(1)));
        assert_eq!(leg.stats().pool.quarantined > 0, until > 1, "{role:?}");
        leg.serve(&mut stored);
        leg.answer_messages();
        leg.offload_at_rest();
    }
}
