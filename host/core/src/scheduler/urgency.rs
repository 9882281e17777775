//! Which of several requests goes first.
//!
//! Smaller numbers of [`Request::priority`](crate::request::Request::priority) go first, as in vLLM: in the queue, among prompts
//! that are computed, and among those that have arrived on a decode worker. When pages run out, the running request with the
//! largest number is preempted. Without such numbers everything goes in order of arrival.
//!
//! A waiting request becomes more urgent by one for each [`AGEING`] that it waits, up to the most urgent one that waits. There it
//! stands before all that came later, so none starves.

use std::time::Duration;

use super::Scheduler;
use crate::ids::{Room, Time};

/// A request that waits so long becomes more urgent by one.
pub(super) const AGEING: Duration = Duration::from_secs(5);

impl Scheduler {
    /// Brings the queue into the order in which its requests are admitted: by urgency, and within it preempted ones first, then in
    /// order of arrival.
    pub(super) fn order_queue(&mut self, now: Time) {
        if !self.has_priorities {
            return;
        }
        let jobs = &self.jobs;
        let priority = |room: &Room| jobs.get(room).map_or(0, |job| job.request.priority);
        let most_urgent = self.queue.iter().map(priority).min().unwrap_or(0);
        self.queue.make_contiguous().sort_by_cached_key(|room| {
            let Some(job) = jobs.get(room) else { return (i64::MIN, false, now, 0) };
            let aged = now.since(job.submitted).as_nanos() / AGEING.as_nanos();
            let aged = i64::try_from(aged).unwrap_or(i64::MAX);
            let urgency = i64::from(job.request.priority).saturating_sub(aged).max(i64::from(most_urgent));
            (urgency, !job.stage().is_preempted(), job.submitted, job.place)
        });
    }

    /// The place of the most urgent one among rooms, the first of equals.
    pub(super) fn most_urgent<'a>(&self, rooms: impl Iterator<Item = &'a Room>) -> Option<usize> {
        let urgencies = rooms.map(|room| self.jobs.get(room).map_or(0, |job| job.request.priority));
        urgencies.enumerate().min_by_key(|(_, priority)| *priority).map(|(at, _)| at)
    }
}
