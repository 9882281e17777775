//! Ends and limits of senders and rings.

use host_core::Room;
use host_core::staging::message::{Answer, Refusal, Verdict};
use host_core::staging::{Arrival, Fault, LaneError, PeerRank, RingAction, Sender, Target};
use host_core::transfer::Tag;

use crate::fixture::*;

#[test]
fn a_new_life_of_either_side_takes_nothing_from_the_old_one() {
    let mut sender = Sender::new(BYTES);
    add(&mut sender, lane(1, 1, 0, target(0), 2));
    grant(&mut sender, 0, key(1, 0, 0), 0);
    let (_, written) = gather(&mut sender).unwrap();
    let mut actions = Vec::new();
    sender.peer_lost(at(3), DECODE, 1, &mut actions);
    let said = done(actions);
    assert_eq!((said.cancelled, said.ended.len()), (vec![written.id], 0), "the write has not settled");
    assert_eq!(settle(&mut sender, written.id).ended, [(Tag(1), target(0), Some(Fault::PeerLost))]);
    // The next connection to the same peer: answers of the previous connection are ignored, and its own answers count.
    let next = Target { session: 2, ..target(0) };
    add(&mut sender, lane(2, 2, 0, next, 1));
    grant(&mut sender, 0, key(1, 0, 1), 0);
    assert!(gather(&mut sender).is_none());
    let mut actions = Vec::new();
    sender.peer_lost(at(4), DECODE, 1, &mut actions);
    assert!(actions.is_empty(), "late news of the old one");
    grant(&mut sender, 0, key(2, 0, 0), 0);
    assert_eq!(gather(&mut sender).unwrap().1.target, next);
    // The ring of a worker's next instance knows no ask and no notice of the previous instance.
    let mut ring = ring(&[]);
    assert_eq!(verdict(&mut ring, key(1, 0, 0), span(0..16)), Verdict::Refused(Refusal::Gone));
    assert_eq!(ring.arrived(source(0), key(1, 0, 0), 1, key(1, 0, 0)), Arrival::Unknown);
}

#[test]
fn a_room_is_closed_only_when_its_last_copy_has_ended() {
    let mut ring = ring(&[(1, 100)]);
    let (_, generation) = granted(verdict(&mut ring, key(1, 0, 0), span(0..16)));
    ring.arrived(source(0), key(1, 0, 0), generation, key(1, 0, 0));
    let scatter = ring.next_scatter().unwrap();
    let mut actions = Vec::new();
    ring.close(Room(1), &mut actions);
    assert_eq!(actions, [], "still copying");
    assert!(!ring.scattered(scatter.id, &mut actions), "the piece is not reported");
    assert_eq!(actions, [RingAction::Closed(Room(1))]);
    // Rooms that the ring does not know count as closed.
    let mut actions = Vec::new();
    ring.close(Room(5), &mut actions);
    assert_eq!(actions, [RingAction::Closed(Room(5))]);
}

#[test]
fn a_part_that_is_asked_for_again_while_it_is_sent_ends_well() {
    let mut ring = ring(&[(1, 100)]);
    let mut sender = Sender::new(BYTES);
    let asks = add(&mut sender, lane(1, 1, 0, target(0), 2)).asks;
    // Decode gives the attempt up before its asks arrive, and before prefill hears of the next attempt.
    ring.open(opening(1, 2, 100), &mut Vec::new());
    let mut ended = Vec::new();
    for (_, ask) in asks {
        let verdict = verdict(&mut ring, ask.key, ask.span);
        ended.extend(hear(&mut sender, 0, ask.key, verdict).ended);
    }
    assert_eq!(ended, [(Tag(1), target(0), None)]);
    assert!(sender.idle());
    assert_eq!((ring.slots().count(), ring.stats().refused), (0, 0));
}

#[test]
fn a_sender_that_waits_for_a_slot_in_an_attempt_is_told_at_once_when_the_next_begins() {
    let mut ring = ring(&[(1, 1000), (2, 1000)]);
    for piece in 0..4 {
        let first = u32::from(piece) * 16;
        ask(&mut ring, source(0), key(2, 0, piece), span(first..first + 16));
    }
    let mut sender = Sender::new(BYTES);
    let mut waiting = Vec::new();
    for (_, ask) in add(&mut sender, lane(1, 1, 0, target(0), 4)).asks {
        let verdict = verdict(&mut ring, ask.key, ask.span);
        waiting.extend((verdict == Verdict::Wait).then_some(ask.key));
        hear(&mut sender, 0, ask.key, verdict);
    }
    while let Some((_, written)) = gather(&mut sender) {
        settle(&mut sender, written.id);
    }
    assert!(!waiting.is_empty() && !sender.idle());
    let mut actions = Vec::new();
    ring.open(opening(1, 2, 1000), &mut actions);
    let said = said(actions);
    assert_eq!(said.iter().map(|(to, answer)| (*to, answer.key)).collect::<Vec<_>>(), {
        waiting.iter().map(|key| (source(0), *key)).collect::<Vec<_>>()
    });
    // Prefill begins the next attempt when the part has ended. These answers end it.
    let ended = said.iter().flat_map(|(_, answer)| hear(&mut sender, 0, answer.key, answer.verdict).ended);
    assert_eq!(ended.collect::<Vec<_>>(), [(Tag(1), target(0), None)]);
    assert!(sender.idle());
    assert_eq!(ring.stats().waiting, 0);
}

#[test]
fn nothing_to_send_is_sent_at_once_and_what_cannot_be_staged_is_said() {
    let mut sender = Sender::new(BYTES);
    assert_eq!(add(&mut sender, lane(1, 1, 0, target(0), 0)).ended, [(Tag(1), target(0), None)]);
    let mut actions = Vec::new();
    let mut of_no_bytes = lane(1, 1, 0, target(0), 1);
    of_no_bytes.pieces[0].bytes = 0;
    assert_eq!(sender.add(at(0), of_no_bytes, &mut actions), Err(LaneError::PieceBytes(0, BYTES)));
    let mut too_long = lane(1, 1, 0, target(0), 1);
    too_long.pieces[0].bytes = 1025;
    assert_eq!(sender.add(at(0), too_long, &mut actions), Err(LaneError::PieceBytes(1025, BYTES)));
    let too_many = lane(1, 1, 0, target(0), 65_535);
    assert_eq!(sender.add(at(0), too_many, &mut actions), Err(LaneError::TooMany(65_535)));
    add(&mut sender, lane(1, 1, 0, target(0), 1));
    let repeated = sender.add(at(0), lane(2, 1, 0, target(0), 1), &mut actions);
    assert_eq!(repeated, Err(LaneError::Repeated(0, Room(1))));
    assert!(actions.is_empty());
    // A slot that ends behind the target's memory.
    let said = grant(&mut sender, 0, key(1, 0, 0), BYTES - 511);
    assert_eq!(said.ended, [(Tag(1), target(0), Some(Fault::Outside))]);
    assert!(sender.idle());
}

#[test]
fn a_room_with_a_long_prompt_leaves_credits_and_turns_to_the_next() {
    let mut sender = Sender::new(BYTES);
    assert_eq!(add(&mut sender, lane(1, 1, 0, target(0), 500)).asks.len(), 4);
    for room in 2..20 {
        let asks = add(&mut sender, lane(room, room, 0, target(0), 500)).asks;
        let most = 64usize.saturating_sub(4 * (room as usize - 1)).min(4);
        assert_eq!(asks.len(), most, "room {room}");
    }
    // The first room that gets credits back shares them with rooms that have none.
    (0..4).for_each(|piece| drop(grant(&mut sender, 0, key(1, 0, piece), u64::from(piece) * 512)));
    let mut rooms = Vec::new();
    for _ in 0..4 {
        let mut actions = Vec::new();
        sender.next_gather(at(1), &mut actions).unwrap();
        rooms.extend(done(actions).asks.iter().map(|(_, ask)| ask.key.room.0));
    }
    rooms.sort_unstable();
    assert!(rooms.ends_with(&[17, 18, 19]), "{rooms:?}");
}

#[test]
fn a_part_that_is_cancelled_while_it_is_gathered_is_not_written() {
    let mut sender = Sender::new(BYTES);
    add(&mut sender, lane(1, 1, 0, target(0), 1));
    grant(&mut sender, 0, key(1, 0, 0), 0);
    let mut actions = Vec::new();
    let gather = sender.next_gather(at(1), &mut actions).unwrap();
    sender.cancel(at(1), Tag(1), &mut actions);
    assert!(actions.is_empty(), "its memory is being written");
    sender.gathered(gather.id, &mut actions);
    let said = done(actions);
    assert_eq!((said.writes, said.ended), (vec![], vec![(Tag(1), target(0), Some(Fault::Cancelled))]));
    assert!(sender.idle());
}

#[test]
fn a_target_whose_wire_is_slow_leaves_memory_to_the_others() {
    let mut sender = Sender::new(BYTES);
    let mut offset = 0;
    for room in 1..5 {
        add(&mut sender, lane(room, room, 0, target(0), 4));
        (0..4).for_each(|piece| {
            grant(&mut sender, 0, key(room, 0, piece), offset);
            offset += 512;
        });
    }
    offset = 0;
    while gather(&mut sender).is_some() {}
    add(&mut sender, lane(9, 9, 0, target(1), 1));
    grant(&mut sender, 1, key(9, 0, 0), offset);
    assert_eq!(gather(&mut sender).unwrap().1.target, target(1));
}

#[test]
fn a_grant_that_waited_for_a_slot_says_nothing_of_the_round_trip() {
    let mut sender = Sender::new(BYTES);
    add(&mut sender, lane(1, 1, 0, target(0), 5));
    let from = PeerRank { peer: DECODE, rank: 0 };
    let mut actions = Vec::new();
    for (time, verdict) in [(1, Verdict::Wait), (19, Verdict::Grant { offset: 0, generation: 1 })] {
        let answer = Answer { key: key(1, 0, 0), repeat: 0, verdict };
        sender.heard(at(time), from, &answer, &mut actions);
    }
    // The fifth piece is asked for when the first one is gathered, and its ask is repeated after the shortest wait.
    sender.next_gather(at(19), &mut actions).unwrap();
    let mut repeats = 0;
    for time in 19..30 {
        let mut actions = Vec::new();
        sender.tick(at(time), &mut actions);
        repeats += done(actions).asks.iter().filter(|(_, ask)| ask.key.piece == 4).count();
    }
    assert_eq!(repeats, 1);
}
