//! KV that is kept for later requests, in the pool, in host memory and in storage, changes no answer, and every page stays
//! accounted for.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod allocators;
mod conversations;
mod hierarchical_cache;
mod hierarchical_faults;
mod hierarchical_full_disk;
mod preemption;
mod radix_cache;
mod storage_away;
mod storage_stops_or_is_left_behind;
mod tier_commands;
mod window_hierarchy;
