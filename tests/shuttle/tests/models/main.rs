//! Locks and queues between threads, under schedules that are drawn.

#![allow(clippy::unwrap_used, reason = "a model that goes wrong is a test that fails")]

mod links;
mod schedules;
mod shares;
mod tier;
mod transfer;
