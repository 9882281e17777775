//! Which window parts are saved to offload tiers: those of windows from which later requests will continue.

use std::collections::BTreeSet;

use host_core::Role;
use host_core::hierarchy::{HierarchyConfig, WritePolicy};
use host_core::message::Body;
use host_core::pool::PoolLimits;
use host_sim::{DRAWN, Leg, names};

use super::leg::tokens;
use super::storage::hierarchy;
use super::windows_offload::{all, compute, forgotten, parts, sliding, start};

#[test]
fn a_prompt_leaves_its_pages_and_the_windows_at_its_end() {
    let (_, stored) = forgotten(hierarchy(64, 1), &[&tokens(0..100)]);
    // Token 96 sees 89..: pages 22 and 23. Token 100 sees 93..: 23 and 24.
    assert_eq!(stored, all(&tokens(0..100), 22..25));
}

#[test]
fn decode_leaves_the_window_at_the_end_of_its_answer() {
    for write in [WritePolicy::WriteThrough, WritePolicy::WriteBack] {
        let offload = HierarchyConfig { write, ..hierarchy(64, 1) };
        let mut leg = Leg::with(sliding(Role::Decode, 60, offload));
        let mut stored = BTreeSet::new();
        leg.submit(0, &tokens(0..40), 14);
        leg.serve(&mut stored);
        leg.deliver(0);
        leg.answer_messages();
        compute(&mut leg, &mut stored);
        leg.answer_messages();
        if write == WritePolicy::WriteBack {
            assert!(stored.is_empty());
            // Other requests take the pages, one after the other.
            for room in 1..4 {
                leg.submit(room, &tokens(room as u32 * 100..room as u32 * 100 + 60), 1);
                leg.serve(&mut stored);
                leg.deliver(room);
                leg.answer_messages();
                compute(&mut leg, &mut stored);
                leg.answer_messages();
            }
        }
        let said = [&tokens(0..40)[..], &[DRAWN; 13]].concat();
        // The token at 52 sees 45..: pages 11 and 12.
        assert!(stored.is_superset(&all(&said, 11..13)), "{write:?}");
        assert!(parts(&said, 0..11).iter().all(|name| !stored.contains(name)), "{write:?}");
        leg.offload_at_rest();
        // The prefill worker of the next turn.
        let next = [&said[..], &[1, 2, 3, 4]].concat();
        let mut prefill = Leg::with(sliding(Role::Prefill, 120, hierarchy(64, 1)));
        prefill.submit(1, &next, 1);
        prefill.reserve(1, &next, 0);
        prefill.serve(&mut stored);
        assert_eq!(prefill.batch.as_ref().unwrap().sequences[0].start, 52, "{write:?}");
        compute(&mut prefill, &mut stored);
        prefill.settle();
        prefill.message(1, 1, Body::Commit);
        prefill.serve(&mut stored);
        prefill.offload_at_rest();
    }
}

#[test]
fn an_answer_that_fills_no_page_leaves_no_window_on_decode() {
    let mut leg = Leg::with(sliding(Role::Decode, 60, hierarchy(64, 1)));
    let mut stored = BTreeSet::new();
    leg.submit(0, &tokens(0..41), 3);
    leg.serve(&mut stored);
    leg.deliver(0);
    compute(&mut leg, &mut stored);
    leg.answer_messages();
    assert_eq!(stored, names(&tokens(0..41)).into_iter().collect(), "prefill saves the prompt's");
    leg.offload_at_rest();
}

#[test]
fn where_a_request_went_on_the_window_is_saved_too() {
    let mut leg = Leg::with(sliding(Role::Aggregated, 120, hierarchy(96, 1)));
    let mut stored = BTreeSet::new();
    let with = |from| [&tokens(0..40)[..], &tokens(from..from + 20)].concat();
    assert_eq!(start(&mut leg, &mut stored, 1, &with(500)), 0);
    assert!(!stored.contains(&parts(&tokens(0..40), 8..10)[0]));
    assert_eq!(start(&mut leg, &mut stored, 2, &with(600)), 40);
    leg.scheduler.flush_cache().unwrap();
    assert_eq!(start(&mut leg, &mut stored, 3, &with(700)), 40, "from storage");
    leg.offload_at_rest();
}

#[test]
fn with_a_part_of_the_pool_for_windows_write_back_saves_them_before_it_runs_short() {
    let offload = HierarchyConfig { write: WritePolicy::WriteBack, ..hierarchy(200, 1) };
    let limits = PoolLimits { total: 120, full: 120, window: 16 };
    let mut leg = Leg::with_limits(sliding(Role::Aggregated, 120, offload), limits);
    let mut stored = BTreeSet::new();
    let prompts: Vec<Vec<u32>> = (0..12).map(|prompt| tokens(prompt * 50..prompt * 50 + 33)).collect();
    for (room, prompt) in (0..).zip(&prompts) {
        leg.submit(room, prompt, 1);
        compute(&mut leg, &mut stored);
    }
    let saved = |prompt: &&Vec<u32>| parts(prompt, 6..8).iter().all(|name| stored.contains(name));
    let windows = prompts.iter().filter(saved).count();
    assert!(windows >= 8, "{windows} windows of 12 prompts");
    assert_eq!(leg.stats().hierarchy.dropped, 0);
    leg.offload_at_rest();
}

#[test]
fn decode_keeps_no_windows_in_host_memory_that_go_nowhere() {
    for (tiers, windows) in [(0, 0), (1, 4)] {
        let mut leg = Leg::with(sliding(Role::Decode, 60, hierarchy(64, tiers)));
        leg.submit(0, &tokens(0..40), 14);
        leg.serve(&mut BTreeSet::new());
        leg.deliver(0);
        leg.answer_messages();
        compute(&mut leg, &mut BTreeSet::new());
        leg.answer_messages();
        assert_eq!(leg.stats().hierarchy.host.ready, 13 + windows, "{tiers} tiers");
        leg.offload_at_rest();
    }
}

#[test]
fn pages_and_each_part_of_their_windows_have_names_of_their_own() {
    let pages = names(&tokens(0..40));
    let parts = pages.iter().flat_map(|page| (0..300).map(|part| page.window_part(part)));
    assert_eq!(pages.iter().copied().chain(parts).collect::<BTreeSet<_>>().len(), 10 * 301);
}

#[test]
fn a_restored_window_is_as_useful_as_one_that_was_computed() {
    let with = |from| [&tokens(0..40)[..], &tokens(from..from + 20)].concat();
    let mut leg = Leg::with(sliding(Role::Aggregated, 44, hierarchy(96, 1)));
    let mut stored = all(&tokens(0..40), 8..10);
    assert_eq!(start(&mut leg, &mut stored, 1, &with(500)), 40);
    let restored = leg.stats().hierarchy.promised_windows;
    leg.submit(9, &tokens(900..940), 1);
    compute(&mut leg, &mut stored);
    assert_eq!(start(&mut leg, &mut stored, 2, &with(600)), 40);
    assert_eq!(leg.stats().hierarchy.promised_windows, restored, "it is there still");
    leg.offload_at_rest();
}
