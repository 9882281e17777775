//! A transfer backend that does not prove that writes have settled: the scheduler fences the peer of a transfer that ends early,
//! and frees none of its pages before.

use host_core::message::Body;
use host_core::transfer::Tag;
use host_core::{Action, Config, Event, Instance, Role, Room};
use host_sim::{Leg, PEER};

const PAGES: usize = 12;

fn worker(role: Role) -> Leg {
    Leg::with(Config { settles: false, reserved_decode_tokens: 1, ..host_sim::config(role, PAGES as u32) })
}

/// Lets decode offer pages for the prompt of a request, and computes one batch of the prompt.
fn send_first_part(leg: &mut Leg, room: u64) -> Tag {
    let prompt = [1; 12];
    let request = leg.request(room, &prompt, 1);
    leg.after(Event::Submit(request));
    let reserve = leg.span(&prompt, 0, 3);
    let asked = leg.said(room, 1, Body::Reserve(reserve));
    leg.after(asked);
    let before = leg.writes.len();
    leg.step();
    assert_eq!(leg.writes.len(), before + 1, "two of three pages are computed, and sent");
    leg.writes[before].tag
}

fn fences(actions: &[Action]) -> usize {
    actions.iter().filter(|action| matches!(action, Action::Fence { peer: PEER, .. })).count()
}

fn fenced() -> Event {
    Event::PeerLost { peer: PEER, session: 1, fenced: true }
}

#[test]
fn pages_that_an_aborted_transfer_reads_wait_for_the_fence_however_its_writes_end() {
    for write_ends_first in [true, false] {
        for said in [false, true] {
            let mut leg = worker(Role::Prefill);
            let tag = send_first_part(&mut leg, 1);
            // The client leaves: its router tells this worker, or the decode worker does.
            let actions = match said {
                false => leg.after(Event::Cancel(Room(1))),
                true => {
                    let abort = leg.said(1, 1, Body::Abort);
                    leg.after(abort)
                }
            };
            assert_eq!(fences(&actions), 1, "{actions:?}");
            assert_eq!(leg.stats().pool.quarantined, 3);
            let written = Event::Written { tag, error: None };
            let ends = if write_ends_first { [written, fenced()] } else { [fenced(), written] };
            for (at, event) in ends.into_iter().enumerate() {
                leg.after(event);
                let free = if at == 1 { PAGES } else { PAGES - 3 };
                assert_eq!(leg.stats().pool.free, free, "write first: {write_ends_first}, event {at}");
            }
        }
    }
}

#[test]
fn writes_that_had_all_settled_prove_nothing_of_a_transfer_that_ends_early() {
    let mut leg = worker(Role::Prefill);
    let tag = send_first_part(&mut leg, 1);
    leg.hear(Event::Written { tag, error: None });
    let abort = leg.said(1, 1, Body::Abort);
    assert_eq!(fences(&leg.after(abort)), 1);
    let drained = |leg: &Leg| leg.sent.iter().any(|message| message.body == Body::Drained);
    assert!(leg.stats().pool.quarantined == 3 && !drained(&leg), "decode would use its pages again");
    leg.after(Event::FenceFailed { peer: PEER, session: 1 });
    assert!(leg.stats().pool.quarantined == 3 && !drained(&leg));
    leg.after(fenced());
    assert!(leg.stats().pool.free == PAGES && drained(&leg));
}

#[test]
fn a_fence_takes_the_other_transfers_to_the_peer_along_with_a_reason_and_fences_once() {
    let mut leg = worker(Role::Prefill);
    send_first_part(&mut leg, 1);
    leg.now = leg.now.after(std::time::Duration::from_millis(1));
    send_first_part(&mut leg, 2);
    let actions = leg.after(Event::Cancel(Room(1)));
    assert_eq!(fences(&actions), 1);
    let failure = &leg.failed[&Room(2)];
    assert!(
        failure.retryable && failure.message.contains("was cut: a transfer over it ended early"),
        "{failure:?}"
    );
    assert!(failure.message.contains(&Instance::to_string(&PEER)));
}

#[test]
fn a_transfer_of_which_nothing_was_sent_or_that_is_complete_fences_no_peer() {
    let mut leg = worker(Role::Prefill);
    let prompt = [1; 12];
    let request = leg.request(1, &prompt, 1);
    leg.after(Event::Submit(request));
    let asked = leg.said(1, 1, Body::Reserve(leg.span(&prompt, 0, 3)));
    leg.after(asked);
    assert_eq!(fences(&leg.after(Event::Cancel(Room(1)))), 0, "nothing was sent");
    leg.step();
    let first = send_first_part(&mut leg, 2);
    leg.step();
    let last = leg.writes[leg.writes.len() - 1].tag;
    assert_ne!(first, last);
    leg.after(Event::Written { tag: first, error: None });
    let commit = leg.said(2, 1, Body::Commit);
    let actions = leg.after(commit);
    assert_eq!(fences(&actions), 0, "everything has arrived");
    assert!(!actions.iter().any(|action| matches!(action, Action::CancelWrite(_))), "{actions:?}");
    leg.after(Event::Written { tag: last, error: None });
    assert_eq!(leg.stats().pool.free, PAGES);
}

#[test]
fn a_decode_worker_reserves_whole_answers_and_preempts_none() {
    // Each request takes 5 of the 12 pages with its whole answer.
    let mut leg = worker(Role::Decode);
    for room in 1..=3 {
        let request = leg.request(room, &[1; 8], 12);
        leg.after(Event::Submit(request));
    }
    assert_eq!(leg.stats().active, 2, "the third waits for one of the others to end");
    for room in 1..=2 {
        leg.deliver(room);
    }
    while leg.finished.len() < 2 {
        leg.step();
    }
    assert_eq!((leg.stats().retractions, leg.failed.len()), (0, 0));
    assert_eq!(leg.stats().active, 1);
}

#[test]
#[should_panic(expected = "cached pages outlive a transfer")]
fn there_is_no_radix_cache() {
    let radix_cache = Some(host_core::radix::Policy::Lru);
    let _worker = Leg::with(Config { settles: false, radix_cache, ..host_sim::config(Role::Decode, 8) });
}
