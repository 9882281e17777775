//! The actions of a sender, and its counts.

#[cfg(doc)]
use super::Sender;
use super::{Fault, Target};
use crate::staging::message::Ask;
use crate::staging::{Key, Span};
use crate::transfer::Tag;

/// An action of a sender, for its caller. Copies are not actions: the caller asks for them ([`Sender::next_gather`]).
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Send an ask.
    Say {
        /// The receiver.
        to: Target,
        /// The ask.
        ask: Ask,
    },
    /// Write a gathered piece, and call [`Sender::settled`] when the write has ended.
    Write(Written),
    /// The write with this id is of no use any more. It still settles.
    CancelWrite(u64),
    /// Nothing of the part is in flight to this target any more.
    Ended {
        /// The part.
        tag: Tag,
        /// The target.
        target: Target,
        /// Why not everything was written. `None` if everything was, or was not needed any more.
        fault: Option<Fault>,
    },
}

/// One write of a piece.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Written {
    /// Names it in [`Sender::settled`].
    pub id: u64,
    /// The part.
    pub tag: Tag,
    /// The rank that the piece goes to.
    pub target: Target,
    /// The piece.
    pub key: Key,
    /// Number of pieces of the part for this target.
    pub pieces: u16,
    /// Bytes from the start of the own staging region.
    pub source_offset: u64,
    /// Bytes from the start of the target's staging region.
    pub target_offset: u64,
    /// Bytes.
    pub length: u32,
    /// Number of the grant, which travels in the notice behind the data.
    pub generation: u32,
}

/// One piece to copy out of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gather {
    /// Names it in [`Sender::gathered`].
    pub id: u64,
    /// The part.
    pub tag: Tag,
    /// The rank that the piece will go to.
    pub target: Target,
    /// The layers, heads and pages of the piece.
    pub span: Span,
    /// Bytes from the start of the own staging region.
    pub offset: u64,
}

/// Counts for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SenderStats {
    /// Bytes of own slots in use.
    pub bytes_in_use: u64,
    /// Pieces asked for and not answered by a slot.
    pub waiting: u64,
    /// Pieces written so far.
    pub pieces: u64,
    /// Bytes written so far.
    pub bytes: u64,
    /// Questions repeated so far.
    pub repeats: u64,
}
