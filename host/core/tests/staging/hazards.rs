//! Hazards of staged transfers in other systems, one by one. Each test shows that the hazard cannot occur here, or why it does not
//! exist.

use host_core::staging::message::{Answer, Refusal, Verdict};
use host_core::staging::{
    Arrival, Fault, Key, Opening, PeerRank, Ring, RingAction, Sender, Span, Target, Written,
};
use host_core::transfer::Tag;
use host_core::{Instance, Room, Time};
use host_sim::Random;

use crate::fixture::*;

#[test]
fn h1_a_target_that_is_not_ready_causes_no_second_write_to_the_others() {
    let mut sender = Sender::new(BYTES);
    add(&mut sender, lane(1, 1, 0, target(0), 1));
    add(&mut sender, lane(1, 1, 0, target(1), 1));
    // Rank 1 has no free slot. Rank 0's piece is written once, however often its grant arrives and however much time passes.
    hear(&mut sender, 1, key(1, 0, 0), Verdict::Wait);
    grant(&mut sender, 0, key(1, 0, 0), 64);
    let (_, written) = gather(&mut sender).unwrap();
    assert_eq!(written.target, target(0));
    for _ in 0..3 {
        grant(&mut sender, 0, key(1, 0, 0), 64);
        assert!(gather(&mut sender).is_none());
    }
    assert_eq!(settle(&mut sender, written.id).ended, [(Tag(1), target(0), None)]);
    for time in 0..100 {
        let mut actions = Vec::new();
        sender.tick(at(time * 100), &mut actions);
        assert!(done(actions).asks.iter().all(|(to, _)| *to == target(1)), "rank 0 has everything");
        grant(&mut sender, 0, key(1, 0, 0), 64);
        assert!(gather(&mut sender).is_none());
    }
}

#[test]
fn h2_a_notice_that_comes_twice_is_one_arrival_and_ranks_are_told_apart() {
    let mut ring = ring(&[(1, 100)]);
    let (_, generation) = granted(verdict(&mut ring, key(1, 0, 0), span(0..16)));
    let other = ask(&mut ring, source(1), key(1, 0, 0), span(0..16))[0].1.verdict;
    let (_, other) = granted(other);
    assert_ne!(other, generation, "the same piece of another rank has its own slot");
    assert_eq!(ring.arrived(source(1), key(1, 0, 0), generation, key(1, 0, 0)), Arrival::Unknown);
    deliver(&mut ring, key(1, 0, 0), generation);
    assert_eq!(ring.arrived(source(0), key(1, 0, 0), generation, key(1, 0, 0)), Arrival::Repeated);
    assert!(ring.next_scatter().is_none());
    assert_eq!(ring.arrived(source(1), key(1, 0, 0), other, key(1, 0, 0)), Arrival::Taken);
}

#[test]
fn h3_a_lost_question_or_answer_costs_a_repeat_and_no_more() {
    let mut ring = ring(&[(1, 100)]);
    let mut sender = Sender::new(BYTES);
    let first = add(&mut sender, lane(1, 1, 0, target(0), 1));
    assert_eq!(first.asks.len(), 1, "and lost");
    assert_eq!(sender.next_deadline(), Some(at(20)), "nothing was measured yet");
    let mut waits = Vec::new();
    let mut answer = None;
    for lost in [true, true, false] {
        let due = sender.next_deadline().unwrap();
        waits.push(due);
        let mut actions = Vec::new();
        sender.tick(due, &mut actions);
        let (_, again) = done(actions).asks[0].clone();
        let mut actions = Vec::new();
        ring.request_slot(source(0), &again, &mut actions);
        // Each answer has the same slot.
        let said = said(actions)[0].1;
        assert!(answer.is_none_or(|earlier| earlier == said.verdict));
        answer = Some(said.verdict);
        if !lost {
            let mut actions = Vec::new();
            sender.heard(due, PeerRank { peer: DECODE, rank: 0 }, &said, &mut actions);
        }
    }
    assert_eq!(waits, [at(20), at(60), at(140)], "further and further apart");
    assert!(gather(&mut sender).is_some());
    assert_eq!(ring.slots().count(), 1);
}

#[test]
fn h4_a_question_that_comes_after_its_piece_pins_no_slot() {
    let mut ring = ring(&[(1, 100)]);
    let (_, generation) = granted(verdict(&mut ring, key(1, 0, 0), span(0..16)));
    deliver(&mut ring, key(1, 0, 0), generation);
    assert_eq!(verdict(&mut ring, key(1, 0, 0), span(0..16)), Verdict::Done);
    assert_eq!(ring.stats().bytes_in_use, 0);
    // A sender that asks for a piece that has arrived continues.
    let mut sender = Sender::new(BYTES);
    add(&mut sender, lane(1, 1, 0, target(0), 1));
    let said = hear(&mut sender, 0, key(1, 0, 0), Verdict::Done);
    assert_eq!(said.ended, [(Tag(1), target(0), None)]);
    assert!(sender.idle());
}

#[test]
fn h5_numbers_out_of_bounds_are_refused_and_cost_no_memory() {
    let mut ring = ring(&[(1, 100)]);
    let malformed = Verdict::Refused(Refusal::Malformed);
    for span in [
        Span { pages: 99..101, ..span(0..2) },
        Span { pages: u32::MAX - 1..u32::MAX, ..span(0..1) },
        Span { layers: 1..3, ..span(0..1) },
        Span { heads: 1..3, ..span(0..1) },
        Span { pages: 5..5, bytes: 0, ..span(0..1) },
        Span { pages: std::ops::Range { start: 5, end: 4 }, ..span(0..1) },
        Span { bytes: 31, ..span(0..1) },
        Span { pages: 0..100, layers: 0..2, heads: 0..2, bytes: u32::MAX },
    ] {
        assert_eq!(verdict(&mut ring, key(1, u32::MAX, u16::MAX), span.clone()), malformed, "{span:?}");
    }
    assert_eq!(ask(&mut ring, source(2), key(1, 0, 0), span(0..1))[0].1.verdict, malformed, "no such lane");
    assert_eq!(verdict(&mut ring, key(1, 0, 0), span(0..33)), Verdict::Refused(Refusal::TooLong));
    let gone = Verdict::Refused(Refusal::Gone);
    assert_eq!(verdict(&mut ring, key(2, 0, 0), span(0..1)), gone, "unknown room");
    assert_eq!(verdict(&mut ring, Key { attempt: 2, ..key(1, 0, 0) }, span(0..1)), gone, "unknown attempt");
    let stranger = PeerRank { peer: Instance(8), rank: 0 };
    assert_eq!(ask(&mut ring, stranger, key(1, 0, 0), span(0..1))[0].1.verdict, gone, "another peer's room");
    assert_eq!((ring.slots().count(), ring.stats().waiting), (0, 0));
    // A peer that invents parts and pieces gets no more of them than the room has bytes.
    let mut taken = 0;
    for sequence in 0..1000 {
        taken += u32::from(
            verdict(&mut ring, key(1, sequence, 0), span(0..1)) != Verdict::Refused(Refusal::TooMany),
        );
    }
    assert_eq!(taken, 100);
    // A piece whose span changes is malformed.
    assert_eq!(verdict(&mut ring, key(1, 0, 0), span(1..2)), malformed);
}

#[test]
fn h6_peers_that_are_gone_leave_no_trace_and_are_told_nothing() {
    // Peers do not subscribe: a ring only answers asks. So nothing is left when rooms are forgotten.
    let mut ring = ring(&[]);
    for room in 0..1000 {
        ring.open(opening(room, 1, 100), &mut Vec::new());
        (0..4).for_each(|piece| drop(ask(&mut ring, source(0), key(room, 0, piece), span(0..16))));
        let mut actions = Vec::new();
        ring.close(Room(room), &mut actions);
        ring.forget(Room(room), &mut actions);
        assert_eq!(said(actions), []);
    }
    assert_eq!((ring.rooms(), ring.slots().count(), ring.stats().waiting), (0, 0, 0));
    // The same for the sender.
    let mut sender = Sender::new(BYTES);
    for peer in 0..1000 {
        let to = Target { peer: Instance(peer), ..target(0) };
        add(&mut sender, lane(peer, peer, 0, to, 4));
        let mut actions = Vec::new();
        sender.peer_lost(at(1), Instance(peer), 1, &mut actions);
        assert_eq!(done(actions).ended, [(Tag(peer), to, Some(Fault::PeerLost))]);
    }
    assert!(sender.idle() && sender.next_deadline().is_none());
}

#[test]
fn h7_rooms_that_stand_still_leave_slots_for_others() {
    let mut ring = ring(&[(1, 1000), (2, 1000), (3, 1000), (4, 1000)]);
    // Three rooms take all slots that they can get, and write nothing.
    for room in 1..4 {
        (0..64).for_each(|piece| drop(ask(&mut ring, source(0), key(room, 0, piece), span(0..8))));
    }
    let held = ring.stats().bytes_in_use;
    assert!(held < BYTES, "{held}");
    for piece in 0..100 {
        let (_, generation) = granted(verdict(&mut ring, key(4, 0, piece), span(0..8)));
        assert_eq!(deliver(&mut ring, key(4, 0, piece), generation), [], "the others have their shares");
    }
    // No slot was taken away: the slow rooms still hold theirs.
    assert_eq!(ring.stats().bytes_in_use, held);
}

/// Lets rooms 1 to 8, each of its own peer, ask for more small pieces than there is memory for. Returns the slots they got.
fn crowded(ring: &mut Ring<Key>) -> Vec<(PeerRank, Key, u32)> {
    let mut live = Vec::new();
    for room in 1..9 {
        ring.open(Opening { peer: Instance(room), ..opening(room, 1, 100_000) }, &mut Vec::new());
    }
    for (room, piece) in (0..16).flat_map(|piece| (1..9).map(move |room| (room, piece))) {
        more(ring, room, piece, &mut live);
    }
    assert!(ring.stats().bytes_in_use > BYTES - 512 && ring.stats().waiting > 20);
    live
}

fn more(ring: &mut Ring<Key>, room: u64, piece: u16, live: &mut Vec<(PeerRank, Key, u32)>) {
    let from = PeerRank { peer: Instance(room), rank: 0 };
    let first = u32::from(piece) * 2;
    let answers = ask(ring, from, key(room, 0, piece), span(first..first + 2));
    live.extend(grants(answers));
}

fn grants(answers: Vec<(PeerRank, Answer)>) -> impl Iterator<Item = (PeerRank, Key, u32)> {
    answers.into_iter().filter_map(|(to, answer)| match answer.verdict {
        Verdict::Grant { generation, .. } => Some((to, answer.key, generation)),
        _ => None,
    })
}

/// Replaces small pieces at random places. Returns how many were replaced until room 9 got a slot.
fn turn_over(seed: u64, ring: &mut Ring<Key>, live: &mut Vec<(PeerRank, Key, u32)>) -> u32 {
    let mut random = Random::new(seed);
    for turn in 0..1000 {
        let (from, key, generation) = live.swap_remove(random.below(live.len() as u64) as usize);
        assert_eq!(ring.arrived(from, key, generation, key), Arrival::Taken);
        let scatter = ring.next_scatter().unwrap();
        let mut actions = Vec::new();
        ring.scattered(scatter.id, &mut actions);
        let granted: Vec<_> = grants(said(actions)).collect();
        if granted.iter().any(|(_, key, _)| key.room == Room(9)) {
            return turn;
        }
        live.extend(granted);
        more(ring, key.room.0, 16 + (turn / 8) as u16 + turn as u16 * 8, live);
    }
    panic!("seed {seed}: starved");
}

#[test]
fn h7_a_large_piece_is_not_starved_by_small_ones() {
    for seed in 0..50 {
        let mut ring = ring(&[]);
        let mut live = crowded(&mut ring);
        // Some of the slots are never written.
        live.drain(..8);
        ring.open(Opening { peer: Instance(9), ..opening(9, 1, 1000) }, &mut Vec::new());
        let from = PeerRank { peer: Instance(9), rank: 0 };
        assert_eq!(ask(&mut ring, from, key(9, 0, 0), span(0..32))[0].1.verdict, Verdict::Wait);
        turn_over(seed, &mut ring, &mut live);
    }
}

#[test]
fn h7_memory_that_is_kept_free_for_a_room_is_free_to_all_again_when_the_room_ends() {
    let mut ring = ring(&[]);
    let mut live = crowded(&mut ring);
    for room in [10, 9] {
        ring.open(Opening { peer: Instance(room), ..opening(room, 1, 1000) }, &mut Vec::new());
        let from = PeerRank { peer: Instance(room), rank: 0 };
        assert_eq!(ask(&mut ring, from, key(room, 0, 0), span(0..32))[0].1.verdict, Verdict::Wait);
    }
    let in_use = |ring: &Ring<Key>| ring.stats().bytes_in_use;
    let full = in_use(&ring);
    let mut random = Random::new(1);
    while in_use(&ring) > full - 512 {
        let (from, key, generation) = live.swap_remove(random.below(live.len() as u64) as usize);
        ring.arrived(from, key, generation, key);
        let scatter = ring.next_scatter().unwrap();
        let mut actions = Vec::new();
        ring.scattered(scatter.id, &mut actions);
        live.extend(grants(said(actions)));
    }
    // A range of memory is kept free for room 10. Room 10 gives up, and room 9 is next to get a slot.
    let mut actions = Vec::new();
    ring.close(Room(10), &mut actions);
    live.extend(grants(said(actions)));
    turn_over(1, &mut ring, &mut live);
}

#[test]
fn h8_slots_of_a_closed_room_are_not_given_away_until_it_is_forgotten() {
    let mut ring = ring(&[(1, 1000), (2, 1000)]);
    let first = granted(verdict(&mut ring, key(1, 0, 0), span(0..16)));
    let second = granted(verdict(&mut ring, key(1, 0, 1), span(16..32)));
    assert_eq!(ring.arrived(source(0), key(1, 0, 1), second.1, key(1, 0, 1)), Arrival::Taken);
    let mut actions = Vec::new();
    ring.close(Room(1), &mut actions);
    assert_eq!(actions, [RingAction::Closed(Room(1))]);
    assert!(ring.next_scatter().is_none(), "its pages may be another request's soon");
    // A late write lands in a slot that still belongs to its room, and its notice is ignored.
    for piece in 0..64 {
        for (_, answer) in ask(&mut ring, source(0), key(2, 0, piece), span(0..8)) {
            if let Verdict::Grant { offset, .. } = answer.verdict {
                assert!([first, second].iter().all(|(at, _)| offset + 256 <= *at || at + 512 <= offset));
            }
        }
    }
    assert_eq!(ring.arrived(source(0), key(1, 0, 0), first.1, key(1, 0, 0)), Arrival::Unknown);
    let held = ring.stats().bytes_in_use;
    let mut actions = Vec::new();
    ring.forget(Room(1), &mut actions);
    assert!(!said(actions).is_empty(), "what waited gets them");
    assert!(ring.slots().all(|(room, ..)| room == Room(2)));
    assert!(held <= BYTES);
    // A room need not be closed to be forgotten.
    ring.forget(Room(1), &mut Vec::new());
    let mut other = self::ring(&[(1, 100)]);
    granted(verdict(&mut other, key(1, 0, 0), span(0..16)));
    other.forget(Room(1), &mut Vec::new());
    assert_eq!((other.rooms(), other.stats().bytes_in_use), (0, 0));
    // A notice that names another generation of the slot is ignored too.
    let again = granted(verdict(&mut ring, key(2, 0, 0), span(0..8)));
    assert_eq!(ring.arrived(source(0), key(2, 0, 0), again.1 + 1, key(2, 0, 0)), Arrival::Unknown);
}

#[test]
fn h8_slots_of_an_earlier_attempt_are_free_when_their_sender_asks_within_the_next() {
    let mut ring = ring(&[(1, 1000)]);
    let lost = granted(verdict(&mut ring, key(1, 0, 0), span(0..16)));
    ask(&mut ring, source(1), key(1, 0, 0), span(0..16));
    ring.open(opening(1, 2, 1000), &mut Vec::new());
    assert_eq!(ring.slots().count(), 2, "they may still be written");
    assert_eq!(verdict(&mut ring, key(1, 0, 0), span(0..16)), Verdict::Done, "not wanted, and no failure");
    assert_eq!(ring.arrived(source(0), key(1, 0, 0), lost.1, key(1, 0, 0)), Arrival::Unknown);
    granted(verdict(&mut ring, Key { attempt: 2, ..key(1, 0, 0) }, span(0..16)));
    let owners: Vec<(u32, u8)> = ring.slots().map(|(_, attempt, source, _)| (attempt, source)).collect();
    assert_eq!(owners, [(2, 0), (1, 1)], "rank 1 has not asked again");
}

#[test]
fn opening_again_changes_nothing_unless_it_is_a_later_attempt_which_has_the_whole_room_to_ask_for() {
    let mut ring = ring(&[(1, 16)]);
    let first = verdict(&mut ring, key(1, 0, 0), span(0..16));
    ring.open(opening(1, 1, 16), &mut Vec::new());
    assert_eq!(verdict(&mut ring, key(1, 0, 0), span(0..16)), first);
    ring.open(opening(1, 2, 16), &mut Vec::new());
    granted(verdict(&mut ring, Key { attempt: 2, ..key(1, 0, 0) }, span(0..16)));
    ring.open(opening(1, 1, 16), &mut Vec::new());
    assert_eq!(verdict(&mut ring, key(1, 0, 0), span(0..16)), Verdict::Done, "not wanted, and no failure");
}

#[test]
fn h9_waiting_for_a_slot_takes_no_turns_and_keeps_no_order() {
    let mut sender = Sender::new(BYTES);
    add(&mut sender, lane(1, 1, 0, target(0), 4));
    let mut said = 0;
    let mut time = Time::default();
    while let Some(due) = sender.next_deadline().filter(|due| *due < at(10_000)) {
        time = due;
        let mut actions = Vec::new();
        sender.tick(time, &mut actions);
        said += actions.len();
        let mut actions = Vec::new();
        let answer = Answer { key: key(1, 0, 0), repeat: 0, verdict: Verdict::Wait };
        sender.heard(time, PeerRank { peer: DECODE, rank: 0 }, &answer, &mut actions);
        assert!(actions.is_empty());
    }
    assert!(said <= 4 * 16, "{said} messages in ten seconds until {time:?}");
    // The piece that was granted last may be gathered first.
    grant(&mut sender, 0, key(1, 0, 3), 0);
    assert_eq!(gather(&mut sender).unwrap().1.key.piece, 3);
}

#[test]
fn h10_the_next_piece_is_gathered_while_the_last_is_on_the_wire() {
    let mut sender = Sender::new(BYTES);
    let asks = add(&mut sender, lane(1, 1, 0, target(0), 9)).asks.len();
    assert_eq!(asks, 4, "credits are asked for ahead");
    (0..4).for_each(|piece| drop(grant(&mut sender, 0, key(1, 0, piece), u64::from(piece) * 512)));
    let written: Vec<Written> =
        std::iter::from_fn(|| gather(&mut sender)).map(|(_, written)| written).collect();
    assert_eq!(written.len(), 4, "and no write has settled");
    let mut offsets: Vec<u64> = written.iter().map(|written| written.source_offset).collect();
    offsets.dedup();
    assert_eq!(offsets.len(), 4, "each has memory of its own");
    // Gathering gave the credits back, so the next pieces were asked for before any write settled.
    assert_eq!(sender.credits(), 4);
}

#[test]
fn h11_and_h12_a_peer_whose_layers_or_blocks_differ_is_refused_before_a_byte_is_sent() {
    let mut ring = ring(&[(1, 100)]);
    let malformed = Verdict::Refused(Refusal::Malformed);
    let more_layers = Span { layers: 0..LAYERS + 1, bytes: 48, ..span(0..1) };
    assert_eq!(verdict(&mut ring, key(1, 0, 0), more_layers), malformed);
    let wider_heads = Span { bytes: 64, ..span(0..1) };
    assert_eq!(verdict(&mut ring, key(1, 0, 0), wider_heads), malformed);
    assert_eq!(ring.slots().count(), 0);
    let mut sender = Sender::new(BYTES);
    add(&mut sender, lane(1, 1, 0, target(0), 3));
    let said = hear(&mut sender, 0, key(1, 0, 1), malformed);
    assert_eq!(said.ended, [(Tag(1), target(0), Some(Fault::Refused(Refusal::Malformed)))]);
    assert!(said.ended[0].2.clone().unwrap().to_string().contains("same model"));
    assert!(sender.idle());
}

#[test]
fn h13_nothing_is_asked_for_or_gathered_that_was_not_said_to_be_complete() {
    // A lane is complete when it is added. There is no other way to name data.
    let mut sender = Sender::new(BYTES);
    let said = add(&mut sender, lane(1, 1, 0, target(0), 2));
    assert_eq!(said.asks.len(), 2);
    grant(&mut sender, 0, key(1, 0, 2), 0);
    grant(&mut sender, 0, key(1, 1, 0), 0);
    assert!(gather(&mut sender).is_none(), "granted, but there is no data for it");
}
