//! What a scheduler with a radix cache must keep to, one leg at a time, event by event.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

#[allow(dead_code)]
mod flush;
mod leg;
mod namespaces;
mod sharing;
