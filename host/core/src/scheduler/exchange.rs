//! The events that a scheduler takes, and the actions that it wants done.

use std::ops::Range;
use std::time::Duration;

use crate::aux_row::AuxRow;
use crate::batch::{Batch, Sampled, SequenceOutput};
use crate::hierarchy::{TierAction, TierEvent};
use crate::ids::{Instance, PageId, Room};
use crate::integrity::Found;
use crate::message::Message;
use crate::notice::Notice;
use crate::radix::CacheEvent;
use crate::request::{Failure, FinishReason, PeerRef, Request, Usage};
use crate::transfer::Tag;

/// Something that happened, of which the scheduler is told.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The router sent a request.
    Submit(Request),
    /// The router no longer wants the answer.
    Cancel(Room),
    /// The answer of a request is complete, although its last token does not say so.
    EndAnswer(Room),
    /// A peer said something.
    Message {
        /// The peer.
        from: Instance,
        /// The lowest id that the sender still repeats to us.
        floor: u64,
        /// The message.
        message: Message,
    },
    /// The handshake with a peer succeeded. Pages can be exchanged from now on. An earlier connection to the same peer
    /// was fenced before.
    PeerReady {
        /// The peer.
        peer: Instance,
        /// Messages of the peer below this id belong to an earlier connection ([`Action::Connect`] carries it over).
        floor: u64,
        /// Names the connection, with a number higher than any before. Every write over it has this number
        /// ([`PageWrite::session`]).
        session: u64,
    },
    /// The handshake failed.
    PeerRefused {
        /// The peer.
        peer: Instance,
        /// The reason, as text.
        message: String,
    },
    /// A connection to a peer is gone. `fenced`: it is proven that none of the writes over it lands any more.
    PeerLost {
        /// The peer.
        peer: Instance,
        /// Which connection. News of an earlier one than that in use changes nothing: the one in use was begun when
        /// the earlier one was fenced.
        session: u64,
        /// Whether its late writes are proven to land nowhere.
        fenced: bool,
    },
    /// The fence around a connection could not be proven yet.
    FenceFailed {
        /// The peer.
        peer: Instance,
        /// Which connection.
        session: u64,
    },
    /// The KV of layers `0..layers` is in the pool for all positions of the batch that is being computed, and is not
    /// written again. The event may be left out or come late. It says nothing once the batch has ended.
    LayersDone {
        /// [`Batch::id`].
        batch: u64,
        /// How many layers.
        layers: u32,
    },
    /// The batch was computed.
    BatchDone(Vec<SequenceOutput>),
    /// The batch could not be computed.
    BatchFailed(String),
    /// A write of ours has settled.
    Written {
        /// The tag that it was given.
        tag: Tag,
        /// Its error, if it failed.
        error: Option<String>,
    },
    /// A part of a room's pages is in our memory.
    Arrived(Notice),
    /// What [`Action::Verify`] found.
    Verified {
        /// The room.
        room: Room,
        /// The try within the room.
        attempt: u32,
        /// What lies in our memory.
        found: Box<Found>,
    },
    /// Something happened in the offload tiers.
    Tier(TierEvent),
    /// What [`Action::CloseRoom`] asked for: no thread of ours copies anything into the room's pages any more.
    RoomClosed {
        /// The room.
        room: Room,
    },
    /// No new requests from now on.
    Drain,
}

/// An action of the scheduler, to be carried out by its caller.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Compute this, and answer with [`Event::BatchDone`] or [`Event::BatchFailed`].
    Run(Batch),
    /// Send this message to a peer. It may get lost.
    Send {
        /// The receiver.
        to: Instance,
        /// The lowest id still repeated to this peer.
        floor: u64,
        /// The message.
        message: Message,
    },
    /// Fence what is left of an earlier connection and shake hands with a peer. Answer with [`Event::PeerReady`] or
    /// [`Event::PeerRefused`].
    Connect {
        /// The peer.
        peer: PeerRef,
        /// For the peer's [`Event::PeerReady`].
        floor: u64,
    },
    /// Cut one connection to a peer off in both directions. Answer with [`Event::PeerLost`] (fenced) or
    /// [`Event::FenceFailed`]. The fence is proven already when that connection is not the one in use any more.
    Fence {
        /// The peer.
        peer: Instance,
        /// Which connection.
        session: u64,
    },
    /// Write pages into a peer's memory, and answer with [`Event::Written`] once the write has settled.
    Write(PageWrite),
    /// Ask that what has not started of a write never starts. The write still settles.
    CancelWrite(Tag),
    /// Parts of a room's pages are about to come in, by writes of the peer's or as copies of ours: said before the peer is
    /// asked for them. Opening again with a later attempt replaces the earlier one, some of whose parts may not have
    /// arrived: once this was taken, nothing of the earlier one is copied into pages.
    OpenRoom(RoomOpening),
    /// Copy nothing more into an open room's pages. Answer with [`Event::RoomClosed`] when no copy is under way. What
    /// the peer writes may still land.
    CloseRoom {
        /// The room.
        room: Room,
    },
    /// Nothing of an open room is in flight any more, and nothing will be unless it is opened again. Said once of each
    /// open room, of a closed one after [`Event::RoomClosed`].
    ForgetRoom {
        /// The room.
        room: Room,
    },
    /// A transfer away from here is given up, because nothing has happened to it for so long. For the operator: what follows
    /// is said by other actions.
    Stalled {
        /// The room.
        room: Room,
        /// Where the pages were to go.
        peer: Instance,
        /// Writes that have not settled, or 0 if all have and decode has not heard of one.
        writes: usize,
        /// How long nothing has happened.
        waited: Duration,
    },
    /// Read the aux row and digest the pages, and answer with [`Event::Verified`].
    Verify {
        /// The room.
        room: Room,
        /// The try within the room.
        attempt: u32,
        /// The pages that were written, in order.
        pages: Vec<PageId>,
        /// The room's aux row.
        aux_slot: u32,
    },
    /// Something that the offload tiers are to do.
    Tier(TierAction),
    /// Give the client a token.
    Emit {
        /// The request.
        room: Room,
        /// The token.
        token: Sampled,
    },
    /// The answer is complete.
    Finish {
        /// The request.
        room: Room,
        /// Why it is complete.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
    },
    /// The request ended without a complete answer.
    Fail {
        /// The request.
        room: Room,
        /// The failure.
        failure: Failure,
    },
    /// For listeners: the contents of the radix cache changed so, in this order.
    Cache(Vec<CacheEvent>),
    /// For digests and events: a prompt's KV is complete in these pages.
    PromptReady {
        /// The request.
        room: Room,
        /// Tokens of the prompt.
        tokens: u32,
        /// Its pages, in order.
        pages: Vec<PageId>,
        /// Tokens of it whose KV was not computed for this request.
        cached_tokens: u32,
        /// Of these, the ones that came from the worker's offload tiers.
        offload_tokens: u32,
        /// Pages of it that came in through a transfer backend.
        transferred_pages: u32,
    },
}

/// One part of a room on its way.
#[derive(Clone, Debug, PartialEq)]
pub struct PageWrite {
    /// Names the write until it has settled.
    pub tag: Tag,
    /// Whose memory is written.
    pub to: Instance,
    /// The connection that the room belongs to. A write must not go out over a later one: its pages may be another
    /// request's by then.
    pub session: u64,
    /// Travels behind the data.
    pub notice: Notice,
    /// Our pages.
    pub source: Vec<PageId>,
    /// The peer's pages, pair by pair.
    pub target: Vec<PageId>,
    /// Place of the first of them among the pages of the attempt.
    pub first_page: u32,
    /// Which of their layers.
    pub layers: Range<u32>,
    /// With the last part: the row, our slot for it and the peer's.
    pub aux: Option<(AuxRow, u32, u32)>,
}

/// A room whose pages are about to arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomOpening {
    /// The room.
    pub room: Room,
    /// The try within the room.
    pub attempt: u32,
    /// The sender.
    pub peer: Instance,
    /// Over which connection.
    pub session: u64,
    /// Our pages, in the order of the attempt.
    pub pages: Vec<PageId>,
    /// Most parts that they can come in.
    pub parts: u32,
}
