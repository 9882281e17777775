//! NIXL's storage tier in this process, and `host` commands on the same pages.
//!
//! It is a program of its own, because NIXL's libraries and their threads stay in a process. Other processes run the tests named
//! `inside`, for instance with a small file system mounted or while a server hangs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod objects;
mod place;
mod tier;
