//! Rooms, handled as schedulers do: attempts, parts, aborts and drains.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use host_core::staging::{Fault, Key, Opening, Span, StagedLane, piece_limit};
use host_core::transfer::Tag;
use host_core::{Instance, Room};

use super::{Pages, Pending, World, block, cut, target};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Prefill,
    Decode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Not begun.
    Planned,
    Open,
    /// Decode has given up. `rings` counts the rings that have not closed the room yet. `drained` is true once prefill has drained,
    /// or is fenced.
    Closing {
        rings: u32,
        drained: bool,
    },
    Completed,
    Failed,
}

#[derive(Clone, Debug)]
pub struct Story {
    pub slow: bool,
    pub stage: Stage,
    pub(super) prefill: (usize, Instance),
    pub(super) decode: (usize, Instance),
    session: u64,
    attempt: u32,
    pages: Pages,
    page_count: u32,
    parts: Vec<(Range<u32>, Range<u16>)>,
    /// Pieces that decode waits for in this attempt, by target rank. Known once a part was sent.
    expected: BTreeSet<(usize, u8, u32, u16)>,
    announced: u32,
    received: BTreeSet<(usize, u8, u32, u16)>,
    /// Lanes of prefill that have not ended.
    pub(super) under_way: u32,
    /// Whether prefill sends nothing of the room any more.
    given_up: bool,
    abort_heard: bool,
    next_attempt: Option<u32>,
}

impl Story {
    pub fn ended(&self) -> bool {
        matches!(self.stage, Stage::Completed | Stage::Failed) && self.under_way == 0
    }
}

impl World {
    pub fn invent_room(&mut self, number: u64) {
        let prefill = self.random.below(self.prefill.len() as u64) as usize;
        let decode = self.random.below(self.decode.len() as u64) as usize;
        // Some rooms need many times the memory of a ring.
        let most = if self.random.chance(0.3) { 200 } else { 12 };
        let page_count = self.random.within(1..most) as u32;
        let mut parts = Vec::new();
        let mut from = 0;
        while from < page_count {
            let end = from + self.random.within(1..u64::from(page_count - from) + 1) as u32;
            let split = self.random.below(u64::from(self.layers)) as u16;
            if split > 0 {
                parts.push((from..end, 0..split));
            }
            parts.push((from..end, split..self.layers));
            from = end;
        }
        let room = Room(number << 32 | self.random.below(1 << 32));
        let story = Story {
            slow: self.random.chance(self.faults.slow),
            stage: Stage::Planned,
            prefill: (prefill, Instance(0)),
            decode: (decode, Instance(0)),
            session: 1 + self.random.below(3),
            attempt: 0,
            pages: Vec::new(),
            page_count,
            parts,
            expected: BTreeSet::new(),
            announced: 0,
            received: BTreeSet::new(),
            under_way: 0,
            given_up: false,
            abort_heard: false,
            next_attempt: None,
        };
        self.stories.insert(room, story);
        let at = self.random.micros(0..600_000);
        self.after(at, Pending::Begin(room));
    }

    pub fn begin(&mut self, room: Room) {
        let story = self.stories.get_mut(&room).unwrap();
        let (prefill, decode) = (story.prefill.0, story.decode.0);
        story.prefill.1 = self.prefill[prefill].instance;
        story.decode.1 = self.decode[decode].instance;
        story.pages = self.decode[decode].take_pages(room, story.page_count);
        story.stage = Stage::Open;
        self.open_attempt(room, 1);
        if self.random.chance(self.faults.aborts) {
            let at = self.random.micros(0..400_000);
            let what =
                if self.random.chance(0.5) { Pending::PrefillFailed(room) } else { Pending::Abort(room) };
            self.after(at, what);
        }
    }

    fn open_attempt(&mut self, room: Room, attempt: u32) {
        let story = self.stories.get_mut(&room).unwrap();
        story.attempt = attempt;
        story.expected.clear();
        story.received.clear();
        story.announced = 0;
        let (prefill, decode) = (story.prefill, story.decode);
        let pages = story.pages.clone();
        let lanes = self.lanes(prefill.0, decode.0);
        for rank in 0..self.decode[decode.0].ranks() {
            let of_rank = lanes.iter().filter(|lane| lane.target == rank);
            let lanes =
                of_rank.map(|lane| (lane.source as u8, lane.heads.start as u16..lane.heads.end as u16));
            let lanes = lanes.collect();
            let opening = Opening { room, attempt, peer: prefill.1, pages: pages.clone(), lanes };
            let mut actions = Vec::new();
            self.decode[decode.0].rings[rank].ring.open(opening, &mut actions);
            self.ring_acts(decode.0, rank, actions);
        }
        let wait = self.random.micros(100..20_000);
        self.after(wait, Pending::Attempt { room, attempt });
    }

    /// Tells prefill of an attempt. Prefill begins it once nothing of the previous attempt is in flight.
    pub fn begin_attempt(&mut self, room: Room, attempt: u32) {
        let story = self.stories.get_mut(&room).unwrap();
        if story.given_up || self.prefill[story.prefill.0].instance != story.prefill.1 {
            return;
        }
        if story.under_way > 0 {
            story.next_attempt = Some(attempt);
            return;
        }
        let mut at = Duration::ZERO;
        for sequence in 0..story.parts.len() as u32 {
            at += self.random.micros(0..60_000);
            self.after(at, Pending::Part { room, attempt, sequence });
        }
    }

    pub fn send_part(&mut self, room: Room, attempt: u32, sequence: u32) {
        let story = self.stories[&room].clone();
        let (prefill, decode) = (story.prefill.0, story.decode.0);
        if story.given_up || self.prefill[prefill].instance != story.prefill.1 {
            return;
        }
        if self.lost.contains(&story.decode.1) {
            // The connection is gone, and the scheduler knows.
            self.stories.get_mut(&room).unwrap().given_up = true;
            return;
        }
        self.last_tag += 1;
        let tag = Tag(self.last_tag);
        self.tags.insert(tag, (room, attempt, sequence));
        let (pages, layers) = story.parts[sequence as usize].clone();
        let lanes = self.lanes(prefill, decode);
        let (own, target_bytes) = (self.prefill[prefill].bytes, self.decode[decode].bytes);
        let limit = piece_limit(own, target_bytes);
        self.stories.get_mut(&room).unwrap().under_way += lanes.len() as u32;
        for lane in &lanes {
            let heads = lane.heads.start as u16..lane.heads.end as u16;
            let pieces = cut(pages.clone(), layers.clone(), heads, limit);
            let story = self.stories.get_mut(&room).unwrap();
            for piece in 0..pieces.len() as u16 {
                story.expected.insert((lane.target, lane.source as u8, sequence, piece));
            }
            let target = target((decode, story.decode.1, lane.target as u8), story.session);
            let lane_of = StagedLane { tag, room, attempt, sequence, target, target_bytes, pieces };
            let mut actions = Vec::new();
            let sender = &mut self.prefill[prefill].senders[lane.source].sender;
            sender.add(self.agenda.now(), lane_of, &mut actions).unwrap();
            self.sender_acts(prefill, lane.source, actions);
        }
        self.stories.get_mut(&room).unwrap().announced += 1;
        self.check_complete(room);
    }

    pub fn lane_ended(&mut self, tag: Tag, fault: Option<Fault>) {
        let (room, _, _) = self.tags[&tag];
        let story = self.stories.get_mut(&room).unwrap();
        story.under_way -= 1;
        let broken = fault.is_some() && !story.given_up;
        if broken {
            story.given_up = true;
            self.cancel_room(room);
            let wait = self.random.micros(100..20_000);
            self.after(wait, Pending::PrefillFailed(room));
        }
        let story = self.stories.get_mut(&room).unwrap();
        if story.under_way > 0 {
            return;
        }
        if let Some(attempt) = story.next_attempt.take() {
            self.begin_attempt(room, attempt);
        } else if story.given_up && story.abort_heard {
            let wait = self.random.micros(100..20_000);
            self.after(wait, Pending::Drained(room));
        }
    }

    /// Records that a piece has been copied into its pages at one target rank.
    pub fn received(&mut self, room: Room, rank: usize, key: Key, span: &Span) {
        let prefill = self.stories[&room].prefill.0;
        let decode = self.stories[&room].decode.0;
        let lanes = self.lanes(prefill, decode);
        let source = lanes
            .iter()
            .find(|lane| lane.target == rank && lane.heads.contains(&usize::from(span.heads.start)));
        let piece = (rank, source.unwrap().source as u8, key.sequence, key.piece);
        let story = self.stories.get_mut(&room).unwrap();
        assert!(story.received.insert(piece), "seed {}: {piece:?} was received twice", self.seed);
        self.check_complete(room);
    }

    fn check_complete(&mut self, room: Room) {
        let story = self.stories.get_mut(&room).unwrap();
        let whole = story.announced as usize == story.parts.len() && story.received == story.expected;
        if story.stage != Stage::Open || !whole {
            return;
        }
        let (prefill, decode) = (story.prefill.0, story.decode.0);
        let (pages, attempt) = (story.pages.clone(), story.attempt);
        for lane in self.lanes(prefill, decode) {
            let pool = &self.decode[decode].rings[lane.target].pool;
            for (index, page) in pages.iter().enumerate() {
                for layer in 0..self.layers {
                    for head in lane.heads.clone() {
                        let found = pool.get(&(*page, layer, head as u16));
                        let wanted = block(room, index as u32, layer, head as u16);
                        assert_eq!(
                            found,
                            Some(&wanted),
                            "seed {}: {room:?} page {index} is wrong",
                            self.seed
                        );
                    }
                }
            }
        }
        if attempt < 3 && self.random.chance(self.faults.damage) {
            self.open_attempt(room, attempt + 1);
            return;
        }
        self.stories.get_mut(&room).unwrap().stage = Stage::Completed;
        self.outcome.completed += 1;
        self.forget(room);
    }

    fn forget(&mut self, room: Room) {
        let decode = self.stories[&room].decode;
        let worker = &mut self.decode[decode.0];
        if worker.instance != decode.1 {
            return;
        }
        worker.owners.retain(|_, owner| *owner != room);
        for rank in 0..worker.ranks() {
            let mut actions = Vec::new();
            self.decode[decode.0].rings[rank].ring.forget(room, &mut actions);
            self.ring_acts(decode.0, rank, actions);
        }
    }

    /// Decode gives a room up.
    pub fn abort(&mut self, room: Room) {
        let story = self.stories.get_mut(&room).unwrap();
        let decode = story.decode;
        if story.stage != Stage::Open || self.decode[decode.0].instance != decode.1 {
            return;
        }
        let ranks = self.decode[decode.0].ranks();
        story.stage = Stage::Closing { rings: ranks as u32, drained: false };
        for rank in 0..ranks {
            let mut actions = Vec::new();
            self.decode[decode.0].rings[rank].ring.close(room, &mut actions);
            self.ring_acts(decode.0, rank, actions);
        }
        let wait = self.random.micros(100..20_000);
        self.after(wait, Pending::Abort(room));
    }

    pub fn ring_closed(&mut self, room: Room, _rank: usize) {
        if let Stage::Closing { rings, .. } = &mut self.stories.get_mut(&room).unwrap().stage {
            *rings -= 1;
            self.check_closed(room);
        }
    }

    fn check_closed(&mut self, room: Room) {
        let story = self.stories.get_mut(&room).unwrap();
        if story.stage == (Stage::Closing { rings: 0, drained: true }) {
            story.stage = Stage::Failed;
            self.forget(room);
        }
    }

    /// Prefill is told of an abort, or fails by itself.
    pub fn hear_abort(&mut self, room: Room) {
        let story = self.stories.get_mut(&room).unwrap();
        let closing = matches!(story.stage, Stage::Closing { .. });
        if self.prefill[story.prefill.0].instance != story.prefill.1
            || (!closing && story.stage != Stage::Open)
        {
            return;
        }
        if !closing {
            // Prefill fails by itself: it tells decode, which aborts.
            let wait = self.random.micros(100..20_000);
            self.after(wait, Pending::PrefillFailed(room));
        }
        let story = self.stories.get_mut(&room).unwrap();
        story.abort_heard |= closing;
        story.given_up = true;
        story.next_attempt = None;
        let idle = story.under_way == 0;
        self.cancel_room(room);
        if idle && closing {
            let wait = self.random.micros(100..20_000);
            self.after(wait, Pending::Drained(room));
        }
    }

    fn cancel_room(&mut self, room: Room) {
        let prefill = self.stories[&room].prefill.0;
        let tags: Vec<Tag> =
            self.tags.iter().filter(|(_, (of, _, _))| *of == room).map(|(tag, _)| *tag).collect();
        for rank in 0..self.prefill[prefill].ranks() {
            for tag in &tags {
                let mut actions = Vec::new();
                self.prefill[prefill].senders[rank].sender.cancel(self.agenda.now(), *tag, &mut actions);
                self.sender_acts(prefill, rank, actions);
            }
        }
    }

    pub fn drained(&mut self, room: Room) {
        if let Stage::Closing { drained, .. } = &mut self.stories.get_mut(&room).unwrap().stage {
            *drained = true;
            self.check_closed(room);
        }
    }
}
