//! The actions for offload tiers, and the events that come back. The rules are in the [module above](super).

use super::HostSlot;
use crate::ids::PageId;
use crate::radix::PageHash;

/// Names one action until it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TierTag(pub u64);

/// Which way a copy between pool and host memory goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the pool to host memory.
    Save,
    /// From host memory to the pool.
    Load,
}

/// Work for the offload tiers. All ranks do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierAction {
    /// Copy pages between pool and host memory.
    Copy {
        /// Names it.
        tag: TierTag,
        /// Which way.
        direction: Direction,
        /// Page and slot, pair by pair.
        pages: Vec<(PageId, HostSlot)>,
    },
    /// Ask a tier which of these pages it has. At most one per tier and tick.
    Query {
        /// Names it.
        tag: TierTag,
        /// Which tier, by its place in [`HierarchyConfig::tiers`](super::HierarchyConfig::tiers).
        tier: usize,
        /// The pages.
        names: Vec<PageHash>,
    },
    /// Read pages from a tier into slots.
    Read {
        /// Names it.
        tag: TierTag,
        /// Which tier.
        tier: usize,
        /// Page and slot, pair by pair.
        pages: Vec<(PageHash, HostSlot)>,
    },
    /// Write pages from slots to a tier.
    Write {
        /// Names it.
        tag: TierTag,
        /// Which tier.
        tier: usize,
        /// Page and slot, pair by pair.
        pages: Vec<(PageHash, HostSlot)>,
    },
    /// Ask the tier not to start the pages of a read or write that it has not started.
    Cancel {
        /// The tag of the read or write.
        tag: TierTag,
        /// The tier that got it.
        tier: usize,
    },
}

/// How one page of a batch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageEnd {
    /// All of the page was read, written or copied. Pages that were read are verified.
    Done,
    /// The tier does not have the page, or only a part of it.
    Missing,
    /// The tier did not take the page: no space, or read only.
    Refused,
    /// Another failure.
    Failed,
    /// The tier returned a page, and its contents are not those that were written.
    Damaged,
}

/// An event from the offload tiers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierEvent {
    /// The answer to a [`TierAction::Query`], page by page in its order. All false when the tier could not answer.
    Answered {
        /// Which query.
        tag: TierTag,
        /// Whether a read would find the page now, on every rank.
        found: Vec<bool>,
    },
    /// Pages of a batch have ended.
    Ended {
        /// Which batch.
        tag: TierTag,
        /// Places in the batch, each named once in all, and how they ended.
        pages: Vec<(u32, PageEnd)>,
    },
}
