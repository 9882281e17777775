//! The allocator against books kept the naive way, against another implementation's numbers, and against nonsense.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

mod fuzz;
mod pool;
mod safety;
mod vectors;
