//! How staged transfers have gone wrong elsewhere, one by one: that it cannot happen here, or why there is nothing to
//! happen.

use std::time::Duration;

use host_core::staging::message::{Answer, Ask, Refusal, Verdict};
use host_core::staging::{
    Arrival, Fault, Gather, Geometry, Key, Lane, LaneError, Opening, PeerRank, Ring, RingAction, Sender,
    SenderAction, Span, Target, Written,
};
use host_core::transfer::Tag;
use host_core::{Instance, PageId, Room, Time};

use crate::world::{BLOCK, Random};

const PREFILL: Instance = Instance(7);
const DECODE: Instance = Instance(9);
const BYTES: u64 = 4096;
const LAYERS: u16 = 2;

fn at(milliseconds: u64) -> Time {
    Time(Duration::from_millis(milliseconds))
}

fn source(rank: u8) -> PeerRank {
    PeerRank { peer: PREFILL, rank }
}

fn target(rank: u8) -> Target {
    Target { peer: DECODE, session: 1, rank }
}

fn key(room: u64, sequence: u32, piece: u16) -> Key {
    Key { room: Room(room), attempt: 1, sequence, piece }
}

/// Both heads of all layers of some pages: 32 bytes a page.
fn span(pages: std::ops::Range<u32>) -> Span {
    let bytes = pages.len() as u32 * u32::from(LAYERS) * 2 * BLOCK;
    Span { pages, layers: 0..LAYERS, heads: 0..2, bytes }
}

/// A part of `pieces` pieces of 512 bytes (16 pages) each.
fn lane(tag: u64, room: u64, sequence: u32, to: Target, pieces: u32) -> Lane {
    let first = sequence * 1000;
    let pieces = (0..pieces).map(|piece| span(first + piece * 16..first + (piece + 1) * 16)).collect();
    Lane { tag: Tag(tag), room: Room(room), attempt: 1, sequence, target: to, target_bytes: BYTES, pieces }
}

fn ring(rooms: &[(u64, u32)]) -> Ring<Key> {
    let mut ring = Ring::new(BYTES, Geometry { layers: LAYERS, block_bytes: BLOCK });
    for (room, pages) in rooms {
        ring.open(opening(*room, 1, *pages));
    }
    ring
}

fn opening(room: u64, attempt: u32, pages: u32) -> Opening {
    let pages = (0..pages).map(PageId).collect();
    Opening { room: Room(room), attempt, peer: PREFILL, pages, lanes: vec![(0, 0..2), (1, 0..2)] }
}

fn ask(ring: &mut Ring<Key>, from: PeerRank, key: Key, span: Span) -> Vec<(PeerRank, Answer)> {
    let mut actions = Vec::new();
    ring.asked(from, &Ask { key, repeat: 0, span }, &mut actions);
    said(actions)
}

fn said(actions: Vec<RingAction>) -> Vec<(PeerRank, Answer)> {
    let say = |action| match action {
        RingAction::Say { to, answer } => Some((to, answer)),
        RingAction::Closed(_) => None,
    };
    actions.into_iter().filter_map(say).collect()
}

/// The only answer, to a question of rank 0.
fn verdict(ring: &mut Ring<Key>, key: Key, span: Span) -> Verdict {
    let answers = ask(ring, source(0), key, span);
    assert_eq!(answers.len(), 1);
    assert_eq!((answers[0].0, answers[0].1.key), (source(0), key));
    answers[0].1.verdict
}

fn granted(verdict: Verdict) -> (u64, u32) {
    match verdict {
        Verdict::Grant { offset, generation } => (offset, generation),
        other => panic!("{other:?} is no grant"),
    }
}

/// Lets a granted piece arrive and be scattered.
fn deliver(ring: &mut Ring<Key>, key: Key, generation: u32) -> Vec<(PeerRank, Answer)> {
    assert_eq!(ring.arrived(source(0), key, generation, key), Arrival::Taken);
    let scatter = ring.next_scatter().unwrap();
    assert_eq!((scatter.id, scatter.notice), (generation, key));
    let mut actions = Vec::new();
    assert!(ring.scattered(scatter.id, &mut actions));
    said(actions)
}

#[derive(Default)]
struct Said {
    asks: Vec<(Target, Ask)>,
    writes: Vec<Written>,
    cancelled: Vec<u64>,
    ended: Vec<(Tag, Target, Option<Fault>)>,
}

fn done(actions: Vec<SenderAction>) -> Said {
    let mut said = Said::default();
    for action in actions {
        match action {
            SenderAction::Say { to, ask } => said.asks.push((to, ask)),
            SenderAction::Write(written) => said.writes.push(written),
            SenderAction::CancelWrite(id) => said.cancelled.push(id),
            SenderAction::Ended { tag, target, fault } => said.ended.push((tag, target, fault)),
        }
    }
    said
}

fn add(sender: &mut Sender, lane: Lane) -> Said {
    let mut actions = Vec::new();
    sender.add(at(0), lane, &mut actions).unwrap();
    done(actions)
}

fn hear(sender: &mut Sender, rank: u8, key: Key, verdict: Verdict) -> Said {
    let mut actions = Vec::new();
    let from = PeerRank { peer: DECODE, rank };
    sender.heard(at(1), from, &Answer { key, repeat: 0, verdict }, &mut actions);
    done(actions)
}

fn grant(sender: &mut Sender, rank: u8, key: Key, offset: u64) -> Said {
    hear(sender, rank, key, Verdict::Grant { offset, generation: 1 })
}

fn gather(sender: &mut Sender) -> Option<(Gather, Written)> {
    let mut actions = Vec::new();
    let gather = sender.next_gather(at(1), &mut actions)?;
    sender.gathered(gather.id, &mut actions);
    Some((gather, done(actions).writes[0]))
}

fn settle(sender: &mut Sender, write: u64) -> Said {
    let mut actions = Vec::new();
    sender.settled(at(2), write, None, &mut actions);
    done(actions)
}

#[test]
fn h1_a_target_that_is_not_ready_makes_nobody_send_twice_to_the_others() {
    let mut sender = Sender::new(BYTES);
    add(&mut sender, lane(1, 1, 0, target(0), 1));
    add(&mut sender, lane(1, 1, 0, target(1), 1));
    // Rank 1 has no room. Rank 0's piece is written, once, however often its grant comes and time passes.
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
        ring.asked(source(0), &again, &mut actions);
        // Each time the same slot.
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
    // A sender that asks for it gets on.
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
    assert_eq!(ask(&mut ring, stranger, key(1, 0, 0), span(0..1))[0].1.verdict, gone, "somebody else's room");
    assert_eq!((ring.slots().count(), ring.stats().waiting), (0, 0));
    // Whoever invents parts and pieces gets as many as the room has bytes.
    let mut taken = 0;
    for sequence in 0..1000 {
        taken += u32::from(
            verdict(&mut ring, key(1, sequence, 0), span(0..1)) != Verdict::Refused(Refusal::TooMany),
        );
    }
    assert_eq!(taken, 100);
    // A piece that changes is none.
    assert_eq!(verdict(&mut ring, key(1, 0, 0), span(1..2)), malformed);
}

#[test]
fn h6_peers_that_are_gone_leave_no_trace_and_are_told_nothing() {
    // There is nobody to subscribe: a ring answers who asks. So what is left when rooms are forgotten is nothing.
    let mut ring = ring(&[]);
    for room in 0..1000 {
        ring.open(opening(room, 1, 100));
        (0..4).for_each(|piece| drop(ask(&mut ring, source(0), key(room, 0, piece), span(0..16))));
        let mut actions = Vec::new();
        ring.close(Room(room), &mut actions);
        ring.forget(Room(room), &mut actions);
        assert_eq!(said(actions), []);
    }
    assert_eq!((ring.rooms(), ring.slots().count(), ring.stats().waiting), (0, 0, 0));
    // The same on the other side.
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
    // Three rooms take what they can get and write nothing.
    for room in 1..4 {
        (0..64).for_each(|piece| drop(ask(&mut ring, source(0), key(room, 0, piece), span(0..8))));
    }
    let held = ring.stats().bytes_in_use;
    assert!(held < BYTES, "{held}");
    for piece in 0..100 {
        let (_, generation) = granted(verdict(&mut ring, key(4, 0, piece), span(0..8)));
        assert_eq!(deliver(&mut ring, key(4, 0, piece), generation), [], "the others have their shares");
    }
    // And nobody's slots are gone: what the slow ones hold is still theirs.
    assert_eq!(ring.stats().bytes_in_use, held);
}

#[test]
fn h7_a_large_piece_is_not_starved_by_small_ones_between_slots_that_stand_still() {
    for seed in 0..50 {
        let mut random = Random(seed);
        let mut ring = ring(&[(1, 100_000), (2, 100_000)]);
        let stranger = Instance(8);
        ring.open(Opening { peer: stranger, ..opening(3, 1, 1000) });
        let mut live = Vec::new();
        let mut small = 0;
        let mut more = |ring: &mut Ring<Key>, live: &mut Vec<(Key, u32)>| {
            for (_, answer) in
                ask(ring, source(0), key(1, small >> 8, small as u16 & 255), span(small..small + 2))
            {
                if let Verdict::Grant { generation, .. } = answer.verdict {
                    live.push((answer.key, generation));
                }
            }
            small += 1;
        };
        // Small slots everywhere, some of which stand still.
        (0..64).for_each(|_| more(&mut ring, &mut live));
        let still = random.below(8) as usize;
        live.drain(..still);
        let from = PeerRank { peer: stranger, rank: 0 };
        assert_eq!(ask(&mut ring, from, key(3, 0, 0), span(0..32)).len(), 1);
        let mut turns = 0;
        while ring.slots().all(|(room, ..)| room != Room(3)) {
            turns += 1;
            assert!(turns < 1000, "seed {seed}");
            if live.is_empty() {
                more(&mut ring, &mut live);
                continue;
            }
            let (key, generation) = live.swap_remove(random.below(live.len() as u64) as usize);
            for (_, answer) in deliver(&mut ring, key, generation) {
                if let Verdict::Grant { generation, .. } = answer.verdict
                    && answer.key.room == Room(1)
                {
                    live.push((answer.key, generation));
                }
            }
            more(&mut ring, &mut live);
        }
    }
}

#[test]
fn h8_slots_of_a_closed_room_are_nobodys_until_it_is_forgotten() {
    let mut ring = ring(&[(1, 1000), (2, 1000)]);
    let first = granted(verdict(&mut ring, key(1, 0, 0), span(0..16)));
    let second = granted(verdict(&mut ring, key(1, 0, 1), span(16..32)));
    assert_eq!(ring.arrived(source(0), key(1, 0, 1), second.1, key(1, 0, 1)), Arrival::Taken);
    let mut actions = Vec::new();
    ring.close(Room(1), &mut actions);
    assert_eq!(actions, [RingAction::Closed(Room(1))]);
    assert!(ring.next_scatter().is_none(), "its pages may be somebody else's soon");
    // A late write lands in a slot that is still its own, and its notice means nothing.
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
    assert!(!said(actions).is_empty(), "who waited gets them");
    assert!(ring.slots().all(|(room, ..)| room == Room(2)));
    assert!(held <= BYTES);
    // A notice that was granted another slot than the one that is there now means nothing either.
    let again = granted(verdict(&mut ring, key(2, 0, 0), span(0..8)));
    assert_eq!(ring.arrived(source(0), key(2, 0, 0), again.1 + 1, key(2, 0, 0)), Arrival::Unknown);
}

#[test]
fn h8_slots_of_an_earlier_attempt_are_free_when_their_sender_asks_within_the_next() {
    let mut ring = ring(&[(1, 1000)]);
    let lost = granted(verdict(&mut ring, key(1, 0, 0), span(0..16)));
    ask(&mut ring, source(1), key(1, 0, 0), span(0..16));
    ring.open(opening(1, 2, 1000));
    assert_eq!(ring.slots().count(), 2, "they may still be written");
    assert_eq!(verdict(&mut ring, key(1, 0, 0), span(0..16)), Verdict::Refused(Refusal::Gone));
    assert_eq!(ring.arrived(source(0), key(1, 0, 0), lost.1, key(1, 0, 0)), Arrival::Unknown);
    granted(verdict(&mut ring, Key { attempt: 2, ..key(1, 0, 0) }, span(0..16)));
    let owners: Vec<(u32, u8)> = ring.slots().map(|(_, attempt, source, _)| (attempt, source)).collect();
    assert_eq!(owners, [(2, 0), (1, 1)], "rank 1 has not asked again");
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
    // What was granted last may go first.
    grant(&mut sender, 0, key(1, 0, 3), 0);
    assert_eq!(gather(&mut sender).unwrap().1.key.piece, 3);
}

#[test]
fn h10_the_next_piece_is_gathered_while_the_last_is_on_the_wire() {
    let mut sender = Sender::new(BYTES);
    let asked = add(&mut sender, lane(1, 1, 0, target(0), 9)).asks.len();
    assert_eq!(asked, 4, "credits are asked for ahead");
    (0..4).for_each(|piece| drop(grant(&mut sender, 0, key(1, 0, piece), u64::from(piece) * 512)));
    let written: Vec<Written> =
        std::iter::from_fn(|| gather(&mut sender)).map(|(_, written)| written).collect();
    assert_eq!(written.len(), 4, "and no write has settled");
    let mut offsets: Vec<u64> = written.iter().map(|written| written.source_offset).collect();
    offsets.dedup();
    assert_eq!(offsets.len(), 4, "each has memory of its own");
    // Gathering gave the credits back: the next were asked for before anything settled.
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
    // A lane is complete when it is added; there is no other way to name data.
    let mut sender = Sender::new(BYTES);
    let said = add(&mut sender, lane(1, 1, 0, target(0), 2));
    assert_eq!(said.asks.len(), 2);
    grant(&mut sender, 0, key(1, 0, 2), 0);
    grant(&mut sender, 0, key(1, 1, 0), 0);
    assert!(gather(&mut sender).is_none(), "granted, but nobody has it");
}

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
    // The next connection under the same name: answers of the last mean nothing, its own count.
    let next = Target { session: 2, ..target(0) };
    add(&mut sender, lane(2, 2, 0, next, 1));
    grant(&mut sender, 0, key(1, 0, 1), 0);
    assert!(gather(&mut sender).is_none());
    let mut actions = Vec::new();
    sender.peer_lost(at(4), DECODE, 1, &mut actions);
    assert!(actions.is_empty(), "late news of the old one");
    grant(&mut sender, 0, key(2, 0, 0), 0);
    assert_eq!(gather(&mut sender).unwrap().1.target, next);
    // A ring in its next life knows no question and no notice of the last.
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
    assert!(!ring.scattered(scatter.id, &mut actions), "nobody is to hear of the piece");
    assert_eq!(actions, [RingAction::Closed(Room(1))]);
    // Rooms that nobody knows are closed.
    let mut actions = Vec::new();
    ring.close(Room(5), &mut actions);
    assert_eq!(actions, [RingAction::Closed(Room(5))]);
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
    // A slot that the target does not have.
    let said = grant(&mut sender, 0, key(1, 0, 0), BYTES - 511);
    assert_eq!(said.ended, [(Tag(1), target(0), Some(Fault::Outside))]);
    assert!(sender.idle());
}

#[test]
fn a_room_with_a_long_prompt_leaves_credits_and_turns_to_the_next() {
    let mut sender = Sender::new(BYTES);
    assert_eq!(add(&mut sender, lane(1, 1, 0, target(0), 500)).asks.len(), 4);
    for room in 2..20 {
        let asked = add(&mut sender, lane(room, room, 0, target(0), 500)).asks;
        let most = 64usize.saturating_sub(4 * (room as usize - 1)).min(4);
        assert_eq!(asked.len(), most, "room {room}");
    }
    // The first to have credits back shares them with those that have none.
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
