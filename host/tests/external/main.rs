//! Servers over the real NIXL, the real Mooncake and a real S3 server, in processes of their own.
//!
//! It is in the group of programs that run one at a time: `cargo xtask test` knows it by its name.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod checks;
mod mooncake_store;
mod mooncake_walk;
mod nixl_bucket;
mod nixl_walk;
