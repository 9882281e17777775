//! Whether a lane is written straight into the receiver's pages or through staging buffers.
//!
//! A write costs the network about the same whether it carries 256 bytes or 16 KiB. Where the two pools' layouts leave only
//! small runs, as one token of some heads, it is faster to gather them into a buffer, to send that, and to scatter it on
//! the other side.

use std::fmt;
use std::str::FromStr;

use super::copy::PlanSize;

/// Smallest run that is sent on its own, in bytes, unless a whole page is made of smaller ones anyway.
///
/// Measured by others on 100 Gbit/s networks (LMCache issue 4161): runs of 16 KiB reach 95 % of the rate of large
/// ones, runs of 4 KiB 40 %.
pub const KNEE: usize = 16 << 10;

/// Fewest runs that are gathered. A staged piece costs a question and an answer, each of which wakes two threads.
/// That is about as long as a network adapter takes for some tens of small writes (1.4 us each, see LMCache issue
/// 4161).
pub const LEAST_RUNS: usize = 32;

/// When the operator wants staging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StagingMode {
    /// Staging where it pays.
    #[default]
    Auto,
    /// Staging for all pages.
    Always,
    /// No staging.
    Never,
}

impl fmt::Display for StagingMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StagingMode::Auto => "auto",
            StagingMode::Always => "always",
            StagingMode::Never => "never",
        })
    }
}

impl FromStr for StagingMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = [StagingMode::Auto, StagingMode::Always, StagingMode::Never];
        known
            .into_iter()
            .find(|mode| mode.to_string() == text)
            .ok_or_else(|| format!("unknown staging mode {text:?}: use auto, always or never"))
    }
}

/// When staging pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingPolicy {
    /// The operator's choice.
    pub mode: StagingMode,
    /// Mean bytes of a run from which on runs are written directly.
    pub knee: usize,
    /// Fewest runs that are gathered.
    pub least_runs: usize,
}

impl Default for StagingPolicy {
    fn default() -> Self {
        Self { mode: StagingMode::Auto, knee: KNEE, least_runs: LEAST_RUNS }
    }
}

/// How pages travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Each run is written to its place.
    Direct,
    /// Runs are gathered, sent together and scattered.
    Staged,
}

/// How a copy of this size should travel.
///
/// Pages that are whole and contiguous on both sides go directly unless everything is to be staged, because the
/// operator chose their size.
#[must_use]
pub fn choose(size: &PlanSize, policy: &StagingPolicy) -> Path {
    let staged = match policy.mode {
        StagingMode::Never => false,
        StagingMode::Always => size.bytes > 0,
        StagingMode::Auto => {
            let small = size.bytes < size.runs.saturating_mul(policy.knee);
            small && !size.whole_pages && size.runs >= policy.least_runs
        }
    };
    if staged { Path::Staged } else { Path::Direct }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: PlanSize = PlanSize { runs: 1000, bytes: 1000 * 512, whole_pages: false };

    #[test]
    fn small_pieces_are_staged_and_large_or_few_ones_and_whole_pages_are_not() {
        let policy = StagingPolicy::default();
        let sized = |bytes| PlanSize { bytes: SMALL.runs * bytes, ..SMALL };
        for (size, path) in [
            (SMALL, Path::Staged),
            (sized((16 << 10) - 1), Path::Staged),
            (sized(16 << 10), Path::Direct),
            (PlanSize { whole_pages: true, ..SMALL }, Path::Direct),
            (PlanSize { runs: 31, bytes: 31 * 512, ..SMALL }, Path::Direct),
            (PlanSize { runs: 32, bytes: 32 * 512, ..SMALL }, Path::Staged),
            (PlanSize::default(), Path::Direct),
        ] {
            assert_eq!(choose(&size, &policy), path, "{size:?}");
        }
        assert_eq!(choose(&SMALL, &StagingPolicy { knee: 512, ..policy }), Path::Direct);
        assert_eq!(choose(&SMALL, &StagingPolicy { knee: 513, ..policy }), Path::Staged);
    }

    #[test]
    fn the_operator_has_the_last_word() {
        let path = |mode, size: PlanSize| choose(&size, &StagingPolicy { mode, ..StagingPolicy::default() });
        let whole = PlanSize { runs: 1, bytes: 1 << 30, whole_pages: true };
        assert_eq!(path(StagingMode::Always, whole), Path::Staged);
        assert_eq!(path(StagingMode::Always, PlanSize::default()), Path::Direct, "there is nothing to stage");
        assert_eq!(path(StagingMode::Never, SMALL), Path::Direct);
        for text in ["auto", "always", "never"] {
            assert_eq!(text.parse::<StagingMode>().unwrap().to_string(), text);
        }
        assert!("on".parse::<StagingMode>().unwrap_err().contains("auto, always or never"));
    }
}
