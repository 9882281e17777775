//! Plugin files are found, checked, loaded and called. Those that cannot be are refused with a sentence.
//!
//! Where a file could end its process, another process opens it (`host_test_peer::process`). Panics in calls and the log run
//! in a process of their own, because a failure ends the one and there is one log per process.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod failure_matrix;
mod oversized;
mod panics_are_contained;
mod refuses;
mod requirements;
mod roles_cross_the_boundary;
mod services;
