//! The messages that two workers exchange about a room.
//!
//! | decode says | prefill answers | meaning |
//! | --- | --- | --- |
//! | [`Reserve`](Body::Reserve) | [`Reserved`](Body::Reserved) or [`Refused`](Body::Refused) | these pages are yours to write |
//! | [`Commit`](Body::Commit) | [`Committed`](Body::Committed) | everything arrived and was verified, so let go of the room |
//! | [`Abort`](Body::Abort) | [`Drained`](Body::Drained) | stop, and answer only when none of the room's writes is in flight |
//!
//! Prefill says [`PrefillFailed`](Body::PrefillFailed), decode answers [`PrefillFailedSeen`](Body::PrefillFailedSeen).
//!
//! Every message except an answer is repeated until it is answered, under the same id. Both sides must tolerate
//! repeats, loss and any order. The receiver drops a message older than the sender's *floor* (the lowest id that the
//! sender still repeats). So a `Reserve` that was held up in the network cannot revive a room that was aborted since.

use crate::ids::{PageId, Room};

/// One message. `id` counts up from 1 per sender and receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Names the message among all from the same sender.
    pub id: u64,
    /// The message that this answers.
    pub answers: Option<u64>,
    /// The room.
    pub room: Room,
    /// The attempt within the room. It is raised when pages are to be sent again.
    pub attempt: u32,
    /// The content.
    pub body: Body,
}

/// The content of a message about a room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Decode has pages for the room.
    Reserve(Reserve),
    /// Prefill will write them.
    Reserved,
    /// Prefill will not write them.
    Refused {
        /// The reason, as text.
        message: String,
        /// Whether another try may succeed.
        retryable: bool,
    },
    /// Decode has verified all pages. Prefill may let go of its pages.
    Commit,
    /// Prefill has let go of its pages.
    Committed,
    /// Decode gives the room up.
    Abort,
    /// Nothing of the room is in flight any more, and nothing will be.
    Drained,
    /// Prefill gives the room up.
    PrefillFailed {
        /// The reason, as text.
        message: String,
        /// Whether another try may succeed.
        retryable: bool,
    },
    /// Decode has taken note of a `PrefillFailed`.
    PrefillFailedSeen,
}

/// The pages of decode that prefill is to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserve {
    /// Decode's pages for the prompt from `decode_prefix_len` on, in order. At the first attempt these are all pages to its
    /// end. At a later one there may be fewer, when decode lacks a span that it said it would hold.
    pub pages: Vec<PageId>,
    /// Decode's pages for the window parts that its first step sees
    /// ([`WindowShape::tail`](crate::window::WindowShape::tail)). Prefill sends these with the last part. There are
    /// none for models without sliding layers, and none at a later attempt when an earlier one has brought them.
    pub window: Vec<PageId>,
    /// Prompt tokens before the pages to be sent, which decode holds or restores itself. They fill whole pages.
    pub decode_prefix_len: u32,
    /// Tokens of the whole prompt. Both sides must have the same value.
    pub prompt_tokens: u32,
    /// Decode's aux row for this room.
    pub aux_slot: u32,
    /// [Fingerprint](crate::radix::NamespaceKey::fingerprint) of the namespace. Both sides must have the same value.
    pub namespace: u64,
}
