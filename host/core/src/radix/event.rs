//! Events of a tree: changes of its contents.

use super::chain::PageHash;
use super::namespace::Namespace;
use crate::ids::PageId;

/// A change of a tree's contents.
///
/// Pages are named by their numbers, which name them uniquely for as long as they are cached. The publisher turns the
/// numbers into [`PageHash`](super::PageHash)es, off the scheduler's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeEvent<'a> {
    /// Pages that were not there before.
    Stored {
        /// The namespace of the prefix.
        namespace: Namespace,
        /// Where the hash chain of that namespace starts.
        seed: PageHash,
        /// The page before the first one. `None` if the first one starts the sequence.
        parent: Option<PageId>,
        /// The pages, in order.
        pages: &'a [PageId],
        /// Their tokens.
        tokens: &'a [u32],
    },
    /// Pages that are gone, always from the ends of sequences.
    Removed {
        /// The pages, in order.
        pages: &'a [PageId],
    },
    /// Everything is gone.
    Cleared,
}

/// Takes events as they happen. Sequence numbers start at 1 and have no gaps.
pub trait EventSink {
    /// Takes one event, and must not wait.
    fn event(&mut self, sequence: u64, event: TreeEvent<'_>);
}

/// A sink without a listener.
impl EventSink for () {
    fn event(&mut self, _sequence: u64, _event: TreeEvent<'_>) {}
}
