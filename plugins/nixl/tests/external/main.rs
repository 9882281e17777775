//! The loaded NIXL plugin over the real NIXL.
//!
//! A program of its own, because NIXL's libraries stay in a process, with their threads. `cargo xtask test` knows by its name
//! that it belongs to the group that runs one at a time.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod processes;
mod ranks;
mod submissions;
