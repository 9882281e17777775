//! The two sides of a hand-over: the state of a transfer on its prefill worker and on its decode worker.
//!
//! ```text
//! decode   Incoming ── Reserve (pages to write) ──────────────►  Outgoing   prefill
//!              ◄───── parts: pages, layers, notices ──────────────  │
//!              │                                                    │
//!          Reclaiming (prefill sends no more)          Orphans (the request has not come yet)
//! ```
//!
//! The types decide what a part is and when a transfer is complete. They know no pool and no other request. The
//! [scheduler](crate::scheduler) sends messages and moves requests. The messages of both sides are in
//! [`message`](crate::message).

mod incoming;
mod outgoing;

pub(crate) use incoming::{Incoming, Reclaiming};
pub(crate) use outgoing::{Orphan, Orphans, Outgoing, TransferPart, Wanted};
