//! Windows in offload tiers: the position from which a worker computes after a restore.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use host_core::hierarchy::{
    Direction, HierarchyConfig, PageEnd, PrefetchPolicy, TierAction, TierEvent, WritePolicy,
};
use host_core::message::Body;
use host_core::pool::PoolLimits;
use host_core::radix::PageHash;
use host_core::window::WindowShape;
use host_core::{Config, Event, Role, Room};
use host_sim::{Leg, names};

use super::leg::tokens;
use super::storage::{hierarchy, with_offload};

/// A window of two token pages, each of which takes two pages of the pool. No window is computed again.
pub const WINDOW: WindowShape = WindowShape { tokens: 8, parts: 2, layers: 0 };

pub fn sliding(role: Role, pages: u32, offload: HierarchyConfig) -> Config {
    Config { window: Some(WINDOW), max_tokens: 400, ..with_offload(role, pages, offload) }
}

/// Names of the window parts of some pages of a prompt.
pub fn parts(prompt: &[u32], pages: Range<usize>) -> Vec<PageHash> {
    let pages = names(prompt)[pages].to_vec();
    pages.iter().flat_map(|name| (0..2).map(|part| name.window_part(part))).collect()
}

pub fn all(prompt: &[u32], windows: Range<usize>) -> BTreeSet<PageHash> {
    names(prompt).into_iter().chain(parts(prompt, windows)).collect()
}

/// Computes everything, so slowly that anything else is faster.
pub fn compute(leg: &mut Leg, stored: &mut BTreeSet<PageHash>) {
    leg.serve(stored);
    while leg.batch.is_some() {
        leg.now = leg.now.after(Duration::from_secs(10));
        leg.compute();
        leg.serve(stored);
    }
}

/// An aggregated worker that has answered these prompts with one token each, and has emptied all caches but storage.
pub fn forgotten(offload: HierarchyConfig, prompts: &[&[u32]]) -> (Leg, BTreeSet<PageHash>) {
    let mut leg = Leg::with(sliding(Role::Aggregated, 120, offload));
    let mut stored = BTreeSet::new();
    for (room, prompt) in (100..).zip(prompts) {
        leg.submit(room, prompt, 1);
        compute(&mut leg, &mut stored);
    }
    leg.offload_at_rest();
    leg.scheduler.flush_cache().unwrap();
    (leg, stored)
}

/// The position from which a request is computed. Runs the request to its end.
pub fn start(leg: &mut Leg, stored: &mut BTreeSet<PageHash>, room: u64, prompt: &[u32]) -> u32 {
    leg.submit(room, prompt, 1);
    leg.serve(stored);
    let start = leg.batch.as_ref().unwrap().sequences[0].start;
    compute(leg, stored);
    assert!(leg.finished.contains(&Room(room)));
    start
}

#[test]
fn what_is_asked_again_goes_on_behind_the_window_that_storage_has() {
    let prompt = tokens(0..40);
    let (mut leg, mut stored) = forgotten(hierarchy(64, 1), &[&prompt]);
    leg.submit(1, &prompt, 1);
    assert!(leg.batch.is_none(), "it waits for the answer");
    leg.answer_query(|name| stored.contains(name));
    let (tag, pages) = leg.take_read();
    let read: BTreeSet<PageHash> = pages.iter().map(|(name, _)| *name).collect();
    assert_eq!(read, names(&prompt)[..9].iter().copied().chain(parts(&prompt, 7..9)).collect(), "one window");
    assert_eq!(leg.stats().pool.held, 0, "it holds nothing meanwhile");
    leg.all_end(tag, pages.len(), PageEnd::Done);
    leg.serve(&mut stored);
    let sequence = &leg.batch.as_ref().unwrap().sequences[0];
    assert_eq!((sequence.start, sequence.tokens.len()), (36, 4), "the last token must be computed");
    assert_eq!((sequence.window.first, sequence.window.pages.len()), (7, 6));
    compute(&mut leg, &mut stored);
    let stats = leg.stats().hierarchy;
    assert_eq!((stats.loaded, stats.promised_storage, stats.promised_windows), (13, 13, 4));
    // The next turn, and a prompt that diverges from it where no window was saved.
    leg.scheduler.flush_cache().unwrap();
    assert_eq!(start(&mut leg, &mut stored, 2, &tokens(0..60)), 40);
    leg.scheduler.flush_cache().unwrap();
    let loaded = leg.stats().hierarchy.loaded;
    let other = [&tokens(0..20)[..], &tokens(500..520)].concat();
    assert_eq!(start(&mut leg, &mut stored, 3, &other), 0);
    assert_eq!(leg.stats().hierarchy.loaded, loaded, "pages without a window are of no use");
    leg.offload_at_rest();
}

#[test]
fn host_memory_has_windows_too() {
    let mut leg = Leg::with(sliding(Role::Aggregated, 20, hierarchy(64, 0)));
    let mut nothing = BTreeSet::new();
    assert_eq!(start(&mut leg, &mut nothing, 0, &tokens(0..33)), 0);
    assert_eq!(start(&mut leg, &mut nothing, 1, &tokens(500..540)), 0);
    assert_eq!(start(&mut leg, &mut nothing, 2, &tokens(0..37)), 32);
    assert_eq!(leg.stats().hierarchy.promised_host, leg.stats().hierarchy.loaded);
    leg.offload_at_rest();
}

#[test]
fn a_window_that_cannot_be_had_lets_the_match_end_at_the_one_before() {
    let (short, long) = (tokens(0..40), tokens(0..80));
    let ask = [&long[..], &[7]].concat();
    for end in [PageEnd::Missing, PageEnd::Damaged, PageEnd::Failed] {
        for lost in [19 * 2, 19 * 2 + 1, 18 * 2] {
            let (mut leg, mut stored) = forgotten(hierarchy(96, 1), &[&short, &long]);
            let lost = parts(&long, 0..20)[lost];
            leg.submit(1, &ask, 1);
            leg.answer_query(|name| stored.contains(name));
            let (tag, pages) = leg.take_read();
            let of = |name| if name == lost { end } else { PageEnd::Done };
            let ends = (0..).zip(&pages).map(|(place, (name, _))| (place, of(*name)));
            leg.event(Event::Tier(TierEvent::Ended { tag, pages: ends.collect() }));
            assert!(leg.batch.is_none(), "what the next one takes is read");
            leg.serve(&mut stored);
            // The window in front of 76 is pages 17 and 18.
            let right = if lost == parts(&long, 18..19)[0] { 40 } else { 76 };
            assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, right, "{end:?}");
            compute(&mut leg, &mut stored);
            leg.offload_at_rest();
            assert_eq!((leg.failed.len(), leg.finished.len()), (0, 3));
        }
    }
}

#[test]
fn what_storage_has_of_a_prompt_without_a_window_is_not_read() {
    let prompt = tokens(0..80);
    let (mut leg, stored) = forgotten(hierarchy(96, 1), &[&prompt]);
    let mut pages: BTreeSet<PageHash> = names(&prompt).into_iter().collect();
    assert!(stored.is_superset(&pages));
    assert_eq!(start(&mut leg, &mut pages, 1, &prompt), 0);
    assert_eq!(leg.stats().hierarchy.loaded, 0);
    leg.offload_at_rest();
}

#[test]
fn reads_that_hang_cost_a_wait_and_no_answer() {
    let prompt = tokens(0..40);
    for prefetch in [PrefetchPolicy::BestEffort, PrefetchPolicy::Timeout, PrefetchPolicy::WaitComplete] {
        let wait = Duration::from_millis(20);
        let offload = HierarchyConfig {
            prefetch,
            wait_base: wait,
            wait_per_1024_tokens: Duration::ZERO,
            longest_wait: Duration::from_secs(3),
            ..hierarchy(64, 1)
        };
        let (mut leg, mut stored) = forgotten(offload, &[&prompt]);
        leg.submit(1, &prompt, 1);
        if prefetch != PrefetchPolicy::BestEffort {
            leg.answer_query(|_| true);
            let (tag, pages) = leg.take_read();
            // All but one of a window's pages have come.
            let most = (0..pages.len() as u32 - 1).map(|place| (place, PageEnd::Done)).collect();
            leg.event(Event::Tier(TierEvent::Ended { tag, pages: most }));
            assert!(leg.batch.is_none(), "{prefetch:?}");
            leg.wait(Duration::from_secs(4));
            assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 0, "{prefetch:?}");
            compute(&mut leg, &mut stored);
            leg.event(Event::Tier(TierEvent::Ended {
                tag,
                pages: vec![(pages.len() as u32 - 1, PageEnd::Done)],
            }));
        }
        compute(&mut leg, &mut stored);
        leg.wait(Duration::from_secs(61));
        leg.serve(&mut stored);
        assert_eq!(leg.finished.len(), 2);
        leg.offload_at_rest();
    }
}

#[test]
fn a_copy_that_fails_lets_all_be_computed_from_what_the_pool_has() {
    let prompt = tokens(0..40);
    for failed in [0, 5, 12] {
        let (mut leg, mut stored) = forgotten(hierarchy(64, 1), &[&prompt]);
        leg.submit(1, &prompt, 1);
        leg.answer_query(|_| true);
        let (tag, pages) = leg.take_read();
        leg.all_end(tag, pages.len(), PageEnd::Done);
        let (tag, pages) = leg.take_copy(Direction::Load);
        assert_eq!(pages.len(), 13);
        let end = |place| if place == failed { PageEnd::Failed } else { PageEnd::Done };
        leg.event(Event::Tier(TierEvent::Ended {
            tag,
            pages: (0..13).map(|place| (place, end(place))).collect(),
        }));
        assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 0);
        compute(&mut leg, &mut stored);
        let stats = leg.stats().hierarchy;
        assert_eq!((leg.finished.len(), stats.restores_failed, stats.not_restored), (2, 1, 1));
        leg.offload_at_rest();
    }
}

#[test]
fn a_prefill_worker_that_lacks_a_part_sends_nothing_before_it_computes_again() {
    let prompt = tokens(0..40);
    let mut leg = Leg::with(sliding(Role::Prefill, 120, hierarchy(64, 1)));
    let mut stored = all(&prompt, 7..10);
    // The pool has half of the prompt.
    leg.submit(0, &prompt[..20], 1);
    leg.reserve(0, &prompt[..20], 0);
    compute(&mut leg, &mut stored);
    leg.settle();
    leg.message(0, 1, Body::Commit);
    leg.serve(&mut stored);
    leg.submit(1, &prompt, 1);
    leg.reserve(1, &prompt, 0);
    leg.answer_query(|_| true);
    let (tag, pages) = leg.take_read();
    leg.all_end(tag, pages.len(), PageEnd::Done);
    let (tag, pages) = leg.take_copy(Direction::Load);
    leg.reserve(1, &prompt, 0);
    assert!(leg.writes.is_empty(), "nor when decode asks again");
    let end = |place| if place == 10 { PageEnd::Failed } else { PageEnd::Done };
    let ends = (0..pages.len() as u32).map(|place| (place, end(place))).collect();
    leg.event(Event::Tier(TierEvent::Ended { tag, pages: ends }));
    compute(&mut leg, &mut stored);
    let sent: usize = leg.writes.iter().map(|write| write.target.len()).sum();
    assert_eq!(sent, 10 + 4, "each page once, and the window");
    leg.settle();
    leg.message(1, 1, Body::Commit);
    leg.serve(&mut stored);
    leg.offload_at_rest();
}

#[test]
fn prefill_sends_what_it_restored_and_the_window_with_it() {
    let prompt = tokens(0..41);
    let mut leg = Leg::with(sliding(Role::Prefill, 120, hierarchy(64, 1)));
    let mut stored = all(&prompt, 8..10);
    leg.submit(1, &prompt, 1);
    leg.reserve(1, &prompt, 0);
    leg.serve(&mut stored);
    assert_eq!(leg.writes[0].source.len(), 10, "before anything is computed");
    let sequence = &leg.batch.as_ref().unwrap().sequences[0];
    assert_eq!((sequence.start, sequence.tokens.len()), (40, 1));
    compute(&mut leg, &mut stored);
    leg.settle();
    leg.message(1, 1, Body::Commit);
    leg.serve(&mut stored);
    leg.offload_at_rest();
}

#[test]
fn the_first_part_of_a_window_comes_from_the_pool_and_the_rest_from_offload_tiers() {
    // The prompt that prefill computed, and the prompt of the next turn, whose page 10 decode has saved with its window parts.
    let (prompt, next) = (tokens(0..40), tokens(0..48));
    let mut leg = Leg::with(sliding(Role::Aggregated, 120, hierarchy(64, 1)));
    let mut stored = BTreeSet::new();
    assert_eq!(start(&mut leg, &mut stored, 1, &prompt), 0);
    stored.insert(names(&next)[10]);
    stored.extend(parts(&next, 10..11));
    let loaded = leg.stats().hierarchy.loaded;
    leg.submit(2, &next, 1);
    leg.serve(&mut stored);
    assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 44);
    assert_eq!(
        leg.stats().hierarchy.loaded - loaded,
        1 + 2,
        "a page and its part; what it sees before is here"
    );
    compute(&mut leg, &mut stored);
    leg.offload_at_rest();
}

#[test]
fn restored_windows_are_counted_where_windows_may_have_so_much() {
    let prompts = [tokens(0..41), tokens(100..141)];
    let limits = PoolLimits { total: 120, full: 120, window: 8 };
    let mut leg = Leg::with_limits(sliding(Role::Aggregated, 120, hierarchy(64, 1)), limits);
    let mut stored: BTreeSet<PageHash> = prompts.iter().flat_map(|prompt| all(prompt, 8..10)).collect();
    leg.events([leg.request(1, &prompts[0], 8), leg.request(2, &prompts[1], 8)].map(Event::Submit));
    leg.serve(&mut stored);
    assert_eq!(leg.batch.as_ref().unwrap().sequences.len(), 1, "the other's window does not fit beside it");
    compute(&mut leg, &mut stored);
    assert_eq!(leg.finished.len(), 2);
    assert_eq!(leg.stats().prefill_tokens, 2, "both went on behind what storage had");
    leg.offload_at_rest();
}

#[test]
fn cancelling_at_any_moment_gives_windows_back() {
    for stop in 0..4 {
        let (mut leg, mut stored) = forgotten(hierarchy(64, 1), &[&tokens(0..40)]);
        leg.submit(1, &tokens(0..40), 1);
        let mut under_way = None;
        if stop >= 1 {
            leg.answer_query(|_| true);
            under_way = Some(leg.take_read()).map(|(tag, pages)| (tag, pages.len()));
        }
        if stop >= 2
            && let Some((tag, pages)) = under_way.take()
        {
            leg.all_end(tag, pages, PageEnd::Done);
            under_way = Some(leg.take_copy(Direction::Load)).map(|(tag, pages)| (tag, pages.len()));
        }
        leg.event(Event::Cancel(Room(1)));
        // The tenth page, for the last tokens, is not restored, but is quarantined with the others.
        assert_eq!(leg.stats().pool.quarantined, if stop >= 2 { 10 + 4 } else { 0 });
        if let Some((tag, pages)) = under_way {
            leg.all_end(tag, pages, PageEnd::Done);
        }
        leg.serve(&mut stored);
        leg.offload_at_rest();
    }
}

#[test]
fn a_prompt_with_more_pages_than_host_memory_has_slots_is_computed() {
    let (mut leg, mut stored) = forgotten(hierarchy(12, 1), &[&tokens(0..24)]);
    stored.extend(all(&tokens(0..100), 22..25));
    assert_eq!(start(&mut leg, &mut stored, 1, &tokens(0..100)), 24, "the window of a shorter one fits");
    leg.offload_at_rest();
    assert_eq!(leg.pending(|action| matches!(action, TierAction::Read { .. })), 0);
}

#[test]
fn flushing_while_windows_are_read_lets_them_be_computed() {
    let prompt = tokens(0..40);
    let (mut leg, mut stored) = forgotten(hierarchy(64, 1), &[&prompt]);
    leg.submit(1, &prompt, 1);
    leg.answer_query(|_| true);
    let (tag, pages) = leg.take_read();
    leg.scheduler.flush_cache().unwrap();
    leg.wait(Duration::from_millis(1));
    assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, 0);
    leg.all_end(tag, pages.len(), PageEnd::Done);
    compute(&mut leg, &mut stored);
    leg.offload_at_rest();
}

#[test]
fn pages_that_are_restored_without_a_window_have_it_computed_again() {
    // Each of the two layers looks seven tokens back, so computing begins seven tokens before the window that is needed.
    let shape = WindowShape { layers: 2, ..WINDOW };
    let prompt = tokens(0..80);
    for failed in [None, Some(3)] {
        let offload = HierarchyConfig {
            write_after_hits: 9,
            write: WritePolicy::WriteThroughSelective,
            ..hierarchy(96, 1)
        };
        let mut leg = Leg::with(Config { window: Some(shape), ..sliding(Role::Aggregated, 120, offload) });
        let mut stored: BTreeSet<PageHash> = names(&prompt).into_iter().collect();
        leg.submit(1, &prompt, 1);
        leg.answer_query(|name| stored.contains(name));
        let (tag, pages) = leg.take_read();
        assert_eq!(pages.len(), 19, "no part of a window");
        leg.all_end(tag, pages.len(), PageEnd::Done);
        let (tag, pages) = leg.take_copy(Direction::Load);
        let end = |place| if Some(place) == failed { PageEnd::Failed } else { PageEnd::Done };
        let ends = (0..pages.len() as u32).map(|place| (place, end(place))).collect();
        leg.event(Event::Tier(TierEvent::Ended { tag, pages: ends }));
        let sequence = &leg.batch.as_ref().unwrap().sequences[0];
        // Token 76 sees 69..: page 17 on. Seven before that is page 15.
        let right = if failed.is_some() { (0, 0..0, 0) } else { (60, 60..76, 15) };
        assert_eq!((sequence.start, sequence.recompute.clone(), sequence.window.first), right);
        compute(&mut leg, &mut stored);
        assert_eq!(leg.finished.len(), 1);
        leg.offload_at_rest();
    }
}

#[test]
fn a_window_in_storage_is_read_where_it_takes_more_to_compute_it_again() {
    for (layers, start) in [(2, 64), (9, 40)] {
        let (short, long) = (tokens(0..40), tokens(0..84));
        let shape = WindowShape { layers, ..WINDOW };
        let mut leg =
            Leg::with(Config { window: Some(shape), ..sliding(Role::Aggregated, 120, hierarchy(96, 1)) });
        let mut stored: BTreeSet<PageHash> = names(&long).into_iter().chain(parts(&short, 8..10)).collect();
        leg.submit(1, &long, 1);
        leg.serve(&mut stored);
        assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start, start);
        assert_eq!(leg.stats().hierarchy.promised_windows, if start == 40 { 4 } else { 0 });
        compute(&mut leg, &mut stored);
        leg.offload_at_rest();
    }
}
