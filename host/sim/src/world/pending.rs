//! Events that are pending, and their data.

use host_core::hierarchy::{Direction, HostSlot, TierTag};
use host_core::message::Message;
use host_core::radix::PageHash;
use host_core::request::Request;
use host_core::scheduler::PageWrite;
use host_core::{Event, Instance, PageId, Room};

/// An event that happens when its time has come.
pub(super) enum Pending {
    /// A request reaches a worker.
    Submit {
        to: Instance,
        request: Request,
    },
    /// A client leaves.
    Cancel(Room),
    /// The router sees a leg break.
    Lose {
        room: Room,
        leg: Instance,
    },
    /// A worker that was frozen may continue.
    Thaw {
        place: usize,
    },
    Deliver {
        to: Instance,
        from: Instance,
        floor: u64,
        message: Message,
    },
    /// A worker has computed so many layers of a batch.
    Layers {
        at: Instance,
        batch: u64,
        layers: u32,
    },
    Computed {
        at: Instance,
        batch: u64,
    },
    /// A worker gets an event.
    Tell {
        at: Instance,
        event: Event,
    },
    /// A prefill worker gets the handshake.
    Handshake {
        decode: Instance,
        prefill: Instance,
        floor: u64,
    },
    /// A decode worker gets the answer.
    Connected {
        decode: Instance,
        prefill: Instance,
    },
    Fence {
        at: Instance,
        peer: Instance,
        session: u64,
    },
    Land(Box<Landing>),
    /// Data that arrived is copied into its pages.
    Copy(Box<Arrival>),
    /// A worker checks whether data is still copied into a room that it gave up.
    Close {
        at: Instance,
        room: Room,
    },
    /// A query, a copy, a read or a write proceeds or ends.
    Tier {
        at: Instance,
        work: TierWork,
    },
}

/// A write on its way.
pub(super) struct Landing {
    pub write: PageWrite,
    pub from: Instance,
    /// Digest of the data that is sent.
    pub sum: u64,
    /// The data, if it was read when the write began. Otherwise it is read when the write lands.
    pub words: Option<Vec<Vec<u64>>>,
    /// Its number among the flights.
    pub flight: u64,
}

/// A write that has landed, with its data.
pub(super) struct Arrival {
    pub write: PageWrite,
    pub words: Vec<Vec<u64>>,
    pub sum: u64,
}

/// Work in an offload tier that was begun.
pub(super) enum TierWork {
    Copy { tag: TierTag, direction: Direction, pages: Vec<(PageId, HostSlot)>, read: Vec<Vec<u64>> },
    Query { tag: TierTag, tier: usize, names: Vec<PageHash> },
    Read { tag: TierTag, tier: usize, page: (u32, PageHash, HostSlot) },
    Write { tag: TierTag, tier: usize, page: (u32, PageHash, HostSlot) },
}

impl TierWork {
    pub(super) fn tag(&self) -> TierTag {
        match self {
            TierWork::Copy { tag, .. }
            | TierWork::Query { tag, .. }
            | TierWork::Read { tag, .. }
            | TierWork::Write { tag, .. } => *tag,
        }
    }
}
