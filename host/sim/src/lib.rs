//! A deterministic world around the scheduler.
//!
//! The [`Scheduler`](host_core::Scheduler) takes events and the time, and returns actions. In a live worker, threads
//! turn actions into events. Here a world does so, under a virtual clock and one seed. The decisions come from the same
//! code, an hour takes a second, and a failed run is repeated by its seed.
//!
//! ```text
//! Clients ── asks ──────────►┌───────────────────── World ─────────────────────┐
//!         ◄── tokens, ends ──│     Agenda: the clock, and what happens when    │
//!                            │                                                 │
//! Times ── how long ────────►│  Worker 0          messages         Worker 1    │
//!          each Work takes   │  Scheduler  ◄──── page writes ────► Scheduler   │ ...
//!                            │  pool             (lost, late,      pool        │
//! Faults ── how often ──────►│  host memory       twice, cut)      host memory │
//!           what goes wrong  │       └───────────── storage ────────────┘      │
//!                            │                                                 │
//! Random ── one seed ───────►│   Kv: what pages hold, and the right answer     │──► Outcome
//!                            └─────────────────────────────────────────────────┘
//! ```
//!
//! There are two levels.
//!
//! - A [`World`] has any number of workers that talk to each other. It is given a seed, the shape of the model's
//!   [`Kv`], [`Faults`], a model of [`Times`], and [`Clients`]. It runs [until nothing is left to do](World::run) or
//!   [until a time](World::run_until). Along the way it checks rules that always hold: each answer is right, no write
//!   lands on another request's page, nothing is sent twice, no room is forgotten while its pages are copied, and in
//!   the end every page is free.
//! - A [`Leg`] is one worker whose other side is a test. The test says what the peer, the executor and the tiers do,
//!   event by event, and looks at what the worker does.
//!
//! Both build on [`config`] and [`request`], which set every field that a test is not about, on [`Random`] and on the
//! [`Agenda`], which other simulations may use as they are.
//!
//! ```
//! use std::time::Duration;
//! use host_core::Role;
//! use host_core::pool::PoolLimits;
//! use host_sim::{Ask, Erratic, Faults, Kv, PAGE, World, config, request};
//!
//! let kv = Kv { page_tokens: PAGE, layers: 2, vocabulary: 1000, sliding: None, words: true };
//! let faults = Faults { loss: 0.2, flip: 0.05, staged: 0.5, ..Faults::default() };
//! let mut world = World::new(7, kv, faults, Erratic, ());
//! let [prefill, decode] = [Role::Prefill, Role::Decode].map(|role| {
//!     let layers = host_core::layer_groups::LayerGroups::off(2);
//!     world.add(host_core::Config { layer_groups: layers, ..config(role, 20) }, PoolLimits::shared(20))
//! });
//! world.ask(Ask {
//!     request: request(0, &[1, 2, 3, 4, 5], 3),
//!     answers: (decode, Duration::ZERO),
//!     prefill: Some((prefill, Duration::from_millis(3))),
//!     leaves: None,
//! });
//! world.run();
//! assert_eq!(world.outcome().finished, 1);
//! ```
//!
//! Nothing here uses a thread, a file, a clock or a socket, and the seed is the only source of randomness.

#![forbid(unsafe_code)]

mod agenda;
mod faults;
mod fixture;
mod kv;
mod leg;
mod random;
mod times;
mod world;

pub use agenda::Agenda;
pub use faults::{Faults, Outcome};
pub use fixture::{PAGE, config, layer_groups, names, outputs, peer, request, sampled};
pub use kv::{Kv, Memory, Sliding};
pub use leg::{DRAWN, Leg, PEER};
pub use random::{Random, mix, scramble};
pub use times::{Erratic, Times, Work};
pub use world::{Ask, Clients, Ending, Mishap, OpenRequest, World};
