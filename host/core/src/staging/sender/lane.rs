//! The work of a sender for one part and one target rank.

use std::time::Duration;

#[cfg(doc)]
use super::Sender;
use crate::ids::{Instance, Room, Time};
use crate::staging::message::Refusal;
use crate::staging::{Key, PeerRank, Span};
use crate::transfer::Tag;

/// Why a lane failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// By [`Sender::cancel`].
    #[error("cancelled")]
    Cancelled,
    /// By [`Sender::peer_lost`].
    #[error("the connection is gone")]
    PeerLost,
    /// The ring refused a piece.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The ring granted bytes outside of its memory.
    #[error("the other worker granted staging memory that it does not have")]
    Outside,
    /// The write failed.
    #[error("{0}")]
    Write(String),
}

/// A rank that pieces go to, over one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// The worker.
    pub peer: Instance,
    /// The connection that the room belongs to.
    pub session: u64,
    /// Its rank.
    pub rank: u8,
}

impl Target {
    pub(super) fn peer_rank(&self) -> PeerRank {
        PeerRank { peer: self.peer, rank: self.rank }
    }
}

/// The data of one part for one target rank, cut into pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedLane {
    /// The part.
    pub tag: Tag,
    /// The room.
    pub room: Room,
    /// The attempt within the room.
    pub attempt: u32,
    /// The part, as its notice counts it.
    pub sequence: u32,
    /// The rank that the pieces go to.
    pub target: Target,
    /// Bytes of the target's staging memory.
    pub target_bytes: u64,
    /// The pieces, in order. Their data must be complete: they may be gathered from now on.
    pub pieces: Vec<Span>,
}

/// Why a lane cannot be staged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaneError {
    /// A piece of no bytes, or of more than the sender's staging memory allows.
    #[error("a piece of {0} bytes cannot be staged in {1} bytes: raise --staging-bytes")]
    PieceBytes(u32, u64),
    /// More pieces than a message can name.
    #[error("{0} pieces are more than a part may have: raise --staging-bytes")]
    TooMany(usize),
    /// The same part for the same target is under way.
    #[error("part {0} of {1:?} is being sent")]
    Repeated(u32, Room),
}

/// The state of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Queued,
    Asked { at: Time, due: Time, wait: Duration, repeat: u8, answered: bool },
    Granted { offset: u64, generation: u32 },
    Gathering { slot: u64, offset: u64, generation: u32 },
    Writing { slot: u64 },
    Over,
}

/// A lane under way.
#[derive(Debug)]
pub(super) struct Work {
    pub lane: StagedLane,
    pub states: Vec<State>,
    /// The first piece that was not asked for.
    pub next: usize,
    /// Pieces that are not over.
    pub left: usize,
    pub fault: Option<Fault>,
}

impl Work {
    pub(super) fn new(lane: StagedLane) -> Self {
        let count = lane.pieces.len();
        Self { lane, states: vec![State::Queued; count], next: 0, left: count, fault: None }
    }

    pub(super) fn key(&self, piece: u16) -> Key {
        let StagedLane { room, attempt, sequence, .. } = self.lane;
        Key { room, attempt, sequence, piece }
    }

    pub(super) fn state(&self, piece: u16) -> State {
        self.states.get(usize::from(piece)).copied().unwrap_or(State::Over)
    }

    pub(super) fn span(&self, piece: u16) -> Option<&Span> {
        self.lane.pieces.get(usize::from(piece))
    }

    pub(super) fn set(&mut self, piece: u16, state: State) {
        if let Some(slot) = self.states.get_mut(usize::from(piece)) {
            if *slot != State::Over && state == State::Over {
                self.left -= 1;
            }
            *slot = state;
        }
    }
}
