//! Tests the promise of the CPU executor: the same bits for all ways to cut batches, for any threads and ranks, and for both file
//! formats.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod drafts;
mod generation;
mod gguf_loading;
mod gguf_models;
mod invariance;
mod loading;
mod ranks;
mod window_attention;
mod window_recompute;
mod world;
