//! Models of protocols between threads, run in every order of steps.

#![allow(clippy::unwrap_used, reason = "a model that goes wrong is a test that fails")]

mod model;
mod ranks;
mod shm;
mod wakes;
