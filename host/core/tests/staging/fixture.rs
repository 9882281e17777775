//! One sender, one ring, and short helpers to drive them.

use std::time::Duration;

use host_core::staging::message::{Answer, Ask, Verdict};
use host_core::staging::{
    Arrival, Fault, Gather, Geometry, Key, Opening, PeerRank, Ring, RingAction, Sender, SenderAction, Span,
    StagedLane, Target, Written,
};
use host_core::transfer::Tag;
use host_core::{Instance, PageId, Room, Time};

use crate::world::BLOCK;

pub const PREFILL: Instance = Instance(7);
pub const DECODE: Instance = Instance(9);
pub const BYTES: u64 = 4096;
pub const LAYERS: u16 = 2;

pub fn at(milliseconds: u64) -> Time {
    Time(Duration::from_millis(milliseconds))
}

pub fn source(rank: u8) -> PeerRank {
    PeerRank { peer: PREFILL, rank }
}

pub fn target(rank: u8) -> Target {
    Target { peer: DECODE, session: 1, rank }
}

pub fn key(room: u64, sequence: u32, piece: u16) -> Key {
    Key { room: Room(room), attempt: 1, sequence, piece }
}

/// Both heads of all layers of some pages: 32 bytes a page.
pub fn span(pages: std::ops::Range<u32>) -> Span {
    let bytes = pages.len() as u32 * u32::from(LAYERS) * 2 * BLOCK;
    Span { pages, layers: 0..LAYERS, heads: 0..2, bytes }
}

/// A part of `pieces` pieces of 512 bytes (16 pages) each.
pub fn lane(tag: u64, room: u64, sequence: u32, to: Target, pieces: u32) -> StagedLane {
    let first = sequence * 1000;
    let pieces = (0..pieces).map(|piece| span(first + piece * 16..first + (piece + 1) * 16)).collect();
    StagedLane {
        tag: Tag(tag),
        room: Room(room),
        attempt: 1,
        sequence,
        target: to,
        target_bytes: BYTES,
        pieces,
    }
}

pub fn ring(rooms: &[(u64, u32)]) -> Ring<Key> {
    let mut ring = Ring::new(BYTES, Geometry { layers: LAYERS, block_bytes: BLOCK });
    for (room, pages) in rooms {
        ring.open(opening(*room, 1, *pages), &mut Vec::new());
    }
    ring
}

pub fn opening(room: u64, attempt: u32, pages: u32) -> Opening {
    let pages = (0..pages).map(PageId).collect();
    Opening { room: Room(room), attempt, peer: PREFILL, pages, lanes: vec![(0, 0..2), (1, 0..2)] }
}

pub fn ask(ring: &mut Ring<Key>, from: PeerRank, key: Key, span: Span) -> Vec<(PeerRank, Answer)> {
    let mut actions = Vec::new();
    ring.request_slot(from, &Ask { key, repeat: 0, span }, &mut actions);
    said(actions)
}

pub fn said(actions: Vec<RingAction>) -> Vec<(PeerRank, Answer)> {
    let say = |action| match action {
        RingAction::Say { to, answer } => Some((to, answer)),
        RingAction::Closed(_) => None,
    };
    actions.into_iter().filter_map(say).collect()
}

/// Asks as rank 0, and returns the verdict of the only answer.
pub fn verdict(ring: &mut Ring<Key>, key: Key, span: Span) -> Verdict {
    let answers = ask(ring, source(0), key, span);
    assert_eq!(answers.len(), 1);
    assert_eq!((answers[0].0, answers[0].1.key), (source(0), key));
    answers[0].1.verdict
}

pub fn granted(verdict: Verdict) -> (u64, u32) {
    match verdict {
        Verdict::Grant { offset, generation } => (offset, generation),
        other => panic!("{other:?} is no grant"),
    }
}

/// Lets a granted piece arrive and be scattered.
pub fn deliver(ring: &mut Ring<Key>, key: Key, generation: u32) -> Vec<(PeerRank, Answer)> {
    assert_eq!(ring.arrived(source(0), key, generation, key), Arrival::Taken);
    let scatter = ring.next_scatter().unwrap();
    assert_eq!((scatter.id, scatter.notice), (generation, key));
    let mut actions = Vec::new();
    assert!(ring.scattered(scatter.id, &mut actions));
    said(actions)
}

#[derive(Default)]
pub struct Said {
    pub asks: Vec<(Target, Ask)>,
    pub writes: Vec<Written>,
    pub cancelled: Vec<u64>,
    pub ended: Vec<(Tag, Target, Option<Fault>)>,
}

pub fn done(actions: Vec<SenderAction>) -> Said {
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

pub fn add(sender: &mut Sender, lane: StagedLane) -> Said {
    let mut actions = Vec::new();
    sender.add(at(0), lane, &mut actions).unwrap();
    done(actions)
}

pub fn hear(sender: &mut Sender, rank: u8, key: Key, verdict: Verdict) -> Said {
    let mut actions = Vec::new();
    let from = PeerRank { peer: DECODE, rank };
    sender.heard(at(1), from, &Answer { key, repeat: 0, verdict }, &mut actions);
    done(actions)
}

pub fn grant(sender: &mut Sender, rank: u8, key: Key, offset: u64) -> Said {
    hear(sender, rank, key, Verdict::Grant { offset, generation: 1 })
}

pub fn gather(sender: &mut Sender) -> Option<(Gather, Written)> {
    let mut actions = Vec::new();
    let gather = sender.next_gather(at(1), &mut actions)?;
    sender.gathered(gather.id, &mut actions);
    Some((gather, done(actions).writes[0]))
}

pub fn settle(sender: &mut Sender, write: u64) -> Said {
    let mut actions = Vec::new();
    sender.settled(at(2), write, None, &mut actions);
    done(actions)
}
