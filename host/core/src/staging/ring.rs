//! A target rank's staging memory: which peer may write which bytes of it, and which pieces are to be copied into
//! pages.
//!
//! **Shares.** A room may hold as many bytes as are left. So a single room gets half of the ring, and a room that has
//! stopped leaves half of the bytes that it found. All rooms of one peer together may hold twice as many bytes as are
//! left. For a room that holds nothing, only the limit of its peer counts, which is then four times the bytes that are
//! left. A peer that holds nothing needs only a gap. Rooms take turns.

mod granting;
mod room;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::message::{Answer, Verdict};
use super::slots::Slots;
use super::{Key, PeerRank, Span};
use crate::ids::{Instance, PageId, Room};
use room::{Held, OpenRoom, PieceKey, Slot, State};

/// The measures of a rank's pieces.
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
    /// The attempt. A later one of the same room replaces it.
    pub attempt: u32,
    /// The worker whose ranks may ask.
    pub peer: Instance,
    /// The room's pages, in the order of the prompt.
    pub pages: Vec<PageId>,
    /// Which of the peer's ranks sends which heads to this one, counted over the whole model.
    pub lanes: Vec<(u8, Range<u16>)>,
}

/// An action of a ring, for its caller. Copies are not actions: the caller asks for them ([`Ring::next_scatter`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send an answer.
    Say {
        /// The receiver.
        to: PeerRank,
        /// The answer.
        answer: Answer,
    },
    /// Nothing will be copied into the room's pages any more.
    Closed(Room),
}

/// A piece in a slot, to be copied into pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scatter<N> {
    /// Names it in [`Ring::scattered`].
    pub id: u32,
    /// The room.
    pub room: Room,
    /// The sender.
    pub from: PeerRank,
    /// Bytes from the start of the staging region.
    pub offset: u64,
    /// The contents of the piece.
    pub span: Span,
    /// The pages of the span.
    pub pages: Vec<PageId>,
    /// The notice that came with [`Ring::arrived`].
    pub notice: N,
}

/// The result of a notice behind the data of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The piece will be scattered.
    Taken,
    /// The piece was taken before.
    Repeated,
    /// No such slot was granted, or its room is closed.
    Unknown,
}

/// Counts for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingStats {
    /// Bytes of slots that are taken.
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

/// The staging memory of a receiving rank, and the rooms that share it. See the module.
///
/// `N` is the type of a piece's notice, which the caller gets back with the piece.
#[derive(Debug)]
pub struct Ring<N> {
    geometry: Geometry,
    slots: Slots,
    rooms: BTreeMap<Room, OpenRoom>,
    /// Bytes of slots by peer.
    peers: BTreeMap<Instance, u64>,
    /// Rooms with waiting pieces, the next in turn first.
    turns: VecDeque<Room>,
    arrived: VecDeque<(Room, PieceKey, N)>,
    scattering: BTreeMap<u32, (Room, PieceKey)>,
    last_generation: u32,
    grants: u64,
    /// The piece for which a window is kept free.
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

    /// Opens a room, so that its pieces are taken. A repeat changes nothing. A later attempt replaces the earlier one.
    /// A sender that waits for an answer within the earlier attempt gets `Done`, because its next attempt begins only
    /// when the earlier one has ended.
    pub fn open(&mut self, opening: Opening, actions: &mut Vec<Action>) {
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
                open.requested.clear();
                actions.extend(open.waiting_pieces().map(|(to, key, repeat)| {
                    let answer = Answer { key, repeat, verdict: Verdict::Done };
                    Action::Say { to, answer }
                }));
                self.drop_work(room);
                // If a window was kept free for this room, other pieces can use it now.
                self.serve(actions);
            }
            Some(_) => {}
        }
    }

    /// Ends a room: nothing more is granted, and only pieces that are being copied now are copied. Answered by
    /// [`Action::Closed`], also for an unknown room.
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
        // If a window was kept free for this room, other pieces can use it now.
        self.serve(actions);
    }

    /// Forgets a room of which nothing is in flight any more: frees its slots, and slots that are being copied when the
    /// copies have ended. Closes the room if it was open.
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

    /// Frees slots of pieces that are not wanted any more.
    fn free_kept(&mut self, room: Room, which: impl Fn(&Held) -> bool) {
        let Some(open) = self.rooms.get_mut(&room) else { return };
        for held in open.kept.extract_if(.., |held| which(held)) {
            open.held -= held.slot.size;
            give_back(&mut self.slots, &mut self.peers, open.opening.peer, held.slot);
        }
    }

    /// Takes the notice behind the data of a piece.
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
        // Pieces leave this queue before their room is removed.
        let open = self.rooms.get_mut(&room)?;
        let piece = open.pieces.get_mut(&key)?;
        let State::Arrived(slot) = piece.state else { return None };
        piece.state = State::Scattering(slot);
        open.copying += 1;
        let span = piece.span.clone();
        let pages = open.opening.pages.get(span.pages.start as usize..span.pages.end as usize)?.to_vec();
        self.scattering.insert(slot.generation, (room, key));
        let from = PeerRank { peer: open.opening.peer, rank: key.source };
        Some(Scatter { id: slot.generation, room, from, offset: slot.offset, span, pages, notice })
    }

    /// Frees the slot of a piece that is in its pages (or whose pages are of no use any more). Returns false if its
    /// room was closed or asked for again meanwhile: the caller must not report the piece then.
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

    /// Drops all work that waits for a room.
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

    /// Whether a piece waits to be copied.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.arrived.is_empty()
    }

    /// All slots that are taken: room, attempt, source rank, offset, size. For tests.
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
