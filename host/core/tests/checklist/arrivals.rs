//! Which arrivals a decode worker accepts.

use host_core::aux_row::AuxRow;
use host_core::integrity::{FoundData, LaneSum};
use host_core::notice::Notice;
use host_core::{Event, Role, Room, Sampled};
use host_sim::{DRAWN, Leg};

use super::leg::{config, tokens};

fn notice(room: u64, attempt: u32, sequence: u32, last: bool) -> Event {
    Event::Arrived(Notice { room: Room(room), attempt, sequence, pages: 1, last })
}

fn transferring() -> Leg {
    let mut leg = Leg::with(config(Role::Decode, 64));
    leg.submit(1, &tokens(0..18), 1);
    leg
}

#[test]
fn parts_may_come_in_any_order_and_again_and_count_once() {
    let mut leg = transferring();
    for event in
        [notice(1, 1, 2, true), notice(1, 1, 0, false), notice(1, 1, 0, false), notice(1, 1, 2, true)]
    {
        leg.event(event);
        assert!(leg.verifying.is_empty(), "part 1 is not there");
    }
    leg.event(notice(1, 1, 1, false));
    leg.event(notice(1, 1, 1, false));
    leg.verified(1, true);
    assert_eq!(leg.finished, [Room(1)]);
    // A late notice of a room that is gone.
    leg.event(notice(1, 1, 2, true));
    leg.at_rest();
}

#[test]
fn news_of_unknown_rooms_and_earlier_attempts_changes_nothing() {
    let mut leg = transferring();
    leg.event(notice(9, 1, 0, true));
    leg.event(notice(1, 7, 0, true));
    assert!(leg.verifying.is_empty());
    leg.arrive(1);
    leg.verified(1, false);
    leg.event(notice(1, 1, 0, true));
    assert!(leg.verifying.is_empty(), "the first attempt is over");
    leg.deliver(1);
    assert_eq!(leg.finished, [Room(1)]);
    leg.at_rest();
}

#[test]
fn parts_that_cannot_be_end_the_request() {
    for impossible in [
        vec![notice(1, 1, 99, false)],
        vec![notice(1, 1, 1, true), notice(1, 1, 2, false)],
        vec![notice(1, 1, 1, true), notice(1, 1, 0, true)],
    ] {
        let mut leg = transferring();
        for event in impossible {
            leg.event(event);
        }
        assert!(leg.failed[&Room(1)].message.contains("cannot have it"), "{:?}", leg.failed);
        leg.drained(1);
        leg.at_rest();
    }
}

#[test]
fn an_aux_row_of_another_room_attempt_length_or_count_is_refused() {
    let first = Sampled { token: DRAWN, logprob: None, top: Vec::new() };
    let row = AuxRow { room: Room(1), attempt: 1, prompt_tokens: 18, cached_tokens: 0, pages: 5, first };
    let lane = |found| LaneSum { source: 0, target: 0, sent: 3, found };
    let torn = {
        let mut bytes = row.encode();
        bytes[30] ^= 1;
        bytes
    };
    let wrong = [
        ("another room", AuxRow { room: Room(2), ..row.clone() }.encode()),
        ("an earlier attempt", AuxRow { attempt: 0, ..row.clone() }.encode()),
        ("another prompt", AuxRow { prompt_tokens: 17, ..row.clone() }.encode()),
        ("fewer pages", AuxRow { pages: 4, ..row.clone() }.encode()),
        ("not written yet", [0; host_core::aux_row::AUX_ROW_BYTES]),
        ("torn", torn),
    ];
    let wrong = wrong.map(|(case, aux_row)| (case, FoundData { aux_row, lanes: Some(vec![lane(3)]) }));
    let aux_row = row.encode();
    let pages = [
        ("other pages", FoundData { aux_row, lanes: Some(vec![lane(4)]) }),
        ("other pages from one rank of two", FoundData { aux_row, lanes: Some(vec![lane(3), lane(4)]) }),
        ("pages that were not looked at", FoundData { aux_row, lanes: Some(Vec::new()) }),
    ];
    for (case, found) in wrong.into_iter().chain(pages) {
        let mut leg = transferring();
        leg.arrive(1);
        leg.event(Event::Verified { room: Room(1), attempt: 1, found: Box::new(found) });
        assert_eq!(leg.reserves[&Room(1)].0, 2, "{case} was accepted");
        assert_eq!((leg.stats().integrity_failures, leg.stats().pool.cached), (1, 0), "{case}");
    }
    let mut leg = transferring();
    leg.arrive(1);
    let found = Box::new(FoundData { aux_row: row.encode(), lanes: Some(vec![lane(3), lane(3)]) });
    leg.event(Event::Verified { room: Room(1), attempt: 1, found });
    assert_eq!(leg.finished, [Room(1)]);
}

#[test]
fn an_aux_slot_is_not_given_away_while_a_peer_may_write_it() {
    let mut leg = Leg::with(host_core::Config { max_running: 2, ..super::leg::config(Role::Decode, 64) });
    leg.submit(1, &tokens(0..4), 1);
    let slot = leg.reserves[&Room(1)].1.aux_slot;
    leg.event(Event::Cancel(Room(1)));
    leg.submit(2, &tokens(100..104), 1);
    leg.submit(3, &tokens(200..204), 1);
    assert_ne!(leg.reserves[&Room(2)].1.aux_slot, slot);
    assert!(!leg.reserves.contains_key(&Room(3)), "no slot is left");
    leg.drained(1);
    assert_eq!(leg.reserves[&Room(3)].1.aux_slot, slot);
}
