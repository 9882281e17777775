//! The CPU executor, by what it promises: the same bits however a batch is cut, spread over threads and ranks, or read from a file.

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
