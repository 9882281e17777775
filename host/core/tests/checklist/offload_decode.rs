//! Pages from offload tiers on decode workers: what decode promises, and what happens when a promised page does not come.

use std::collections::BTreeSet;
use std::time::Duration;

use host_core::hierarchy::{Direction, HierarchyConfig, PageEnd, PrefetchPolicy, TierEvent, TierTag};
use host_core::message::Body;
use host_core::notice::Notice;
use host_core::{Event, Role, Room};
use host_sim::{Leg, PAGE, PEER, names};

use super::leg::{config, tokens};
use super::storage::{hierarchy, with_offload};

/// A decode worker with a prompt of 11 pages. It holds 2 of them itself, and storage has just said that it has 8 (these 2
/// included). The worker has asked prefill for the rest, and storage for 6 pages. Returns the read. A transfer takes so
/// long that anything else is faster.
fn promised(offload: HierarchyConfig) -> (Leg, TierTag) {
    promised_after(offload, Duration::from_secs(10))
}

/// Like [`promised`], after a transfer of two pages that took `transfer`.
fn promised_after(offload: HierarchyConfig, transfer: Duration) -> (Leg, TierTag) {
    let mut leg = Leg::with(with_offload(Role::Decode, 64, offload));
    leg.submit(0, &tokens(0..8), 1);
    leg.answer_query(|_| false);
    leg.now = leg.now.after(transfer);
    leg.answer_messages();
    leg.deliver(0);
    leg.serve(&mut BTreeSet::new());
    leg.submit(1, &tokens(0..44), 2);
    assert!(!leg.reserves.contains_key(&Room(1)), "what can be promised is not known yet");
    let stored = names(&tokens(0..32));
    leg.answer_query(|name| stored.contains(name));
    let (tag, pages) = leg.take_read();
    assert_eq!(pages.iter().map(|(name, _)| *name).collect::<Vec<_>>(), stored[2..]);
    let (attempt, reserve) = &leg.reserves[&Room(1)];
    assert_eq!((*attempt, reserve.decode_prefix_len, reserve.pages.len()), (1, 32, 3));
    let stats = leg.stats().hierarchy;
    assert_eq!((stats.promised_host, stats.promised_storage), (0, 6));
    (leg, tag)
}

fn commits(leg: &Leg) -> usize {
    leg.sent.iter().filter(|message| message.body == Body::Commit && message.room == Room(1)).count()
}

fn finish(mut leg: Leg) {
    leg.compute_all();
    assert!(leg.finished.contains(&Room(1)), "{:?}", leg.failed);
    leg.answer_messages();
    leg.serve(&mut BTreeSet::new());
    // A tier that missed a deadline rests, and the pages to be written wait.
    leg.wait(Duration::from_secs(61));
    leg.serve(&mut BTreeSet::new());
    leg.offload_at_rest();
}

#[test]
fn a_restore_runs_beside_the_transfer_of_what_lies_behind_it() {
    for transfer_first in [true, false] {
        let (mut leg, read) = promised(hierarchy(32, 1));
        if transfer_first {
            leg.deliver(1);
            assert_eq!(commits(&leg), 0, "prefill keeps the pages until all is there");
            assert!(leg.batch.is_none());
        }
        leg.all_end(read, 6, PageEnd::Done);
        let (load, pages) = leg.take_copy(Direction::Load);
        assert_eq!(pages.len(), 6);
        leg.all_end(load, 6, PageEnd::Done);
        if !transfer_first {
            assert!(leg.batch.is_none());
            leg.deliver(1);
        }
        assert_eq!(commits(&leg), 1);
        let sequence = &leg.batch.as_ref().unwrap().sequences[0];
        assert_eq!(sequence.start, 44);
        assert_eq!(leg.stats().hierarchy.renegotiated, 0);
        finish(leg);
    }
}

#[test]
fn while_nothing_has_arrived_another_attempt_asks_for_all_that_is_missing() {
    let (mut leg, read) = promised(hierarchy(32, 1));
    let ends = |end: PageEnd| (0..6).map(move |place| (place, if place < 2 { PageEnd::Done } else { end }));
    leg.event(Event::Tier(TierEvent::Ended { tag: read, pages: ends(PageEnd::Missing).collect() }));
    let (load, pages) = leg.take_copy(Direction::Load);
    assert_eq!(pages.len(), 2, "what is there is used");
    assert_eq!(leg.reserves[&Room(1)].0, 1, "nothing is asked for while something is being copied");
    leg.all_end(load, 2, PageEnd::Done);
    let (attempt, reserve) = &leg.reserves[&Room(1)];
    assert_eq!((*attempt, reserve.decode_prefix_len as usize, reserve.pages.len()), (2, 4 * PAGE, 7));
    leg.deliver(1);
    assert_eq!(commits(&leg), 1);
    assert_eq!(leg.stats().hierarchy.renegotiated_pages, 7);
    finish(leg);
}

#[test]
fn what_has_arrived_in_part_is_not_asked_for_again() {
    let (mut leg, read) = promised(hierarchy(32, 1));
    let part = |sequence, pages, last| Notice { room: Room(1), attempt: 1, sequence, pages, last };
    leg.event(Event::Arrived(part(0, 2, false)));
    leg.all_end(read, 6, PageEnd::Missing);
    assert_eq!(leg.reserves[&Room(1)].0, 1, "the rest of it is on its way");
    leg.event(Event::Arrived(part(1, 1, true)));
    leg.verified(1, true);
    let (attempt, reserve) = &leg.reserves[&Room(1)];
    assert_eq!((*attempt, reserve.decode_prefix_len as usize, reserve.pages.len()), (2, 2 * PAGE, 6));
    leg.deliver(1);
    finish(leg);
}

#[test]
fn when_the_rest_is_there_only_the_missing_span_is_asked_for() {
    let (mut leg, read) = promised(hierarchy(32, 1));
    leg.deliver(1);
    // One page in the middle fails: the pages around it are used.
    let ends = (0..6).map(|place| (place, if place == 3 { PageEnd::Failed } else { PageEnd::Done }));
    let mut ends: Vec<(u32, PageEnd)> = ends.collect();
    ends.reverse();
    leg.event(Event::Tier(TierEvent::Ended { tag: read, pages: ends }));
    let (load, pages) = leg.take_copy(Direction::Load);
    leg.all_end(load, pages.len(), PageEnd::Done);
    let (attempt, reserve) = leg.reserves[&Room(1)].clone();
    assert_eq!(attempt, 2);
    assert_eq!((reserve.decode_prefix_len as usize, reserve.pages.len()), (5 * PAGE, 1));
    assert_eq!(commits(&leg), 0);
    // The page arrives damaged and is asked for again. That does not count as a renegotiation.
    leg.arrive(1);
    leg.verified(1, false);
    assert_eq!(leg.reserves[&Room(1)].0, 3);
    assert_eq!(leg.reserves[&Room(1)].1, reserve);
    leg.deliver(1);
    assert_eq!(commits(&leg), 1);
    assert_eq!(leg.stats().hierarchy.renegotiated, 1);
    finish(leg);
}

#[test]
fn a_restore_that_takes_too_long_is_renegotiated() {
    let (mut leg, read) = promised(HierarchyConfig { wait_base: Duration::from_secs(5), ..hierarchy(32, 1) });
    leg.deliver(1);
    let patience = leg.scheduler.next_deadline().unwrap().since(leg.now);
    assert!(patience < Duration::from_secs(1), "the deadline follows from how long reads take: {patience:?}");
    leg.wait(patience);
    let (attempt, reserve) = &leg.reserves[&Room(1)];
    assert_eq!((*attempt, reserve.decode_prefix_len as usize, reserve.pages.len()), (2, 2 * PAGE, 6));
    leg.deliver(1);
    assert!(leg.batch.is_some());
    // The read still owns its slots.
    assert_eq!(leg.stats().hierarchy.host.abandoned, 6);
    leg.all_end(read, 6, PageEnd::Done);
    finish(leg);
}

#[test]
fn a_restore_is_waited_for_as_long_as_being_sent_takes() {
    let (mut leg, read) = promised_after(hierarchy(32, 1), Duration::from_millis(10));
    leg.deliver(1);
    // Nine pages of 5 ms each lie behind the two that decode holds.
    leg.wait(Duration::from_millis(44));
    assert_eq!(leg.reserves[&Room(1)].0, 1);
    leg.wait(Duration::from_millis(2));
    assert_eq!(leg.reserves[&Room(1)].0, 2);
    leg.deliver(1);
    leg.all_end(read, 6, PageEnd::Done);
    finish(leg);
}

#[test]
fn when_prefill_has_gone_decode_computes_what_is_missing() {
    let (mut leg, read) = promised(hierarchy(32, 1));
    leg.deliver(1);
    leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true });
    assert!(leg.failed.is_empty(), "everything that prefill sends has arrived");
    leg.all_end(read, 6, PageEnd::Missing);
    assert!(leg.failed.is_empty());
    let sequence = &leg.batch.as_ref().unwrap().sequences[0];
    assert_eq!(sequence.start as usize, 2 * PAGE);
    assert_eq!(leg.stats().hierarchy.computed_instead, 1);
    leg.compute_all();
    assert_eq!(leg.emitted[&Room(1)].len(), 2, "each token once");
    finish(leg);
}

/// A decode worker that has asked prefill for a span of 6 pages that storage did not have. All other pages are there.
fn supplemented() -> Leg {
    let (mut leg, read) = promised(hierarchy(32, 1));
    leg.deliver(1);
    leg.all_end(read, 6, PageEnd::Missing);
    assert_eq!(leg.reserves[&Room(1)].0, 2);
    leg.closes = false;
    leg
}

/// Checks that decode computes the span and everything behind it.
fn computes_instead(leg: Leg) {
    assert!(leg.failed.is_empty(), "{:?}", leg.failed);
    assert_eq!(leg.batch.as_ref().unwrap().sequences[0].start as usize, 2 * PAGE);
    assert_eq!(leg.stats().hierarchy.computed_instead, 1);
    finish(leg);
}

#[test]
fn when_prefill_goes_while_it_sends_a_missing_span_decode_computes_it_once_nothing_can_land_there() {
    let lost = |fenced| Event::PeerLost { peer: PEER, session: 1, fenced };
    let mut leg = supplemented();
    leg.event(lost(true));
    assert!(leg.batch.is_none(), "our own threads may still copy what arrived");
    leg.close_rooms();
    computes_instead(leg);
    // A fence that is proven late, and a notice after the loss.
    let mut leg = supplemented();
    leg.event(lost(false));
    leg.arrive(1);
    leg.close_rooms();
    assert!(leg.batch.is_none() && leg.verifying.is_empty(), "late writes may still land");
    leg.event(lost(true));
    computes_instead(leg);
    // A new instance of prefill is a fence too.
    let mut leg = supplemented();
    leg.close_rooms();
    leg.event(Event::PeerReady { peer: PEER, floor: 0, session: 2 });
    leg.close_rooms();
    computes_instead(leg);
}

#[test]
fn when_prefill_will_not_send_a_missing_span_decode_takes_its_pages_back_and_computes_it() {
    let refusal = |body: fn(String, bool) -> Body| body("it has ended".into(), true);
    let refused = || refusal(|message, retryable| Body::Refused { message, retryable });
    let gave_up = || refusal(|message, retryable| Body::PrefillFailed { message, retryable });
    for (answered, closed_first) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut leg = supplemented();
        match answered {
            true => leg.answer(1, |body| matches!(body, Body::Reserve(_)), refused()),
            false => leg.message(1, 1, gave_up()),
        }
        assert!(leg.failed.is_empty() && leg.batch.is_none());
        if closed_first {
            leg.close_rooms();
            assert!(leg.batch.is_none(), "prefill may still write");
            leg.drained(1);
        } else {
            leg.drained(1);
            assert!(leg.batch.is_none(), "our own threads may still copy");
            leg.close_rooms();
        }
        computes_instead(leg);
    }
}

#[test]
fn a_missing_span_that_only_comes_damaged_is_computed() {
    let mut leg = supplemented();
    for _ in 0..2 {
        leg.arrive(1);
        leg.verified(1, false);
    }
    assert_eq!(commits(&leg), 1, "prefill may let go");
    computes_instead(leg);
}

#[test]
fn a_prefill_leg_that_has_ended_is_asked_for_nothing_more() {
    let gave_up = || Body::PrefillFailed { message: "it took too long".into(), retryable: true };
    for verified_first in [true, false] {
        let (mut leg, read) = promised(hierarchy(32, 1));
        leg.arrive(1);
        if verified_first {
            leg.verified(1, true);
            leg.message(1, 1, gave_up());
        } else {
            leg.message(1, 1, gave_up());
            leg.verified(1, true);
        }
        leg.all_end(read, 6, PageEnd::Missing);
        assert_eq!(leg.reserves[&Room(1)].0, 1);
        computes_instead(leg);
    }
    // Pages that arrived damaged cannot be sent again by a leg that has ended.
    let (mut leg, read) = promised(hierarchy(32, 1));
    leg.arrive(1);
    leg.message(1, 1, gave_up());
    leg.verified(1, false);
    assert!(leg.failed.contains_key(&Room(1)) && leg.reserves[&Room(1)].0 == 1);
    leg.drained(1);
    leg.all_end(read, 6, PageEnd::Done);
    leg.answer_messages();
    leg.serve(&mut BTreeSet::new());
    leg.offload_at_rest();
}

#[test]
fn giving_up_while_a_span_is_taken_back_gives_everything_back() {
    for (drained, closed) in [(false, false), (true, false), (false, true)] {
        let mut leg = supplemented();
        leg.message(1, 1, Body::PrefillFailed { message: "it has ended".into(), retryable: true });
        if drained {
            leg.drained(1);
        }
        if closed {
            leg.close_rooms();
        }
        leg.event(Event::Cancel(Room(1)));
        assert!(leg.stats().pool.quarantined > 0);
        if !drained {
            leg.drained(1);
        }
        if !closed {
            leg.close_rooms();
        }
        leg.answer_messages();
        leg.serve(&mut BTreeSet::new());
        leg.offload_at_rest();
    }
}

#[test]
fn without_patience_only_what_is_in_host_memory_is_promised() {
    let offload = HierarchyConfig { prefetch: PrefetchPolicy::BestEffort, ..hierarchy(32, 1) };
    let mut leg = Leg::with(with_offload(Role::Decode, 64, offload));
    leg.submit(1, &tokens(0..44), 1);
    assert_eq!(leg.reserves[&Room(1)].1.decode_prefix_len, 0);
    leg.deliver(1);
    leg.serve(&mut BTreeSet::new());
    leg.scheduler.flush_cache();
    finish(leg);
}

#[test]
fn giving_up_at_any_moment_gives_everything_back() {
    for stop in 0..6 {
        let (mut leg, read) = promised(hierarchy(32, 1));
        let mut load = None;
        if stop == 1 || stop == 3 || stop == 5 {
            leg.arrive(1);
        }
        if stop == 3 || stop == 5 {
            leg.verified(1, true);
        }
        if stop >= 2 {
            leg.all_end(read, 6, PageEnd::Done);
            load = Some(leg.take_copy(Direction::Load).0);
        }
        if stop >= 4
            && let Some(load) = load.take()
        {
            leg.all_end(load, 6, PageEnd::Done);
        }
        leg.event(Event::Cancel(Room(1)));
        if stop != 5 {
            leg.drained(1);
        }
        if leg.verifying.contains_key(&Room(1)) {
            leg.verified(1, true);
        }
        if stop < 2 {
            leg.all_end(read, 6, PageEnd::Done);
        }
        if let Some(load) = load {
            assert!(leg.stats().pool.quarantined > 0, "{stop}: pages that are written are set aside");
            leg.all_end(load, 6, PageEnd::Done);
        }
        leg.compute_all();
        leg.answer_messages();
        leg.serve(&mut BTreeSet::new());
        leg.offload_at_rest();
    }
}

#[test]
fn prefill_sends_a_missing_span_alone() {
    let mut leg = Leg::with(config(Role::Prefill, 64));
    let prompt = tokens(0..44);
    leg.submit(1, &prompt, 1);
    leg.reserve(1, &prompt, 32);
    leg.compute_all();
    leg.settle();
    let mut reserve = leg.span(&prompt, 12, 5);
    leg.message(1, 2, Body::Reserve(reserve.clone()));
    let write = leg.writes.last().unwrap().clone();
    assert_eq!((write.source.len(), write.target.len(), write.notice.last), (5, 5, true));
    assert_eq!(write.aux.as_ref().map(|(row, _, _)| (row.pages, row.attempt)), Some((5, 2)));
    leg.settle();
    leg.message(1, 2, Body::Commit);
    leg.at_rest();
    // Refused: more pages than the prompt has, and a span in the first attempt.
    for (room, attempt, pages) in [(2, 2, 9), (3, 1, 5)] {
        leg.submit(room, &prompt, 1);
        reserve = leg.span(&prompt, 12, pages);
        leg.message(room, attempt, Body::Reserve(reserve.clone()));
        let answer = leg.sent.iter().rfind(|message| message.room == Room(room)).unwrap();
        assert!(matches!(answer.body, Body::Refused { retryable: false, .. }), "{answer:?}");
        leg.event(Event::Cancel(Room(room)));
    }
}
