//! How often a request is tried again, and after which wait.

use std::time::Duration;

use host_wire::clock::Instant;

use super::Retry;

/// Longest wait for a pair of workers that does not come together.
const LONGEST_APART: Duration = Duration::from_millis(500);

/// The tries of one request.
#[derive(Debug, Default)]
pub(super) struct Tries {
    /// Since the last one that made progress.
    row: u32,
    /// When the first of the row began, or the one before it failed with progress.
    row_since: Option<Instant>,
    /// Those that failed after their workers had begun, or may have, in all.
    losses: u32,
    /// Those whose workers did not come together, in all.
    apart: u32,
    /// Since when no pair of workers has come together, and how often that was tried.
    apart_since: Option<(Instant, u32)>,
}

impl Tries {
    /// Another one.
    pub fn begin(&mut self, now: Instant) {
        self.row += 1;
        self.row_since.get_or_insert(now);
    }

    /// Since when the tries in a row have brought next to nothing.
    pub fn row_since(&self) -> Option<Instant> {
        self.row_since
    }

    /// The workers of the last one serve it.
    pub fn came_together(&mut self) {
        self.apart_since = None;
    }

    /// Tries since the last one that made progress.
    pub fn in_a_row(&self) -> u32 {
        self.row
    }

    /// Tries that failed, in all.
    pub fn failed(&self) -> u32 {
        self.losses + self.apart
    }

    /// The wait before the next try after one that failed; `None` if that was the last.
    ///
    /// A request may be what its workers break on, so a row of tries is short. When workers break that did not serve it
    /// (`others_break`), the cause is another, and the row may be longer.
    pub fn after_loss(
        &mut self,
        retry: &Retry,
        now: Instant,
        made_progress: bool,
        others_break: bool,
    ) -> Option<Duration> {
        self.losses += 1;
        if made_progress {
            self.row = 1;
            self.row_since = Some(now);
        }
        let wait = retry.backoff.saturating_mul(1_u32 << self.row.saturating_sub(1).min(10));
        let tries = if others_break { retry.tries_amid_losses } else { retry.tries };
        (self.row < tries && self.losses < retry.losses && wait < retry.total).then_some(wait)
    }

    /// As [`after_loss`](Self::after_loss), of a try whose workers did not come together.
    ///
    /// Such a try costs nothing, and is over in a millisecond. A router that was cut off counts a worker as live that has died
    /// meanwhile, and hears of its successor a moment later: so these tries are bounded by time, not by their number.
    pub fn after_apart(&mut self, retry: &Retry, now: Instant) -> Option<Duration> {
        self.apart += 1;
        self.row = self.row.saturating_sub(1);
        if self.row == 0 {
            self.row_since = None;
        }
        let (since, times) = self.apart_since.get_or_insert((now, 0));
        *times += 1;
        let wait = retry.backoff.saturating_mul(1_u32 << (*times - 1).min(10)).min(LONGEST_APART);
        (now.saturating_duration_since(*since) + wait < retry.total).then_some(wait)
    }
}
