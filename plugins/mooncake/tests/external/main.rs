//! The loaded Mooncake plugin over the real Mooncake.
//!
//! A program of its own, because a process has room for one Python, which never ends in it. `cargo xtask test` knows by its
//! name that it belongs to the group that runs one at a time. Three tests run in a process of their own besides: `ends`
//! counts threads and descriptors, `idle_connections` looks for all ports of its process, and `masters` stops what shares
//! Python's lock with every transfer of its process.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod copies;
mod ends;
mod idle_connections;
mod masters;
mod processes;
