//! The file tier keeps what it was given, within its limits, and gives nothing else back, whatever becomes of its files and of
//! other processes.
//!
//! Tests named `child` and `inside` are what other processes run: some are killed, and some have a small file system mounted.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

mod keeps_limits;
mod keeps_pages;
mod survives_damage;
mod survives_kills;
mod world;
