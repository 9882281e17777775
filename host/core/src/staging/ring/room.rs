//! The state of one room in a ring.

use std::collections::{BTreeMap, VecDeque};

use super::Opening;
use crate::ids::Room;
use crate::staging::message::Refusal;
use crate::staging::{Key, MOST_PIECES, PeerRank, Span};

/// Names a piece within its room. Pieces of an earlier attempt come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PieceKey {
    pub attempt: u32,
    pub source: u8,
    pub sequence: u32,
    pub piece: u16,
}

impl PieceKey {
    pub(super) fn of(source: u8, key: &Key) -> Self {
        Self { attempt: key.attempt, source, sequence: key.sequence, piece: key.piece }
    }

    pub(super) fn key(&self, room: Room) -> Key {
        Key { room, attempt: self.attempt, sequence: self.sequence, piece: self.piece }
    }
}

/// Bytes of the ring that are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub offset: u64,
    pub size: u64,
    pub generation: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Waiting,
    Granted(Slot),
    Arrived(Slot),
    Scattering(Slot),
    Done,
}

#[derive(Debug)]
pub(super) struct Piece {
    pub span: Span,
    /// The `repeat` of the last ask.
    pub repeat: u8,
    /// Number of the ring's grants when there was first no gap for the piece.
    pub denied: Option<u64>,
    pub state: State,
}

/// A slot and the rank that may write it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub attempt: u32,
    pub source: u8,
    pub slot: Slot,
}

#[derive(Debug)]
pub(super) struct OpenRoom {
    pub opening: Opening,
    pub closed: bool,
    pub forgotten: bool,
    pub pieces: BTreeMap<PieceKey, Piece>,
    /// Pieces that wait for a slot, in order of asking.
    pub waiting: VecDeque<PieceKey>,
    /// Bytes of the room's slots.
    pub held: u64,
    /// Pieces being copied.
    pub copying: u32,
    /// Slots that may still be written, of pieces that are not needed any more.
    pub kept: Vec<Held>,
    /// Blocks requested in this attempt, by source rank.
    pub requested: BTreeMap<u8, u64>,
}

impl OpenRoom {
    pub(super) fn new(opening: Opening) -> Self {
        Self {
            opening,
            closed: false,
            forgotten: false,
            pieces: BTreeMap::new(),
            waiting: VecDeque::new(),
            held: 0,
            copying: 0,
            kept: Vec::new(),
            requested: BTreeMap::new(),
        }
    }

    /// Takes note that a source requested so many blocks more. Refuses more than its lane has.
    pub(super) fn charge(&mut self, source: u8, blocks: u64, layers: u16, heads: u16) -> Result<(), Refusal> {
        let most = self.opening.pages.len() as u64 * (u64::from(layers) * u64::from(heads));
        let requested = self.requested.entry(source).or_default();
        if *requested + blocks > most || self.pieces.len() >= MOST_PIECES {
            return Err(Refusal::TooMany);
        }
        *requested += blocks;
        Ok(())
    }

    /// Gives up all pieces. Their slots stay taken. Pieces that are being copied stay until they are copied.
    pub(super) fn stop(&mut self) {
        for (key, piece) in &mut self.pieces {
            if let State::Granted(slot) | State::Arrived(slot) = piece.state {
                self.kept.push(Held { attempt: key.attempt, source: key.source, slot });
                piece.state = State::Done;
            }
        }
        self.pieces.retain(|_, piece| matches!(piece.state, State::Waiting | State::Scattering(_)));
    }

    /// Pieces that wait for a slot: the sender, the name, and the `repeat` of its last ask.
    pub(super) fn waiting_pieces(&self) -> impl Iterator<Item = (PeerRank, Key, u8)> {
        let (room, peer) = (self.opening.room, self.opening.peer);
        self.waiting.iter().filter_map(move |key| {
            let repeat = self.pieces.get(key)?.repeat;
            Some((PeerRank { peer, rank: key.source }, key.key(room), repeat))
        })
    }

    /// Forgets pieces that wait, and returns how many.
    pub(super) fn drop_waiting(&mut self) -> u64 {
        let waiting = std::mem::take(&mut self.waiting);
        for key in &waiting {
            self.pieces.remove(key);
        }
        waiting.len() as u64
    }

    /// All slots.
    pub(super) fn slots(&self) -> impl Iterator<Item = Held> {
        let pieces = self.pieces.iter().filter_map(|(key, piece)| match piece.state {
            State::Granted(slot) | State::Arrived(slot) | State::Scattering(slot) => {
                Some(Held { attempt: key.attempt, source: key.source, slot })
            }
            State::Waiting | State::Done => None,
        });
        pieces.chain(self.kept.iter().copied())
    }
}
