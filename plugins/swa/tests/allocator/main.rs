//! The allocator against books kept the naive way, against the ratio's formula, and against nonsense.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

mod budgets;
mod fuzz;
mod pool;
mod safety;
