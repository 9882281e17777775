//! The deciding part of `host`.
//!
//! Everything here takes events and the time as input and returns actions. There are no threads, sockets, files,
//! clocks or randomness in this crate, so the same code runs live and under a virtual clock.

#![forbid(unsafe_code)]

pub mod batch;
pub mod ids;
pub mod layout;

pub use batch::{Batch, Sampled, Sampling, Sequence, SequenceOutput};
pub use ids::{Instance, PageId, Room, Time};
pub use layout::{Dtype, KvLayout, KvShape};
