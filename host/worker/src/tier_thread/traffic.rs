//! Bytes that move to and from offload tiers.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes on one of a worker's paths to and from offload tiers, over all ranks.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    down: AtomicU64,
    up: AtomicU64,
}

impl Traffic {
    /// Counts bytes that went away from the pool.
    pub(super) fn went_down(&self, bytes: usize) {
        self.down.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts bytes that came towards the pool.
    pub(super) fn came_up(&self, bytes: usize) {
        self.up.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes that came towards the pool, and bytes that went away from it.
    pub(crate) fn up_and_down(&self) -> (u64, u64) {
        (self.up.load(Ordering::Relaxed), self.down.load(Ordering::Relaxed))
    }
}
