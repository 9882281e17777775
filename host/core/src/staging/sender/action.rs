//! The actions of a sender, and its counts.

#[cfg(doc)]
use super::Sender;
use super::{Fault, Target};
use crate::staging::message::Ask;
use crate::staging::{Key, Span};
use crate::transfer::Tag;

/// What a sender wants done. It gathers only when asked for work ([`Sender::next_gather`]).
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// An ask is to be sent.
    Say {
        /// The receiver.
        to: Target,
        /// The ask.
        ask: Ask,
    },
    /// A gathered piece is to be written, which is answered by [`Sender::settled`].
    Write(Written),
    /// A write under this id is of no use any more. It still settles.
    CancelWrite(u64),
    /// Nothing of the part is in flight to this target any more.
    Ended {
        /// The part.
        tag: Tag,
        /// The target.
        target: Target,
        /// Why not everything was written.
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
    /// Where to.
    pub target: Target,
    /// The piece.
    pub key: Key,
    /// How many pieces there are of the part for this target.
    pub pieces: u16,
    /// Bytes from the start of the own staging region.
    pub source_offset: u64,
    /// Bytes from the start of the target's.
    pub target_offset: u64,
    /// Bytes.
    pub length: u32,
    /// Travels in the notice behind the data.
    pub generation: u32,
}

/// One piece to copy out of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gather {
    /// Names it in [`Sender::gathered`].
    pub id: u64,
    /// The part.
    pub tag: Tag,
    /// Where it will go.
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
