//! The part of `host` that decides.
//!
//! Everything here takes events and the time as input and returns actions. There are no threads, sockets, files,
//! clocks or randomness in this crate, so the same code runs live and under a virtual clock. Start reading at
//! [`scheduler`].

#![forbid(unsafe_code)]

pub mod aux_row;
pub mod batch;
mod cache;
mod config;
mod draft;
mod hand_over;
pub mod heads;
pub mod hierarchy;
pub mod histogram;
pub mod ids;
pub mod integrity;
pub mod layer_groups;
pub mod layout;
pub mod message;
pub mod notice;
mod outbox;
pub mod pool;
pub mod radix;
pub mod rank_barrier;
pub mod request;
pub mod routing;
pub mod sampling;
pub mod scheduler;
pub mod staging;
pub mod transfer;
pub mod window;

pub use batch::{Batch, Sampled, Scored, Sequence, SequenceOutput, Undrawn};
pub use ids::{Instance, PageId, Room, Time};
pub use layout::{Dtype, KvLayout, KvShape};
pub use sampling::{Draw, Sampling, Shaping};
pub use scheduler::{Action, Config, Event, Role, Scheduler};
