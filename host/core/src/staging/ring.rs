//! A target rank's staging memory: who may write which bytes of it, and what is to be copied into pages.
//!
//! **Shares.** A room may hold as many bytes as are left (so one alone gets half of the ring, and one that has stopped
//! leaves half of what it found), all rooms of one peer together twice as many as are left. A room that holds nothing needs no share
//! of its own, only its peer's, then of four times what is left; a peer that holds nothing needs only a gap. Rooms take turns.

mod room;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::message::{Answer, Ask, Refusal, Verdict};
use super::slots::Slots;
use super::{Key, PeerRank, Span};
use crate::ids::{Instance, PageId, Room};
use room::{Held, OpenRoom, Piece, PieceKey, Slot, State};

/// Pieces for which there may be no gap while others get theirs, before one is kept free for them.
const PATIENCE: u64 = 16;

/// What the pieces of a rank are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Layers of the model.
    pub layers: u16,
    /// Bytes of K and V of one head of one layer of one page.
    pub block_bytes: u32,
}

/// A room that decode has promised to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The room.
    pub room: Room,
    /// The try. A later one of the same room replaces it.
    pub attempt: u32,
    /// Whose ranks may ask.
    pub peer: Instance,
    /// The room's pages, in the order of the prompt.
    pub pages: Vec<PageId>,
    /// Which of the peer's ranks sends which heads to this one, counted over the whole model.
    pub lanes: Vec<(u8, Range<u16>)>,
}

/// What a ring wants done. It copies only when asked for work ([`Ring::next_scatter`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// To be told.
    Say {
        /// To whom.
        to: PeerRank,
        /// What.
        answer: Answer,
    },
    /// Nothing will be copied into the room's pages any more.
    Closed(Room),
}

/// A piece that lies in a slot and belongs into pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scatter<N> {
    /// Names it in [`Ring::scattered`].
    pub id: u32,
    /// The room.
    pub room: Room,
    /// Bytes from the start of the staging region.
    pub offset: u64,
    /// What it carries.
    pub span: Span,
    /// The pages of the span.
    pub pages: Vec<PageId>,
    /// What came with [`Ring::arrived`].
    pub notice: N,
}

/// What became of a notice behind the data of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It will be scattered.
    Taken,
    /// It was taken before.
    Repeated,
    /// No such slot was granted, or its room is closed.
    Unknown,
}

/// Counts for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingStats {
    /// Bytes of slots that are somebody's.
    pub bytes_in_use: u64,
    /// Pieces that wait for a slot.
    pub waiting: u64,
    /// Pieces scattered so far.
    pub pieces: u64,
    /// Bytes scattered so far.
    pub bytes: u64,
    /// Asks refused so far.
    pub refused: u64,
}

/// See the module. `N` is what the caller wants back with a piece: its notice.
#[derive(Debug)]
pub struct Ring<N> {
    geometry: Geometry,
    slots: Slots,
    rooms: BTreeMap<Room, OpenRoom>,
    /// Bytes of slots by peer.
    peers: BTreeMap<Instance, u64>,
    /// Rooms with waiting pieces, whose turn it is first.
    turns: VecDeque<Room>,
    arrived: VecDeque<(Room, PieceKey, N)>,
    scattering: BTreeMap<u32, (Room, PieceKey)>,
    last_generation: u32,
    grants: u64,
    /// For whom a window is kept free.
    claimant: Option<(Room, PieceKey)>,
    stats: RingStats,
}

impl<N> Ring<N> {
    /// A ring over so many bytes of memory.
    #[must_use]
    pub fn new(bytes: u64, geometry: Geometry) -> Self {
        Self {
            geometry,
            slots: Slots::new(bytes),
            rooms: BTreeMap::new(),
            peers: BTreeMap::new(),
            turns: VecDeque::new(),
            arrived: VecDeque::new(),
            scattering: BTreeMap::new(),
            last_generation: 0,
            grants: 0,
            claimant: None,
            stats: RingStats::default(),
        }
    }

    /// From now on pieces of this room are taken. A repeat changes nothing; a later attempt voids what came before it.
    pub fn open(&mut self, opening: Opening) {
        let room = opening.room;
        match self.rooms.get_mut(&room) {
            None => {
                self.rooms.insert(room, OpenRoom::new(opening));
            }
            Some(open)
                if !open.closed
                    && open.opening.peer == opening.peer
                    && open.opening.attempt < opening.attempt =>
            {
                open.stop();
                open.opening = opening;
                open.asked.clear();
                self.drop_work(room);
            }
            Some(_) => {}
        }
    }

    /// Ends a room: nothing more is granted, and nothing copied beyond what is being copied now. Answered by
    /// [`Action::Closed`], also for a room that nobody knows.
    pub fn close(&mut self, room: Room, actions: &mut Vec<Action>) {
        let Some(open) = self.rooms.get_mut(&room) else {
            actions.push(Action::Closed(room));
            return;
        };
        open.closed = true;
        open.stop();
        let copying = open.copying > 0;
        self.drop_work(room);
        if !copying {
            actions.push(Action::Closed(room));
        }
        // A window may have been kept free for it.
        self.serve(actions);
    }

    /// Nothing of the room is in flight any more: its slots are free, and so is one being copied when that has ended. A
    /// room that was not closed is.
    pub fn forget(&mut self, room: Room, actions: &mut Vec<Action>) {
        let Some(open) = self.rooms.get_mut(&room) else { return };
        open.closed = true;
        open.forgotten = true;
        open.stop();
        self.drop_work(room);
        self.free_kept(room, |_| true);
        self.rooms.retain(|of, open| *of != room || open.copying > 0);
        self.serve(actions);
    }

    /// Frees slots of pieces that nobody wants any more.
    fn free_kept(&mut self, room: Room, which: impl Fn(&Held) -> bool) {
        let Some(open) = self.rooms.get_mut(&room) else { return };
        for held in open.kept.extract_if(.., |held| which(held)) {
            open.held -= held.slot.size;
            give_back(&mut self.slots, &mut self.peers, open.opening.peer, held.slot);
        }
    }

    /// Somebody has a piece: grants it a slot, or says why not (yet).
    pub fn asked(&mut self, from: PeerRank, ask: &Ask, actions: &mut Vec<Action>) {
        let verdict = match self.judge(from, ask) {
            Ok(Some(verdict)) => verdict,
            Ok(None) => {
                self.serve(actions);
                let piece = self
                    .rooms
                    .get(&ask.key.room)
                    .and_then(|open| open.pieces.get(&PieceKey::of(from.rank, &ask.key)));
                if piece.is_some_and(|piece| piece.state != State::Waiting) {
                    // Told already.
                    return;
                }
                Verdict::Wait
            }
            Err(refusal) => {
                self.stats.refused += 1;
                Verdict::Refused(refusal)
            }
        };
        actions.push(Action::Say { to: from, answer: Answer { key: ask.key, repeat: ask.repeat, verdict } });
    }

    /// What to answer, or nothing yet for a piece that waits now.
    fn judge(&mut self, from: PeerRank, ask: &Ask) -> Result<Option<Verdict>, Refusal> {
        let (geometry, capacity) = (self.geometry, self.slots.capacity());
        let open = self.rooms.get_mut(&ask.key.room).filter(|open| !open.closed).ok_or(Refusal::Gone)?;
        if open.opening.peer != from.peer || open.opening.attempt != ask.key.attempt {
            return Err(Refusal::Gone);
        }
        let lane = open.opening.lanes.iter().find(|lane| lane.0 == from.rank).ok_or(Refusal::Malformed)?;
        let heads = lane.1.clone();
        let key = PieceKey::of(from.rank, &ask.key);
        if let Some(piece) = open.pieces.get_mut(&key) {
            if piece.span != ask.span {
                return Err(Refusal::Malformed);
            }
            return Ok(match piece.state {
                State::Waiting => {
                    piece.repeat = ask.repeat;
                    None
                }
                State::Granted(Slot { offset, generation, .. }) => {
                    Some(Verdict::Grant { offset, generation })
                }
                State::Arrived(_) | State::Scattering(_) | State::Done => Some(Verdict::Done),
            });
        }
        let span = &ask.span;
        let blocks = span.blocks().ok_or(Refusal::Malformed)?;
        let inside = span.layers.end <= geometry.layers
            && span.heads.start >= heads.start
            && span.heads.end <= heads.end
            && span.pages.end as usize <= open.opening.pages.len();
        if !inside || blocks.checked_mul(u64::from(geometry.block_bytes)) != Some(u64::from(span.bytes)) {
            return Err(Refusal::Malformed);
        }
        if Slots::size_of(u64::from(span.bytes)) > capacity / 4 {
            return Err(Refusal::TooLong);
        }
        open.charge(from.rank, blocks, geometry.layers, heads.end - heads.start)?;
        // This rank writes in this attempt, so its writes of earlier ones have settled.
        self.free_kept(ask.key.room, |held| held.source == from.rank && held.attempt < ask.key.attempt);
        let Some(open) = self.rooms.get_mut(&ask.key.room) else { return Err(Refusal::Gone) };
        open.pieces.insert(
            key,
            Piece { span: span.clone(), repeat: ask.repeat, denied: None, state: State::Waiting },
        );
        if open.waiting.is_empty() {
            self.turns.push_back(ask.key.room);
        }
        open.waiting.push_back(key);
        self.stats.waiting += 1;
        Ok(None)
    }

    /// The notice behind the data of a piece is here.
    pub fn arrived(&mut self, from: PeerRank, key: Key, generation: u32, notice: N) -> Arrival {
        let Some(open) = self.rooms.get_mut(&key.room) else { return Arrival::Unknown };
        if open.closed || open.opening.peer != from.peer || open.opening.attempt != key.attempt {
            return Arrival::Unknown;
        }
        let piece = PieceKey::of(from.rank, &key);
        match open.pieces.get_mut(&piece).map(|piece| &mut piece.state) {
            Some(state @ State::Granted(_)) => {
                let State::Granted(slot) = *state else { return Arrival::Unknown };
                if slot.generation != generation {
                    return Arrival::Unknown;
                }
                *state = State::Arrived(slot);
                self.arrived.push_back((key.room, piece, notice));
                Arrival::Taken
            }
            Some(State::Arrived(_) | State::Scattering(_) | State::Done) => Arrival::Repeated,
            Some(State::Waiting) | None => Arrival::Unknown,
        }
    }

    /// The next piece to copy into its pages. Several may be copied at once.
    pub fn next_scatter(&mut self) -> Option<Scatter<N>> {
        let (room, key, notice) = self.arrived.pop_front()?;
        let open = self.rooms.get_mut(&room)?;
        let piece = open.pieces.get_mut(&key)?;
        let State::Arrived(slot) = piece.state else { return None };
        piece.state = State::Scattering(slot);
        open.copying += 1;
        let span = piece.span.clone();
        let pages = open.opening.pages.get(span.pages.start as usize..span.pages.end as usize)?.to_vec();
        self.scattering.insert(slot.generation, (room, key));
        Some(Scatter { id: slot.generation, room, offset: slot.offset, span, pages, notice })
    }

    /// A piece is in its pages (or they are of no use any more): its slot is free. False when its room was closed or asked for
    /// again meanwhile: nobody is to hear of the piece.
    pub fn scattered(&mut self, id: u32, actions: &mut Vec<Action>) -> bool {
        let Some((room, key)) = self.scattering.remove(&id) else { return false };
        let Some(open) = self.rooms.get_mut(&room) else { return false };
        open.copying -= 1;
        let wanted = !open.closed && open.opening.attempt == key.attempt;
        if let Some(piece) = open.pieces.get_mut(&key)
            && let State::Scattering(slot) = piece.state
        {
            piece.state = State::Done;
            self.stats.pieces += 1;
            self.stats.bytes += u64::from(piece.span.bytes);
            open.held -= slot.size;
            give_back(&mut self.slots, &mut self.peers, open.opening.peer, slot);
        }
        if !wanted {
            open.pieces.remove(&key);
        }
        if open.closed && open.copying == 0 {
            actions.push(Action::Closed(room));
            if open.forgotten {
                self.rooms.remove(&room);
            }
        }
        self.serve(actions);
        wanted
    }

    /// Grants what can be granted, rooms in turn.
    fn serve(&mut self, actions: &mut Vec<Action>) {
        let mut denied = 0;
        while denied < self.turns.len() {
            let Some(room) = self.turns.pop_front() else { return };
            let Some(open) = self.rooms.get_mut(&room) else { continue };
            let Some(key) = open.waiting.front().copied() else { continue };
            let granted = self.try_grant(room, key, actions);
            denied = if granted { 0 } else { denied + 1 };
            if self.rooms.get(&room).is_some_and(|open| !open.waiting.is_empty()) {
                self.turns.push_back(room);
            }
        }
    }

    fn try_grant(&mut self, room: Room, key: PieceKey, actions: &mut Vec<Action>) -> bool {
        let Some(open) = self.rooms.get_mut(&room) else { return false };
        let Some(piece) = open.pieces.get_mut(&key) else { return false };
        let (peer, length) = (open.opening.peer, u64::from(piece.span.bytes));
        let size = Slots::size_of(length);
        let peers = self.peers.get(&peer).copied().unwrap_or(0);
        let left = self.slots.unused();
        let fair = match (open.held, peers) {
            (_, 0) => true,
            (0, peers) => peers + size <= left * 4,
            (held, peers) => held + size <= left && peers + size <= left * 2,
        };
        if !fair {
            return false;
        }
        let claimed = self.claimant == Some((room, key));
        let offset = if claimed { self.slots.take_claimed(length) } else { self.slots.take(length) };
        let Some(offset) = offset else {
            let since = *piece.denied.get_or_insert(self.grants);
            if self.claimant.is_none() && self.grants - since >= PATIENCE {
                self.slots.claim(length);
                self.claimant = Some((room, key));
            }
            return false;
        };
        if claimed {
            self.claimant = None;
        }
        self.grants += 1;
        // A generation comes again after four billion grants; no notice is late by that many.
        self.last_generation = self.last_generation.wrapping_add(1);
        let slot = Slot { offset, size, generation: self.last_generation };
        piece.state = State::Granted(slot);
        let repeat = piece.repeat;
        open.waiting.pop_front();
        open.held += size;
        *self.peers.entry(peer).or_default() += size;
        self.stats.waiting -= 1;
        let verdict = Verdict::Grant { offset, generation: slot.generation };
        let to = PeerRank { peer, rank: key.source };
        actions.push(Action::Say { to, answer: Answer { key: key.key(room), repeat, verdict } });
        true
    }

    /// Takes a room out of everything that is to be done.
    fn drop_work(&mut self, room: Room) {
        self.arrived.retain(|(of, _, _)| *of != room);
        self.turns.retain(|of| *of != room);
        if let Some(open) = self.rooms.get_mut(&room) {
            self.stats.waiting -= open.drop_waiting();
        }
        if self.claimant.is_some_and(|(of, _)| of == room) {
            self.claimant = None;
            self.slots.unclaim();
        }
    }

    /// Counts for metrics.
    #[must_use]
    pub fn stats(&self) -> RingStats {
        RingStats { bytes_in_use: self.slots.used(), ..self.stats }
    }

    /// Rooms that are known, closed ones too.
    #[must_use]
    pub fn rooms(&self) -> usize {
        self.rooms.len()
    }

    /// Whether something waits to be copied.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.arrived.is_empty()
    }

    /// All slots that are somebody's: room, attempt, source rank, offset, size. For tests.
    pub fn slots(&self) -> impl Iterator<Item = (Room, u32, u8, Range<u64>)> {
        self.rooms.iter().flat_map(|(room, open)| {
            open.slots().map(|Held { attempt, source, slot }| {
                (*room, attempt, source, slot.offset..slot.offset + slot.size)
            })
        })
    }
}

fn give_back(slots: &mut Slots, peers: &mut BTreeMap<Instance, u64>, peer: Instance, slot: Slot) {
    slots.give_back(slot.offset);
    if let Some(held) = peers.get_mut(&peer) {
        *held -= slot.size;
        if *held == 0 {
            peers.remove(&peer);
        }
    }
}
