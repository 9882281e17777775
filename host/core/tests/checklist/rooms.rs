//! Pages into which decode's own threads may copy arrived data.

use std::collections::BTreeMap;

use host_core::message::Body;
use host_core::{Event, Role, Room};
use host_sim::{Leg, PEER};

use super::leg::{config, tokens};

/// A decode leg that is told when rooms are closed, and whose one request waits for its pages.
fn transferring() -> Leg {
    let mut leg = Leg::with(config(Role::Decode, 8));
    leg.closes = false;
    leg.submit(1, &tokens(0..18), 1);
    leg
}

fn quarantined(leg: &Leg) -> usize {
    leg.stats().pool.quarantined
}

#[test]
fn a_room_is_open_before_its_pages_are_asked_for_and_until_they_are_verified() {
    let mut leg = transferring();
    assert_eq!(leg.open, BTreeMap::from([(Room(1), 1)]));
    leg.arrive(1);
    assert_eq!(leg.open.len(), 1, "its pages have not been looked at");
    leg.verified(1, false);
    assert_eq!(leg.open, BTreeMap::from([(Room(1), 2)]), "opened again for the second attempt");
    leg.deliver(1);
    assert!(leg.open.is_empty() && leg.closing.is_empty());
    assert_eq!(leg.finished, [Room(1)]);
    leg.at_rest();
}

#[test]
fn pages_of_a_cancelled_room_wait_for_its_closing_and_for_prefill_in_any_order() {
    for closes_first in [true, false] {
        let mut leg = transferring();
        leg.event(Event::Cancel(Room(1)));
        assert_eq!(leg.closing, [Room(1)], "asked with the abort, not after it");
        assert!(leg.sent.iter().any(|message| message.body == Body::Abort));
        for closes in [closes_first, !closes_first] {
            assert_eq!((quarantined(&leg), leg.open.len()), (5, 1));
            match closes {
                true => leg.close_rooms(),
                false => leg.drained(1),
            }
        }
        leg.at_rest();
    }
}

#[test]
fn a_proven_fence_frees_no_page_into_which_we_still_copy() {
    let mut leg = transferring();
    leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true });
    assert_eq!((quarantined(&leg), leg.open.len()), (5, 1), "what arrived may still be copied");
    leg.close_rooms();
    leg.at_rest();
}

#[test]
fn a_request_that_prefill_gave_up_closes_its_room() {
    let mut leg = transferring();
    let body = Body::PrefillFailed { message: "no".into(), retryable: false };
    leg.message(1, 1, body);
    leg.drained(1);
    assert_eq!(quarantined(&leg), 5);
    leg.close_rooms();
    leg.at_rest();
}

#[test]
fn a_room_given_up_while_it_is_verified_is_closed_too() {
    let mut leg = transferring();
    leg.arrive(1);
    leg.event(Event::Cancel(Room(1)));
    leg.verified(1, true);
    leg.drained(1);
    assert_eq!((quarantined(&leg), leg.closing.len()), (5, 1));
    leg.close_rooms();
    leg.at_rest();
}

#[test]
fn the_last_damaged_attempt_closes_the_room() {
    let mut leg = transferring();
    for _ in 0..2 {
        leg.arrive(1);
        leg.verified(1, false);
    }
    assert_eq!((leg.failed.len(), leg.closing.len()), (1, 1));
    leg.drained(1);
    assert_eq!(quarantined(&leg), 5);
    leg.close_rooms();
    leg.at_rest();
}

#[test]
fn late_repeated_and_foreign_news_of_closed_rooms_changes_nothing() {
    let mut leg = transferring();
    leg.event(Event::RoomClosed { room: Room(1) });
    leg.event(Event::RoomClosed { room: Room(9) });
    leg.event(Event::Cancel(Room(1)));
    leg.event(Event::RoomClosed { room: Room(9) });
    leg.drained(1);
    assert_eq!(quarantined(&leg), 5, "closed before it was asked for, or another room");
    leg.close_rooms();
    leg.event(Event::RoomClosed { room: Room(1) });
    leg.at_rest();
}

#[test]
fn only_decode_opens_rooms() {
    let mut leg = Leg::with(config(Role::Prefill, 8));
    leg.submit(1, &tokens(0..18), 1);
    leg.reserve(1, &tokens(0..18), 0);
    leg.compute_all();
    leg.settle();
    leg.message(1, 1, Body::Commit);
    assert!(leg.open.is_empty() && leg.finished == [Room(1)]);
    leg.at_rest();
}
