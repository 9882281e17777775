//! The file tier keeps the pages that it was given, within its limits, and returns no other bytes, also when its files
//! are damaged and other processes are killed.
//!
//! Other processes run the tests named `child` and `inside`: some are killed, and some have a small file system mounted.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

mod keeps_limits;
mod keeps_pages;
mod survives_damage;
mod survives_kills;
mod world;
