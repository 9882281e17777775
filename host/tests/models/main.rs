//! Tests with models: real ones, small ones on a GPU, and models with sliding layers.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod gpu;
mod real_models;
mod sliding_window;
mod window_servers;
mod window_walk;
