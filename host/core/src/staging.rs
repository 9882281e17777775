//! Staging packs transfers with many small writes into few large ones.
//!
//! Between pools that order their heads differently, each head of a token would be a write of its own: millions of
//! writes of some hundred bytes. Such a lane (the heads that one source rank sends to one target rank) is *staged*
//! instead. The source gathers a piece of the lane into its own buffer and writes the piece into a slot of the target's
//! *ring* at once. The target scatters the piece into its pages. The rules here say which side may use which bytes at
//! which time. [`Sender`] runs once per source rank, [`Ring`] once per target rank. Both take events and copy nothing
//! themselves.
//!
//! ```text
//!   Sender                                            Ring
//!   add(lane) ── Ask(key, span) ──────────────────►  checked against what was opened
//!             ◄── Wait ───────────────────────────   no gap yet: remembered
//!             ◄── Grant(offset, generation) ──────   a slot, as soon as there is one
//!   Gather into an own slot, Write ══ data, notice ═►  arrived: Scatter into pages, slot free
//!   settled: own slot free
//! ```
//!
//! # A piece at the sender
//!
//! | State | holds | leaves it on |
//! | --- | --- | --- |
//! | queued | nothing | its turn: asked |
//! | asked | a credit (the question is repeated until answered) | `Grant`: granted. `Done`: over. `Refused`: the lane fails |
//! | granted | a credit, the peer's slot | an own slot is free, and [`Sender::next_gather`] is called: gathering |
//! | gathering | own and peer's slot | [`Sender::gathered`]: writing, or over when the lane has failed meanwhile |
//! | writing | own and peer's slot | [`Sender::settled`], however it ended: over |
//!
//! A lane ends once, when all its pieces are over. A lane that fails or is cancelled drops the pieces that no thread or
//! backend has yet and waits for the others, so nothing of a lane is in flight when it has ended.
//!
//! # A piece at the ring
//!
//! | State | holds | leaves it on |
//! | --- | --- | --- |
//! | unknown | nothing | a valid `Ask`: waiting |
//! | waiting | a place in its room's queue | its turn, its room's share, a gap: granted |
//! | granted | a slot (asked again, the same answer) | the notice behind the data, with the slot's generation: arrived |
//! | arrived | the slot | [`Ring::next_scatter`]: scattering |
//! | scattering | the slot | [`Ring::scattered`]: done |
//! | done | a word | the end of the room. Asked again, the answer is `Done` |
//!
//! A room that is *closed* grants nothing and scatters nothing more, but keeps its slots, because its peer may still
//! write them. Other rooms get them only when the room is *forgotten* (committed, drained, or its peer fenced). The
//! same holds for the slots of an earlier attempt, until their sender asks within the next attempt, which it does only
//! once its own writes have settled. Asks of an earlier attempt are answered `Done`, so that its parts end without a
//! failure.
//!
//! # Why nothing waits for ever
//!
//! A slot of the ring is granted only to a sender that has the data ready. That sender needs an own slot. Own slots
//! wait only for the wire, and each write on the wire ends: written, failed or fenced. Scattering waits for nothing. A
//! room's share shrinks with the bytes that are left ([`Ring`]), so that a room whose sender has stopped leaves bytes
//! for others. If no gap is large enough for a piece while others are served, a window is kept free for it.
//!
//! Asks and answers may be lost, repeated and reordered: the sender repeats an ask, and finds the piece of an answer by
//! its key. Data and the notice behind it come once and in order, or the connection is lost.

pub mod message;
mod ring;
mod round_trip;
mod sender;
mod slots;

use std::ops::Range;

use crate::ids::{Instance, Room};

pub use ring::{Action as RingAction, Arrival, Geometry, Opening, Ring, RingStats, Scatter};
pub use sender::{
    Action as SenderAction, Fault, Gather, LaneError, Sender, SenderStats, StagedLane, Target, Written,
};

/// One rank of another worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerRank {
    /// The worker.
    pub peer: Instance,
    /// Its rank.
    pub rank: u8,
}

/// Names a piece among all from one source rank to one target rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The room.
    pub room: Room,
    /// The attempt within the room.
    pub attempt: u32,
    /// The part, as its notice counts it.
    pub sequence: u32,
    /// The piece of the lane's part, from 0.
    pub piece: u16,
}

/// The contents of a piece: K and V of some heads of some layers of some pages.
///
/// In a slot the elements lie densely in the order page, head, layer, K/V, token, dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Pages, as places in the room's list of pages.
    pub pages: Range<u32>,
    /// Layers.
    pub layers: Range<u16>,
    /// Heads, counted over the whole model.
    pub heads: Range<u16>,
    /// Bytes in all.
    pub bytes: u32,
}

impl Span {
    /// Blocks (one head of one layer of one page, K and V) that the span covers, or `None` when a range is empty.
    #[must_use]
    pub fn blocks(&self) -> Option<u64> {
        let layers = self.layers.end.checked_sub(self.layers.start)?;
        let heads = self.heads.end.checked_sub(self.heads.start)?;
        let pages = self.pages.end.checked_sub(self.pages.start)?;
        // At most 32 + 16 + 16 bits.
        Some(u64::from(pages) * (u64::from(layers) * u64::from(heads))).filter(|blocks| *blocks > 0)
    }
}

/// Longest piece by default: on a fast link some hundred microseconds, so that gathering, wire and scattering overlap.
pub const LONGEST_PIECE: u64 = 4 << 20;

/// Most pieces that a ring takes of a room in one attempt, from all ranks of the peer. Each costs memory until the room ends.
pub const MOST_PIECES: usize = 1 << 18;

/// Most bytes of a piece between a sender's and a target's staging memory: several such pieces fit into each memory.
#[must_use]
pub fn piece_limit(own: u64, peer: u64) -> u64 {
    LONGEST_PIECE.min(own / 8).min(peer / 8)
}
