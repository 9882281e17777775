//! Registry, router and HTTP API against scripted workers.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test stops where its assumptions break")]

mod aborts;
mod answers;
mod caching;
mod canaries;
mod client;
mod errors;
mod failures;
mod fairness;
mod fake_worker;
mod fixture;
mod gated;
mod hostile;
mod identity;
mod kept;
mod many;
mod operators;
mod responses;
mod scores;
mod serving;
mod stopping;
mod tools;
mod unread;
mod waiting;
mod workers;
