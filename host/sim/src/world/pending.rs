//! What is under way, and what happens when its time has come.

use host_core::hierarchy::{Direction, HostSlot, TierTag};
use host_core::message::Message;
use host_core::radix::PageHash;
use host_core::request::Request;
use host_core::scheduler::PageWrite;
use host_core::{Event, Instance, PageId, Room};

/// Something under way that happens at its time.
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
    /// A worker that stood still goes on.
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
    /// What arrived is copied into the pages that it is for.
    Copy(Box<Arrival>),
    /// A worker looks whether a room that it gave up is still copied.
    Close {
        at: Instance,
        room: Room,
    },
    /// A query, a copy, a read or a write goes on, or ends.
    Tier {
        at: Instance,
        work: TierWork,
    },
}

/// A write on its way.
pub(super) struct Landing {
    pub write: PageWrite,
    pub from: Instance,
    /// Digest of what is sent.
    pub sum: u64,
    /// What it carries, where that was read when the write was begun. Else it is read when it lands.
    pub words: Option<Vec<Vec<u64>>>,
    /// Its number among the flights.
    pub flight: u64,
}

/// What a write brought.
pub(super) struct Arrival {
    pub write: PageWrite,
    pub words: Vec<Vec<u64>>,
    pub sum: u64,
}

/// Something of a tier that was begun.
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
