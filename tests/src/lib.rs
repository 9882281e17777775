//! Fixtures shared by the tests.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

pub mod alone;
pub mod built;
pub mod c_plugins;
pub mod caches;
pub mod cluster;
pub mod cuda;
pub mod defect;
pub mod elf;
pub mod fetched;
pub mod gguf;
pub mod hold;
pub mod lines;
pub mod llama_cpp;
pub mod mixed_load;
pub mod model;
pub mod mooncake;
pub mod mooncake_pool;
pub mod nixl;
pub mod plugin_files;
pub mod ports;
pub mod program;
pub mod s3;
#[cfg(feature = "signing")]
pub mod signing;
pub mod skip;
mod stored;
pub mod streaming;
pub mod variant;
pub mod wait;
