//! Models of locks and queues between threads, run under drawn schedules.

#![allow(clippy::unwrap_used, reason = "a model that goes wrong is a test that fails")]

mod links;
mod schedules;
mod shares;
mod tier;
mod transfer;
