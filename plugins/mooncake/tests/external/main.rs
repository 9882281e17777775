//! The loaded Mooncake plugin over the real Mooncake.
//!
//! A program of its own, because a process has room for one Python, which never ends. `cargo xtask test` knows by this
//! program's name that it belongs to the group that runs one at a time. Three tests also run in processes of their own:
//! `ends` counts threads and descriptors, `idle_connections` looks for all ports of its process, and `masters` stops a
//! master whose calls share Python's lock with every transfer of the process.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod copies;
mod ends;
mod idle_connections;
mod masters;
mod processes;
