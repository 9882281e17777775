//! Messages and writes between the workers.

use std::time::Duration;

use host_core::staging::message::{Answer, Ask, Message, Verdict};
use host_core::staging::{Arrival, Key, Span, Written};
use host_core::{Instance, Room};

use super::{Flight, Pending, World, rank_of};

/// A worker's place, its instance and the number of a rank.
type Party = (usize, Instance, u8);

impl World {
    /// Sends something that may get lost, come late, or come again.
    pub fn say(&mut self, first: Pending, again: impl Fn() -> Pending) {
        if !self.random.chance(self.faults.loss) {
            let wait = self.random.micros(50..3_000);
            self.after(wait, first);
        }
        while self.random.chance(self.faults.repeats) {
            let most = if self.random.chance(0.2) { 3_000_000 } else { 30_000 };
            let wait = self.random.micros(50..most);
            self.after(wait, again());
        }
    }

    pub fn hear_ask(&mut self, from: Party, to: Party, ask: &Ask) {
        // A message survives being encoded in 48 bytes.
        let message = Message::decode(&Message::Ask(ask.clone()).encode());
        assert_eq!(message, Some(Message::Ask(ask.clone())));
        let worker = &mut self.decode[to.0];
        if worker.instance != to.1 {
            return;
        }
        let mut actions = Vec::new();
        worker.rings[usize::from(to.2)].ring.request_slot(rank_of(from), ask, &mut actions);
        self.ring_acts(to.0, usize::from(to.2), actions);
    }

    pub fn hear_answer(&mut self, from: Party, to: Party, answer: &Answer) {
        let message = Message::decode(&Message::Answer(*answer).encode());
        assert_eq!(message, Some(Message::Answer(*answer)));
        let worker = &mut self.prefill[to.0];
        if worker.instance != to.1 || usize::from(to.2) >= worker.ranks() {
            return;
        }
        let mut actions = Vec::new();
        worker.senders[usize::from(to.2)].sender.heard(
            self.agenda.now(),
            rank_of(from),
            answer,
            &mut actions,
        );
        self.sender_acts(to.0, usize::from(to.2), actions);
    }

    /// Begins a write: it lands, and its notice and its completion follow.
    pub fn fly(&mut self, from: Party, written: Written) {
        let once = (from.1, from.2, written.target.peer, written.target.rank, written.key);
        assert!(self.written.insert(once), "seed {}: {once:?} is written a second time", self.seed);
        let Some(decode) = self.decode_of(written.target.peer) else {
            let flight = Flight { from, to: (usize::MAX, written.target.peer, written.target.rank), written };
            self.after(
                Duration::from_millis(1),
                Pending::Settle { flight, error: Some("no peer there".into()) },
            );
            return;
        };
        let to = (decode, written.target.peer, written.target.rank);
        let flight = Flight { from, to, written };
        let slow = self.stories.get(&written.key.room).is_some_and(|story| story.slow);
        let wait = self.random.micros(if slow { 500_000..4_000_000 } else { 20..2_000 });
        let late = self.random.micros(0..2_000);
        if self.random.chance(self.faults.errors) {
            let error = Some("the wire broke".into());
            if self.random.chance(0.5) {
                self.after(wait, Pending::Land { flight: flight.clone() });
            }
            self.after(wait + late, Pending::Settle { flight, error });
            return;
        }
        self.after(wait, Pending::Land { flight: flight.clone() });
        let notice = wait + self.random.micros(0..1_000);
        self.after(notice, Pending::Notice { flight: flight.clone() });
        if self.random.chance(self.faults.repeats) {
            let again = notice + self.random.micros(0..2_000_000);
            self.after(again, Pending::Notice { flight: flight.clone() });
        }
        self.after(wait + late, Pending::Settle { flight, error: None });
    }

    /// The plugin stops a write, or is too late.
    pub fn cancel_flight(&mut self, from: Party, id: u64) {
        if self.random.chance(0.5) {
            return;
        }
        let same = |flight: &Flight| flight.from == from && flight.written.id == id;
        let unlanded = |what: &Pending| matches!(what, Pending::Land { flight } if same(flight));
        if !self.agenda.ahead().any(unlanded) {
            return;
        }
        self.agenda.take_where(
            |what| matches!(what, Pending::Land { flight } | Pending::Notice { flight } if same(flight)),
        );
        for what in self.agenda.ahead_mut() {
            if let Pending::Settle { flight, error } = what
                && same(flight)
            {
                *error = Some("cancelled".into());
            }
        }
    }

    /// Copies the bytes of a write. Panics unless they land in a slot that belongs to the writer.
    pub fn land(&mut self, flight: &Flight) {
        let (sender, written) = (&self.prefill[flight.from.0], &flight.written);
        if self.decode[flight.to.0].instance != flight.to.1 || self.is_cut(flight.from.1, flight.to.1) {
            return;
        }
        let length = written.length as usize;
        let at = written.target_offset..written.target_offset + length as u64;
        let rank = &mut self.decode[flight.to.0].rings[usize::from(flight.to.2)];
        for (room, attempt, source, range) in rank.ring.slots() {
            if range.start < at.end && at.start < range.end {
                let owner = (room, attempt, source);
                let writer = (written.key.room, written.key.attempt, flight.from.2);
                assert_eq!(owner, writer, "seed {}: written into another's slot", self.seed);
                assert!(range.start == at.start && at.end <= range.end, "seed {}", self.seed);
            }
        }
        let own = rank.ring.slots().any(|(_, _, _, range)| range.start == at.start);
        assert!(own, "seed {}: {:?} is written into a slot that is free", self.seed, written.key);
        // The memory of a sender that died is gone. Nothing is copied, and the slot's contents are not checked.
        if sender.instance == flight.from.1 {
            let from = written.source_offset as usize;
            let bytes = &sender.senders[usize::from(flight.from.2)].memory[from..from + length];
            let to = at.start as usize;
            rank.memory[to..to + length].copy_from_slice(bytes);
        }
    }

    pub fn notice(&mut self, flight: &Flight) {
        let worker = &mut self.decode[flight.to.0];
        if worker.instance != flight.to.1
            || self.cut.contains(&(flight.from.1, flight.to.1, flight.written.target.session))
            || self.prefill[flight.from.0].instance != flight.from.1
        {
            return;
        }
        let (key, generation) = (flight.written.key, flight.written.generation);
        let ring = &mut worker.rings[usize::from(flight.to.2)].ring;
        let arrival = ring.arrived(rank_of(flight.from), key, generation, key);
        assert!(
            self.faults.repeats > 0.0 || arrival != Arrival::Repeated,
            "seed {}: nothing is sent twice",
            self.seed
        );
        self.ring_acts(flight.to.0, usize::from(flight.to.2), Vec::new());
    }

    pub fn settle(&mut self, flight: &Flight, mut error: Option<String>) {
        let worker = &mut self.prefill[flight.from.0];
        if worker.instance != flight.from.1 {
            return;
        }
        if self.decode.get(flight.to.0).is_none_or(|decode| decode.instance != flight.to.1) {
            error = Some("the peer is gone".into());
        }
        let mut actions = Vec::new();
        let sender = &mut worker.senders[usize::from(flight.from.2)].sender;
        sender.settled(self.agenda.now(), flight.written.id, error, &mut actions);
        self.sender_acts(flight.from.0, usize::from(flight.from.2), actions);
    }

    fn is_cut(&self, from: Instance, to: Instance) -> bool {
        self.cut.iter().any(|(one, other, _)| (*one, *other) == (from, to))
    }

    /// Messages that no worker sent: asks for rooms, pages, layers and heads that are not there, answers from another
    /// rank.
    pub fn invent(&mut self) {
        let prefill = self.random.below(self.prefill.len() as u64) as usize;
        let decode = self.random.below(self.decode.len() as u64) as usize;
        let rooms: Vec<Room> = self.stories.keys().copied().collect();
        let room = match self.random.chance(0.8) {
            true => rooms[self.random.below(rooms.len() as u64) as usize],
            false => Room(self.random.word()),
        };
        let (attempt, sequence) = (self.random.below(3) as u32, self.random.below(1 << 32) as u32);
        let key = Key { room, attempt, sequence, piece: self.random.below(1 << 16) as u16 };
        let repeat = 0;
        let (from_rank, to_rank) =
            (self.random.below(5) as u8, self.random.below(self.decode[decode].ranks() as u64));
        let from = (prefill, self.prefill[prefill].instance, from_rank);
        let to = (decode, self.decode[decode].instance, to_rank as u8);
        if self.random.chance(0.7) {
            let (first, layer, head) =
                (self.random.word() as u32, self.random.word() as u16, self.random.word() as u16);
            let span = match self.random.below(4) {
                0 => Span { pages: first..first.wrapping_add(1), layers: 0..1, heads: 0..1, bytes: 8 },
                1 => Span { pages: 0..1, layers: 0..layer, heads: head..head, bytes: 8 },
                2 => Span { pages: 0..1, layers: self.layers..self.layers + 1, heads: 0..1, bytes: 8 },
                _ => Span { pages: 0..1, layers: 0..1, heads: 0..1, bytes: 8 + first % 7 + 1 },
            };
            self.hear_ask(from, to, &Ask { key, repeat, span });
        } else {
            let stranger = (decode, Instance(u64::MAX), to.2);
            let verdict = Verdict::Grant { offset: 0, generation: 1 };
            let rank = self.random.below(self.prefill[prefill].ranks() as u64) as u8;
            let known = Key { sequence: sequence % 3, piece: key.piece % 4, ..key };
            self.hear_answer(stranger, (prefill, from.1, rank), &Answer { key: known, repeat, verdict });
        }
    }
}
