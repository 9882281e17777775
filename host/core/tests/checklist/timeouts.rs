//! How long each request waits, and what it leaves behind.

use std::time::Duration;

use host_core::message::Body;
use host_core::request::FailureCode;
use host_core::{Event, Role, Room};
use host_sim::{Leg, PEER};

use super::leg::{config, tokens};

const MILLI: Duration = Duration::from_millis(1);

#[test]
fn a_prefill_leg_waits_for_decode_as_long_as_decode_may_let_it_wait_for_pages() {
    let mut leg = Leg::with(config(Role::Prefill, 64));
    leg.submit(1, &tokens(0..16), 1);
    let timeout = config(Role::Decode, 1).request_timeout;
    assert_eq!(leg.scheduler.next_deadline().unwrap().0, timeout);
    leg.wait(timeout - MILLI);
    assert!(leg.failed.is_empty());
    leg.wait(MILLI);
    assert_eq!(leg.failed[&Room(1)].code, FailureCode::Timeout);
    leg.at_rest();
}

#[test]
fn a_decode_leg_waits_for_its_peer_as_long_as_the_bootstrap_timeout() {
    let mut leg = Leg::with(config(Role::Decode, 64));
    leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true });
    leg.submit(1, &tokens(0..16), 1);
    let timeout = config(Role::Decode, 1).bootstrap_timeout;
    leg.wait(timeout - MILLI);
    assert!(leg.failed.is_empty() && leg.reserves.is_empty());
    leg.wait(MILLI);
    assert_eq!(leg.failed[&Room(1)].code, FailureCode::Timeout);
    leg.at_rest();
}

#[test]
fn a_reserve_without_a_request_is_given_up_and_decode_told() {
    let mut leg = Leg::with(config(Role::Prefill, 64));
    let prompt = tokens(0..16);
    leg.reserve(1, &prompt, 0);
    let timeout = config(Role::Prefill, 1).bootstrap_timeout;
    leg.wait(timeout - MILLI);
    let told = |leg: &Leg| leg.sent.iter().any(|message| matches!(message.body, Body::PrefillFailed { .. }));
    assert!(!told(&leg));
    leg.wait(MILLI);
    assert!(told(&leg), "{:?}", leg.sent);
}

#[test]
fn no_request_takes_longer_than_the_request_timeout_in_whatever_stage() {
    let whole = config(Role::Decode, 1).request_timeout;
    for stage in ["queued", "transfer", "verifying", "running"] {
        println!("{stage}");
        let mut leg = Leg::with(config(Role::Decode, if stage == "queued" { 6 } else { 64 }));
        if stage == "queued" {
            // Another request has the pages. It times out too.
            leg.submit(0, &tokens(100..116), 4);
            leg.deliver(0);
        }
        leg.submit(1, &tokens(0..16), 4);
        if stage == "verifying" {
            leg.arrive(1);
        }
        if stage == "running" {
            leg.deliver(1);
        }
        assert_eq!(leg.reserves.contains_key(&Room(1)), stage != "queued");
        leg.answer_messages();
        leg.wait(whole - MILLI);
        assert!(leg.failed.is_empty(), "{:?}", leg.failed);
        leg.wait(MILLI);
        assert_eq!(leg.failed[&Room(1)].code, FailureCode::Timeout);
        match stage {
            "transfer" => leg.drained(1),
            "verifying" => {
                leg.drained(1);
                leg.verified(1, true);
            }
            _ => {}
        }
        leg.compute_all();
        leg.at_rest();
    }
}

/// A prefill worker that has sent a prompt of four pages, and how long it waits.
fn sent() -> (Leg, Duration) {
    let mut leg = Leg::with(config(Role::Prefill, 64));
    let prompt = tokens(0..16);
    leg.submit(1, &prompt, 1);
    leg.reserve(1, &prompt, 0);
    leg.compute_all();
    leg.answer_messages();
    assert!(!leg.writes.is_empty());
    (leg, config(Role::Prefill, 1).transfer_patience)
}

#[test]
fn pages_that_were_written_and_not_heard_of_end_the_request_and_decode_is_told() {
    let (mut leg, patience) = sent();
    let tags: Vec<_> = leg.writes.iter().map(|write| write.tag).collect();
    leg.wait(patience - MILLI);
    for tag in tags {
        leg.event(Event::Written { tag, error: None });
    }
    leg.wait(patience - MILLI);
    assert!(leg.failed.is_empty() && leg.stalled.is_empty(), "a write that ends is news");
    leg.wait(MILLI);
    let failure = &leg.failed[&Room(1)];
    assert_eq!((failure.code, failure.retryable), (FailureCode::Transfer, true));
    assert!(failure.message.contains("has not confirmed"), "{failure:?}");
    assert_eq!(leg.stalled, [Room(1)]);
    assert!(leg.fences.is_empty(), "nothing can land any more");
    assert!(leg.sent.iter().any(|message| matches!(message.body, Body::PrefillFailed { .. })));
    leg.answer_messages();
    leg.at_rest();
}

#[test]
fn a_write_that_does_not_end_has_its_peer_cut_off() {
    let (mut leg, patience) = sent();
    let tags: Vec<_> = leg.writes.iter().map(|write| write.tag).collect();
    leg.wait(patience);
    assert!(leg.failed[&Room(1)].message.contains("no write of KV"), "{:?}", leg.failed);
    assert_eq!((&leg.stalled[..], &leg.fences[..]), (&[Room(1)][..], &[PEER][..]));
    assert_eq!(leg.stats().quarantined_rooms, 1, "the plugin may still read its pages");
    leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true });
    assert_eq!(leg.stats().quarantined_rooms, 1, "until the write settles");
    for tag in tags {
        leg.event(Event::Written { tag, error: Some("disconnected".into()) });
    }
    leg.at_rest();
}

#[test]
fn a_write_waits_as_long_as_others_to_its_peer_end() {
    let (mut leg, patience) = sent();
    let first: Vec<_> = leg.writes.iter().map(|write| write.tag).collect();
    let other = tokens(100..116);
    leg.submit(2, &other, 1);
    leg.reserve(2, &other, 0);
    leg.compute_all();
    leg.answer_messages();
    let second: Vec<_> = leg.writes[first.len()..].iter().map(|write| write.tag).collect();
    assert!(!second.is_empty());
    leg.wait(patience - MILLI);
    // The plugin ends the first request's writes while the second one's are on their way.
    for tag in first {
        leg.event(Event::Written { tag, error: None });
    }
    leg.message(1, 1, Body::Commit);
    leg.wait(patience - MILLI);
    assert!(leg.stalled.is_empty() && leg.failed.is_empty(), "bytes flow: {:?}", leg.failed);
    leg.wait(MILLI);
    assert_eq!((&leg.stalled[..], &leg.fences[..]), (&[Room(2)][..], &[PEER][..]));
    leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true });
    for tag in second {
        leg.event(Event::Written { tag, error: Some("disconnected".into()) });
    }
    leg.wait(patience * 2);
    assert_eq!(leg.stalled.len(), 1, "said once");
    leg.at_rest();
}

#[test]
fn a_write_that_does_not_end_after_its_request_has_its_peer_cut_off() {
    for ends in [Body::Commit, Body::Abort] {
        let (mut leg, patience) = sent();
        let tags: Vec<_> = leg.writes.iter().map(|write| write.tag).collect();
        leg.message(1, 1, ends);
        assert_eq!((leg.stats().active, leg.stats().quarantined_rooms), (0, 1));
        leg.wait(patience - MILLI);
        assert!(leg.stalled.is_empty());
        leg.wait(MILLI);
        assert_eq!((&leg.stalled[..], &leg.fences[..]), (&[Room(1)][..], &[PEER][..]));
        leg.wait(patience * 2);
        assert_eq!(leg.stalled.len(), 1, "said once");
        leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true });
        for tag in tags {
            leg.event(Event::Written { tag, error: Some("disconnected".into()) });
        }
        leg.at_rest();
    }
}

#[test]
fn a_peer_that_answers_nothing_counts_as_lost() {
    let mut leg = Leg::with(config(Role::Decode, 64));
    leg.submit(1, &tokens(0..16), 1);
    let patience = config(Role::Decode, 1).peer_patience;
    leg.wait(patience - MILLI);
    assert!(leg.failed.is_empty());
    leg.wait(MILLI);
    assert_eq!(leg.failed[&Room(1)].code, FailureCode::PeerLost);
    assert_eq!(leg.stats().pool.quarantined, 4, "until the fence is proven");
    leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true });
    leg.at_rest();
}

#[test]
fn a_peer_that_answers_is_waited_for() {
    let mut leg = Leg::with(config(Role::Decode, 64));
    leg.submit(1, &tokens(0..16), 1);
    leg.answer_messages();
    leg.wait(config(Role::Decode, 1).peer_patience * 3);
    assert!(leg.failed.is_empty());
    leg.deliver(1);
    assert_eq!(leg.finished, [Room(1)]);
    leg.at_rest();
}

#[test]
fn a_peer_that_says_nothing_at_all_about_an_abort_is_cut_off_and_its_pages_are_free() {
    // The peer's end of the connection is gone, and only the peer has seen it: it ignores every message on this connection.
    let config = config(Role::Decode, 64);
    let patience = config.transfer_patience + config.peer_patience;
    let mut leg = Leg::with(config);
    leg.submit(1, &tokens(0..16), 4);
    leg.event(Event::Cancel(Room(1)));
    leg.close_rooms();
    leg.wait(patience - MILLI);
    assert!(leg.fences.is_empty() && leg.stats().pool.quarantined > 0, "it may still drain");
    leg.wait(MILLI);
    assert_eq!(leg.fences, [PEER]);
    assert!(leg.stats().pool.quarantined > 0, "the fence is not proven");
    leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true });
    leg.at_rest();
}

#[test]
fn a_peer_that_is_heard_of_has_more_time_to_drain() {
    let config = config(Role::Decode, 64);
    let patience = config.transfer_patience + config.peer_patience;
    let mut leg = Leg::with(config);
    leg.submit(1, &tokens(0..16), 4);
    leg.event(Event::Cancel(Room(1)));
    leg.close_rooms();
    leg.wait(patience - MILLI);
    leg.submit(2, &tokens(20..36), 4);
    leg.answer(2, |body| matches!(body, Body::Reserve(_)), Body::Reserved);
    leg.wait(MILLI);
    assert!(leg.fences.is_empty(), "it has answered another request");
    leg.drained(1);
    leg.deliver(2);
    leg.compute_all();
    leg.at_rest();
}
