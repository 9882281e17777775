//! How much memory a worker stages in, and when.

use host_core::transfer::{StagingMode, StagingPolicy};

/// Memory in which small pieces of KV are packed for a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staging {
    /// When it is used.
    pub policy: StagingPolicy,
    /// Bytes of all ranks; 0 for none.
    pub bytes: usize,
}

impl Default for Staging {
    /// Where it pays, 128 MiB.
    fn default() -> Self {
        Self { policy: StagingPolicy::default(), bytes: 128 << 20 }
    }
}

impl Staging {
    /// What each of so many ranks has.
    pub(super) fn bytes_of_rank(&self, ranks: usize) -> usize {
        match self.policy.mode {
            StagingMode::Never => 0,
            StagingMode::Auto | StagingMode::Always => self.bytes / ranks.max(1),
        }
    }
}
