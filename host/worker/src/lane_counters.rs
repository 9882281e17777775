//! Counters of bytes and writes over lanes, direct and staged.

use std::sync::atomic::{AtomicU64, Ordering};

use host_plugin_api::transfer::Write;

/// Counters of one way, direct or staged, over all ranks.
#[derive(Debug, Default)]
pub struct Way {
    bytes: AtomicU64,
    descriptors: AtomicU64,
}

impl Way {
    /// Counts writes that a plugin accepted.
    pub(super) fn count(&self, writes: &[Write]) {
        let bytes = writes.iter().map(|write| u64::from(write.length)).sum();
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.descriptors.fetch_add(writes.len() as u64, Ordering::Relaxed);
    }

    /// Bytes, and the writes that carried them.
    #[must_use]
    pub fn read(&self) -> (u64, u64) {
        (self.bytes.load(Ordering::Relaxed), self.descriptors.load(Ordering::Relaxed))
    }
}

/// Counters of a worker.
#[derive(Debug, Default)]
pub struct LaneCounters {
    /// From pool to pool.
    pub direct: Way,
    /// From staging memory to staging memory.
    pub staged: Way,
}

impl LaneCounters {
    /// Both ways, by name.
    #[must_use]
    pub fn ways(&self) -> [(&'static str, &Way); 2] {
        [("direct", &self.direct), ("staged", &self.staged)]
    }
}
