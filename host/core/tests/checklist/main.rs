//! Rules for a scheduler with a radix cache, tested one leg at a time, event by event.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

mod arrivals;
mod budget;
mod cursor;
mod first_token;
mod flush;
mod given_costs;
mod leg;
mod locks;
mod namespaces;
mod offload;
mod offload_decode;
mod offload_patience;
mod offload_slow;
mod offload_writes;
mod promises;
mod resuming;
mod rooms;
mod scores;
mod sharing;
mod storage;
mod timeouts;
mod windows;
mod windows_kept;
mod windows_offload;
mod windows_recomputed;
mod windows_resumed;
mod windows_saved;
