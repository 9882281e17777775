//! The events by which routers follow a worker's cache: change by change, or a snapshot in parts.

use super::key::BlockKey;

/// A change of a worker's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// These blocks are in the cache now. Each follows the one before.
    Stored(Vec<BlockKey>),
    /// These blocks are no longer in the cache.
    Removed(Vec<BlockKey>),
    /// The cache is empty.
    Cleared,
}

/// A part of a [`Snapshot`](super::Snapshot).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotPart {
    /// As in [`Snapshot::number`](super::Snapshot::number).
    pub number: u64,
    /// Counts the parts from 0.
    pub part: u32,
    /// Whether no part follows.
    pub last: bool,
    /// Names of pages.
    pub keys: Vec<BlockKey>,
}
