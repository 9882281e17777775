//! The workers that these tests are about.

use std::time::Duration;

use host_core::radix::Policy;
use host_core::{Config, Role};

/// A worker with a cache.
pub fn config(role: Role, pages: u32) -> Config {
    Config {
        radix_cache: Some(Policy::Lru),
        max_attempts: 2,
        bootstrap_timeout: Duration::from_secs(10),
        peer_patience: Duration::from_secs(5),
        ..host_sim::config(role, pages)
    }
}

/// Tokens that are their own numbers.
pub fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}
