//! Which window parts, and which pages waiting to be copied, are kept when pages are short.

use std::collections::BTreeSet;

use host_core::hierarchy::HierarchyConfig;
use host_core::message::{Body, Reserve};
use host_core::request::Request;
use host_core::window::WindowShape;
use host_core::{Config, PageId, Role, Room};
use host_sim::Leg;

use super::leg::{config, tokens};
use super::storage::{hierarchy, with_offload};

/// A window of two token pages, each of which takes two pages of the pool.
const WINDOW: WindowShape = WindowShape { tokens: 8, parts: 2, layers: 0 };

fn sliding(config: Config) -> Config {
    Config { window: Some(WINDOW), max_tokens: 400, reserved_decode_tokens: 1, ..config }
}

#[test]
fn a_request_that_loses_its_pages_as_soon_as_they_came_goes_on_behind_those_that_it_had() {
    // 43 tokens: the first step after them sees pages 9 and 10. At the end of the last whole page, pages 8 and 9 are seen.
    let prompt = tokens(0..43);
    let mut leg = Leg::with(sliding(config(Role::Decode, 27)));
    leg.submit(1, &tokens(100..108), 12);
    leg.deliver(1);
    leg.submit(2, &prompt, 3);
    let reserve = leg.reserves[&Room(2)].1.clone();
    assert_eq!((reserve.pages.len(), reserve.window.len()), (11, 6));
    // The first request answers until it lacks pages, and no other request has pages to give up.
    leg.compute_all();
    assert_eq!((leg.stats().retractions, leg.finished.len()), (0, 0));
    leg.deliver(2);
    assert_eq!(leg.stats().retractions, 1);
    let mut started = None;
    while let Some(batch) = &leg.batch {
        let again = batch.sequences.iter().find(|sequence| sequence.room == Room(2));
        started = started.or(again.map(|sequence| sequence.start));
        leg.compute();
    }
    assert_eq!((started, leg.stats().restored_tokens), (Some(40), 40));
    assert_eq!(leg.finished, [Room(1), Room(2)]);
    leg.at_rest();
}

#[test]
fn decode_asks_for_no_more_than_its_first_step_sees_where_it_could_not_keep_more() {
    let mut leg = Leg::with(sliding(Config { radix_cache: None, ..config(Role::Decode, 64) }));
    leg.submit(1, &tokens(0..43), 1);
    assert_eq!(leg.reserves[&Room(1)].1.window.len(), 4);
    let mut leg = Leg::with(sliding(config(Role::Decode, 64)));
    leg.send(Request { no_cache: true, ..leg.request(1, &tokens(0..43), 1) });
    assert_eq!(leg.reserves[&Room(1)].1.window.len(), 4);
}

#[test]
fn prefill_sends_as_much_of_the_window_as_decode_asks_for() {
    let prompt = tokens(0..43);
    for (pages, refused) in [(2, true), (4, false), (5, true), (6, false), (8, true)] {
        let mut leg = Leg::with(sliding(Config { radix_cache: None, ..config(Role::Prefill, 64) }));
        leg.submit(1, &prompt, 1);
        let window: Vec<PageId> = (1_000..1_000 + pages).map(PageId).collect();
        let reserve = Reserve { window: window.clone(), ..leg.span(&prompt, 0, 11) };
        leg.message(1, 1, Body::Reserve(reserve));
        let said = leg.sent.iter().any(|message| match &message.body {
            Body::Refused { message, .. } => message.contains("for the window, which takes 4 or 6"),
            _ => false,
        });
        assert_eq!(said, refused, "{pages} pages");
        if refused {
            continue;
        }
        let mut last = None;
        while let Some(batch) = leg.batch.clone() {
            last = Some(batch);
            leg.compute();
        }
        // The last piece's window parts of the last token pages.
        let parts = last.unwrap().sequences[0].window.pages.clone();
        let write = leg.writes.last().unwrap();
        assert!(write.notice.last && write.target.ends_with(&window), "{write:?}");
        assert!(write.source.ends_with(&parts[parts.len() - pages as usize..]), "{write:?}");
        leg.settle();
        leg.message(1, 1, Body::Commit);
        leg.at_rest();
    }
}

#[test]
fn copies_are_not_given_up_where_a_shorter_piece_does() {
    let offload = HierarchyConfig { copy_bytes: 1_000, ..hierarchy(64, 0) };
    let config = Config { chunk_tokens: 64, ..with_offload(Role::Decode, 34, offload) };
    let mut leg = Leg::with(sliding(config));
    let uncached = |leg: &mut Leg, room, prompt: &[u32], count| {
        leg.send(Request { no_cache: true, ..leg.request(room, prompt, count) });
    };
    // As in the first test, but without the cache: a preempted request computes all of its prompt again.
    uncached(&mut leg, 1, &tokens(100..108), 12);
    leg.deliver(1);
    uncached(&mut leg, 2, &tokens(300..379), 2);
    leg.compute_all();
    leg.deliver(2);
    assert_eq!((leg.stats().retractions, leg.stats().hierarchy.dropped), (1, 0));
    // Two prompts are to be copied, one after the other, and the first copy never ends.
    for room in 5..7 {
        leg.submit(room, &tokens(room as u32 * 100..room as u32 * 100 + 8), 1);
        leg.deliver(room);
    }
    assert_eq!((leg.finished.len(), leg.stats().locked_pages, leg.tier_actions.len()), (2, 4, 1));
    let mut longest = 0;
    while let Some(batch) = &leg.batch {
        let again = batch.sequences.iter().filter(|sequence| sequence.room == Room(2));
        longest = again.map(|sequence| sequence.tokens.len()).chain([longest]).max().unwrap();
        leg.compute();
    }
    // Of 34 pages, the request has 20 and 4 are to be copied. The window takes 32 pages for a piece of 64 tokens, 8 for one of 16.
    assert_eq!((longest, leg.stats().hierarchy.dropped), (16, 0));
    assert_eq!(leg.finished.len(), 4);
    leg.serve(&mut BTreeSet::new());
    leg.answer_messages();
    assert_eq!(leg.stats().hierarchy.saved, 4);
    leg.offload_at_rest();
}
