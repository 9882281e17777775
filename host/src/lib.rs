//! `host`: serves large language models with prefill and decode on separate workers.
//!
//! This crate is the program: settings, commands and the supervisor, in [`cli`]. The parts that it starts are in other crates. A
//! request passes through them in this order:
//!
//! 1. [`host_front::http`] reads the request, and [`host_front::text`] makes token ids of it.
//! 2. [`host_front::router::Router`] picks workers from [`host_front::registry`] and calls both under a new room.
//! 3. [`host_worker::service::WorkerService`] takes the call, as a message of [`host_wire::proto`], and hands it to the thread
//!    of the scheduler.
//! 4. [`host_core::Scheduler`] decides: pages, messages, transfers, batches. `docs/internals/request.md` draws the states of a
//!    request.
//! 5. The threads of [`host_worker::Worker`] carry out these decisions. Rank threads compute batches with a
//!    [`host_executor::Executor`]. Transfer and tier threads call plugins that [`host_plugins::open_transfer`] and
//!    [`host_plugins::open_tier`] have loaded.
//! 6. Tokens go back the same way as [`host_wire::Answer`].
//!
//! `docs/internals/README.md` has a page for each part.

pub mod cli;
