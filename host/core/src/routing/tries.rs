//! How often a request is tried again, and after which wait.

use std::ops::Add;
use std::time::Duration;

/// The limits of retries.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    /// Most tries in a row that bring next to nothing.
    pub tries: u32,
    /// Like `tries`, for the case that calls to workers that do not serve the request break meanwhile.
    pub tries_amid_losses: u32,
    /// Most workers that one answer loses in all.
    pub losses: u32,
    /// No try begins later than this after the request came, or after the failure of the try before. No request waits longer than
    /// this for a worker to appear.
    pub total: Duration,
    /// Longest time of a request, from its arrival to the end of its answer.
    pub longest: Duration,
    /// Wait before the second try. The wait doubles with each try.
    pub backoff: Duration,
    /// Whether an answer that breaks off continues on another worker. If not, an answer that is streamed to the client ends
    /// with an error.
    pub resume: bool,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            tries: 4,
            tries_amid_losses: 10,
            losses: 24,
            total: Duration::from_secs(30),
            longest: Duration::from_secs(600),
            backoff: Duration::from_millis(20),
            resume: true,
        }
    }
}

/// A failed try that brought so many tokens made progress: a new row of tries starts after it.
const PROGRESS: usize = 32;
/// Longest wait before the next try when a pair of workers did not come together.
const LONGEST_APART: Duration = Duration::from_millis(500);

/// The tries of one request. `T` is a point in time of the router's clock.
#[derive(Debug)]
pub struct Tries<T> {
    /// Tries since the last one that made progress.
    row: u32,
    /// When the first try of the row began, or when the try before the row failed with progress.
    row_since: Option<T>,
    /// All tries that failed after their workers had begun, or may have begun.
    losses: u32,
    /// All tries whose workers did not come together.
    apart: u32,
    /// Since when no pair of workers has come together, and how often that was tried.
    apart_since: Option<(T, u32)>,
}

impl<T> Default for Tries<T> {
    fn default() -> Self {
        Self { row: 0, row_since: None, losses: 0, apart: 0, apart_since: None }
    }
}

impl<T: Copy + Ord + Add<Duration, Output = T>> Tries<T> {
    /// Begins another try.
    pub fn begin(&mut self, now: T) {
        self.row += 1;
        self.row_since.get_or_insert(now);
    }

    /// Since when the tries in a row have brought next to nothing.
    #[must_use]
    pub fn row_since(&self) -> Option<T> {
        self.row_since
    }

    /// Takes note that the workers of the last try came together and serve it.
    pub fn came_together(&mut self) {
        self.apart_since = None;
    }

    /// Takes note that there was no worker to try. Those that come next have their own time to come together.
    pub fn lacked_workers(&mut self) {
        self.apart_since = None;
    }

    /// Tries since the last one that made progress.
    #[must_use]
    pub fn in_a_row(&self) -> u32 {
        self.row
    }

    /// Tries that failed, in all.
    #[must_use]
    pub fn failed(&self) -> u32 {
        self.losses + self.apart
    }

    /// The wait before the next try after one that failed with `brought` tokens, or `None` if that was the last.
    ///
    /// The request itself may cause its workers to break, so a row of tries is short. When workers break that did not
    /// serve it (`others_break`), the cause is another one, and the row may be longer.
    pub fn after_loss(
        &mut self,
        retry: &Retry,
        now: T,
        brought: usize,
        others_break: bool,
    ) -> Option<Duration> {
        self.losses += 1;
        if brought >= PROGRESS {
            self.row = 1;
            self.row_since = Some(now);
        }
        let wait = retry.backoff.saturating_mul(1_u32 << self.row.saturating_sub(1).min(10));
        let tries = if others_break { retry.tries_amid_losses } else { retry.tries };
        (self.row < tries && self.losses < retry.losses && wait < retry.total).then_some(wait)
    }

    /// Like [`after_loss`](Self::after_loss), for a try whose workers did not come together.
    ///
    /// Such a try costs nothing, and is over in a millisecond. A router that was cut off may count a dead worker as live, and
    /// hear of its successor a moment later. So these tries are bounded by time, not by their number.
    pub fn after_apart(&mut self, retry: &Retry, now: T) -> Option<Duration> {
        self.apart += 1;
        self.row = self.row.saturating_sub(1);
        if self.row == 0 {
            self.row_since = None;
        }
        let (since, times) = self.apart_since.get_or_insert((now, 0));
        *times += 1;
        let wait = retry.backoff.saturating_mul(1_u32 << (*times - 1).min(10)).min(LONGEST_APART);
        (now + wait < *since + retry.total).then_some(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Time;

    const MS: Duration = Duration::from_millis(1);

    fn waits(mut next: impl FnMut(&mut Tries<Time>) -> Option<Duration>) -> Vec<u128> {
        let mut tries = Tries::default();
        let mut waits = Vec::new();
        loop {
            tries.begin(Time::default());
            match next(&mut tries) {
                Some(wait) => waits.push(wait.as_millis()),
                None => return waits,
            }
        }
    }

    #[test]
    fn a_row_of_tries_is_short_and_longer_while_other_workers_break() {
        let retry = Retry::default();
        let rows =
            [false, true].map(|others| waits(|tries| tries.after_loss(&retry, Time::default(), 0, others)));
        assert_eq!(rows[0], [20, 40, 80]);
        assert_eq!(rows[1].len(), 9);
    }

    #[test]
    fn tries_that_bring_something_are_bounded_by_all_that_an_answer_may_lose() {
        let retry = Retry::default();
        let waits = waits(|tries| tries.after_loss(&retry, Time::default(), PROGRESS, false));
        assert!(waits.len() == 23 && waits.iter().all(|wait| *wait == 20), "{waits:?}");
    }

    #[test]
    fn workers_that_do_not_come_together_are_tried_for_a_time_and_do_not_count() {
        let retry = Retry { total: 2_000 * MS, ..Retry::default() };
        let (mut tries, mut now, mut times) = (Tries::default(), Time::default(), 0);
        loop {
            tries.begin(now);
            let Some(wait) = tries.after_apart(&retry, now) else { break };
            assert!(wait <= LONGEST_APART && tries.in_a_row() == 0);
            (now, times) = (now + wait, times + 1);
        }
        assert!(times > 5 && now < Time(2_000 * MS), "{times} tries until {now:?}");
        assert_eq!(tries.after_loss(&retry, now, 0, false), Some(20 * MS));
    }

    #[test]
    fn workers_that_come_after_there_was_none_have_time_of_their_own() {
        let retry = Retry { total: 2_000 * MS, ..Retry::default() };
        let mut tries = Tries::default();
        assert!(tries.after_apart(&retry, Time::default()).is_some());
        let late = Time(1_999 * MS);
        tries.lacked_workers();
        assert_eq!(tries.after_apart(&retry, late), Some(retry.backoff));
        assert_eq!(tries.after_apart(&retry, late + retry.total), None);
    }
}
