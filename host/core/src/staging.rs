//! Transfers whose writes would be small, packed into few large ones.
//!
//! Between pools that order their heads differently, a head of a token is a write of its own: hundreds of bytes, by the
//! million. Such a lane (what one source rank has for one target rank) is *staged* instead. The source gathers a piece
//! of it into a buffer of its own and writes that into a slot of the target's *ring* in one go. The target scatters the
//! piece into its pages. The rules here say which side may use which bytes when. [`Sender`] runs once per source rank,
//! [`Ring`] once per target rank. Both are told what happens and copy nothing themselves.
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
//! A lane ends once, when all its pieces are over. One that fails or is cancelled drops what no thread or backend has
//! yet and waits for the rest, so when it has ended nothing of it is in flight.
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
//! A room that is *closed* grants nothing and scatters nothing more, but keeps its slots: its peer may still write
//! them. Only when it is *forgotten* (committed, drained, or its peer fenced) do other rooms get them. The same holds
//! for the slots of an earlier attempt, until their sender asks within the next one: it does so only once its own
//! writes have settled. What a sender still asks of an earlier attempt is answered `Done`, so that its parts end well.
//!
//! # Why nothing waits for ever
//!
//! A slot of the ring is granted only to a sender that has the data ready. Its sender needs an own slot, own slots wait
//! only for the wire, and the wire ends: written, failed or fenced. Scattering waits for nothing. A room's share
//! shrinks with what is left ([`Ring`]), so that one whose sender has stopped leaves bytes for others. A piece for
//! which no gap was large enough while others were served gets a window kept free for it.
//!
//! Asks and answers may be lost, repeated and reordered: an ask is repeated, the answer to it is looked up by its key.
//! Data and the notice behind it come once and in order, or the connection is lost.

pub mod message;
mod ring;
mod round_trip;
mod sender;
mod slots;

use std::ops::Range;

use crate::ids::{Instance, Room};

pub use ring::{Action as RingAction, Arrival, Geometry, Opening, Ring, RingStats, Scatter};
pub use sender::{
    Action as SenderAction, Fault, Gather, Lane, LaneError, Sender, SenderStats, Target, Written,
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
    /// The try within the room.
    pub attempt: u32,
    /// The part, as its notice counts it.
    pub sequence: u32,
    /// The piece of the lane's part, from 0.
    pub piece: u16,
}

/// What a piece carries: K and V of some heads of some layers of some pages.
///
/// In a slot they lie densely in the order page, head, layer, K/V, token, dimension.
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

/// Most bytes of a piece between a sender's and a target's staging memory: several of them fit into either.
#[must_use]
pub fn piece_limit(own: u64, peer: u64) -> u64 {
    LONGEST_PIECE.min(own / 8).min(peer / 8)
}
