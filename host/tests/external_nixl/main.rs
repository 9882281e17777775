//! NIXL's storage tier in this very process, beside `host` commands on the same pages.
//!
//! A program of its own, because NIXL's libraries stay in a process, with their threads. Tests named `inside` are what other
//! processes run, where a small file system is mounted or while a server hangs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod objects;
mod place;
mod tier;
