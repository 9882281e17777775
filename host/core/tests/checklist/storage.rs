//! Host memory and storage for the workers that these tests are about.

use std::time::Duration;

use host_core::hierarchy::{HierarchyConfig, TierConfig};
use host_core::{Config, Role};

use super::leg::config;

/// A tier that answers in a millisecond and reads a page in one more.
pub fn tier() -> TierConfig {
    TierConfig { writes: true, latency: Duration::from_millis(1), bytes_per_second: 1e6 }
}

/// Host memory of so many slots of 1000 bytes, and so many tiers.
pub fn hierarchy(slots: u32, tiers: usize) -> HierarchyConfig {
    HierarchyConfig::new(slots, 1_000, vec![tier(); tiers])
}

pub fn with_offload(role: Role, pages: u32, offload: HierarchyConfig) -> Config {
    Config { hierarchy: Some(offload), reserved_decode_tokens: 1, ..config(role, pages) }
}
