//! Tests of finding, checking, loading and calling plugin files. Unusable files are refused with a sentence.
//!
//! Where a file could end its process, another process opens it (`host_test_peer::process`). Tests of panics in calls run in a
//! process of their own, because a failure ends it. Tests of the log do too, because a process has one log.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod failure_matrix;
mod oversized;
mod panics_are_contained;
mod refuses;
mod requirements;
mod roles_cross_the_boundary;
mod services;
