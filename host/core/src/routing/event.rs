//! What a worker tells routers of its cache: change by change, or all of it in parts.

use super::key::BlockKey;

/// What a worker says of its cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// These blocks are in the cache now. Each follows the one before.
    Stored(Vec<BlockKey>),
    /// These are no longer.
    Removed(Vec<BlockKey>),
    /// Nothing is.
    Cleared,
}

/// A part of a [`Snapshot`](super::Snapshot).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotPart {
    /// As in [`Snapshot::number`](super::Snapshot::number).
    pub number: u64,
    /// Counts the parts from 0.
    pub part: u32,
    /// Whether none follows.
    pub last: bool,
    /// Names of pages.
    pub keys: Vec<BlockKey>,
}
