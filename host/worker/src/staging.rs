//! Settings of staging: when pages go through staging memory, and how much of it there is.

use host_core::transfer::{StagingMode, StagingPolicy};
use host_plugin_api::TransferLimits;

/// Memory in which small pieces of KV are packed for a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingSettings {
    /// When it is used.
    pub mode: StagingMode,
    /// Bytes from which on a piece is written directly. `None` leaves that to the transfer plugin, which knows what a short write
    /// costs it.
    pub knee: Option<usize>,
    /// Bytes of all ranks, 0 for none.
    pub bytes: usize,
}

impl Default for StagingSettings {
    /// Staging in the default mode, with 128 MiB.
    fn default() -> Self {
        Self { mode: StagingMode::default(), knee: None, bytes: 128 << 20 }
    }
}

impl StagingSettings {
    /// The policy of a rank whose plugin has these limits. The knee is the operator's, else the plugin's, else one that
    /// suits most links.
    pub(super) fn policy(&self, limits: &TransferLimits) -> StagingPolicy {
        let default = StagingPolicy::default();
        let of_plugin = usize::try_from(limits.short_writes).ok().filter(|bytes| *bytes > 0);
        StagingPolicy { mode: self.mode, knee: self.knee.or(of_plugin).unwrap_or(default.knee), ..default }
    }

    /// Bytes of staging memory of each of so many ranks.
    #[must_use]
    pub fn bytes_of_rank(&self, ranks: usize) -> usize {
        match self.mode {
            StagingMode::Never => 0,
            StagingMode::Auto | StagingMode::Always => self.bytes / ranks.max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operator_knows_better_than_the_plugin_and_the_plugin_better_than_we() {
        let silent = TransferLimits::new(1, 1);
        let knee = |knee, limits: TransferLimits| {
            StagingSettings { knee, ..StagingSettings::default() }.policy(&limits).knee
        };
        assert_eq!(knee(None, silent), StagingPolicy::default().knee);
        assert_eq!(knee(None, TransferLimits { short_writes: 256, ..silent }), 256);
        assert_eq!(knee(Some(4096), TransferLimits { short_writes: 256, ..silent }), 4096);
    }
}
