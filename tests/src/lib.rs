//! Fixtures shared by the tests.

#![allow(clippy::expect_used, reason = "a fixture that fails is a test that fails")]

pub mod caches;
pub mod cluster;
pub mod fetched;
pub mod gguf;
pub mod hold;
pub mod lines;
pub mod llama_cpp;
pub mod model;
pub mod ports;
pub mod program;
pub mod streaming;
pub mod wait;
