//! The events that a scheduler takes, and the actions that it wants done.

use std::ops::Range;
use std::time::Duration;

use crate::aux_row::AuxRow;
use crate::batch::{Batch, Sampled, SequenceOutput};
use crate::hierarchy::{TierAction, TierEvent};
use crate::ids::{Instance, PageId, Room};
use crate::integrity::FoundData;
use crate::message::Message;
use crate::notice::Notice;
use crate::radix::CacheEvent;
use crate::request::{Failure, FinishReason, PeerRef, Request, Usage};
use crate::transfer::Tag;

/// An event for the scheduler.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The router sent a request.
    Submit(Request),
    /// The router no longer wants the answer.
    Cancel(Room),
    /// The answer of a request is complete, although its last token is no stop token.
    EndAnswer(Room),
    /// A peer sent a message.
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
        /// Which connection. An event about an earlier connection than the present one changes nothing: the present one
        /// began when the earlier one was fenced.
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
    /// written again. The event may be left out or come late. It has no effect once the batch has ended.
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
    /// The result of [`Action::Verify`].
    Verified {
        /// The room.
        room: Room,
        /// The attempt within the room.
        attempt: u32,
        /// The data found in our memory.
        found: Box<FoundData>,
    },
    /// An event from the offload tiers.
    Tier(TierEvent),
    /// The answer to [`Action::CloseRoom`]: no thread of ours copies anything into the room's pages any more.
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
    /// [`Event::FenceFailed`]. If the connection is not in use any more, its fence is proven already.
    Fence {
        /// The peer.
        peer: Instance,
        /// Which connection.
        session: u64,
    },
    /// Write pages into a peer's memory, and answer with [`Event::Written`] once the write has settled.
    Write(PageWrite),
    /// Do not start the fragments of a write that have not started. The write still settles.
    CancelWrite(Tag),
    /// Expect parts of a room's pages, which the peer writes or our threads copy. This action comes before the peer is
    /// asked for them. Opening again with a later attempt replaces the earlier one, some of whose parts may not have
    /// arrived: from then on nothing of the earlier attempt is copied into pages.
    OpenRoom(RoomOpening),
    /// Copy nothing more into an open room's pages. Answer with [`Event::RoomClosed`] when no copy is under way. Writes
    /// of the peer may still land.
    CloseRoom {
        /// The room.
        room: Room,
    },
    /// Nothing of an open room is in flight any more, and nothing will be unless it is opened again. Comes once for
    /// each open room, and for a closed one after [`Event::RoomClosed`].
    ForgetRoom {
        /// The room.
        room: Room,
    },
    /// A transfer from this worker is given up, because it made no progress for so long. This only informs the operator:
    /// other actions do what follows.
    Stalled {
        /// The room.
        room: Room,
        /// The worker that the pages were for.
        peer: Instance,
        /// Writes that have not settled. 0 if all have settled and decode has not confirmed that everything arrived.
        writes: usize,
        /// How long there was no progress.
        waited: Duration,
    },
    /// Read the aux row and digest the pages, and answer with [`Event::Verified`].
    Verify {
        /// The room.
        room: Room,
        /// The attempt within the room.
        attempt: u32,
        /// The pages that were written, in order.
        pages: Vec<PageId>,
        /// The room's aux row.
        aux_slot: u32,
    },
    /// Work for the offload tiers.
    Tier(TierAction),
    /// Give the client a token.
    Emit {
        /// The request.
        room: Room,
        /// The token.
        token: Sampled,
    },
    /// Tell the client these log probabilities of its prompt. After a preemption some are told again, and they are the same.
    EmitScores {
        /// The request.
        room: Room,
        /// Position of the first of these tokens in the prompt, at least 1.
        first: u32,
        /// The tokens, in order.
        tokens: Vec<Sampled>,
    },
    /// The answer is complete.
    Finish {
        /// The request.
        room: Room,
        /// Why it is complete.
        reason: FinishReason,
        /// The tokens and pages that the request used.
        usage: Usage,
    },
    /// The request ended without a complete answer.
    Fail {
        /// The request.
        room: Room,
        /// The failure.
        failure: Failure,
    },
    /// For listeners: changes of the radix cache's contents, in this order.
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

/// The write of one part of a room.
#[derive(Clone, Debug, PartialEq)]
pub struct PageWrite {
    /// Names the write until it has settled.
    pub tag: Tag,
    /// The worker whose memory is written.
    pub to: Instance,
    /// The connection that the room belongs to. The write must not use a later connection: its target pages may belong
    /// to another request by then.
    pub session: u64,
    /// The notice that travels behind the data.
    pub notice: Notice,
    /// Our pages.
    pub source: Vec<PageId>,
    /// The peer's pages, pair by pair.
    pub target: Vec<PageId>,
    /// Place of the first page among the pages of the attempt.
    pub first_page: u32,
    /// The layers of these pages that are written.
    pub layers: Range<u32>,
    /// With the last part: the row, our slot for it and the peer's.
    pub aux: Option<(AuxRow, u32, u32)>,
}

/// A room whose pages are about to arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomOpening {
    /// The room.
    pub room: Room,
    /// The attempt within the room.
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
