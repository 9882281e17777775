//! The two sides of a hand-over: what prefill knows of a transfer away from it, and decode of a transfer towards it.
//!
//! ```text
//! decode   Incoming ── Reserve (pages to write) ──────────────►  Outgoing   prefill
//!              ◄───── parts: pages, layers, notices ──────────────  │
//!              │                                                    │
//!          Reclaiming (prefill sends no more)          Orphans (the request has not come yet)
//! ```
//!
//! The types decide what a part is and when a transfer is complete. They know no pool and no other request. The
//! [scheduler](crate::scheduler) sends messages and moves requests. What the two sides say is in [`message`](crate::message).

mod incoming;
mod outgoing;

pub(crate) use incoming::{Incoming, Reclaiming};
pub(crate) use outgoing::{Orphan, Orphans, Outgoing, Part, Wanted};
