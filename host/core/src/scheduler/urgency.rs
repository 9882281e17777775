//! Which of several requests goes first.
//!
//! Smaller numbers of [`Request::priority`](crate::request::Request::priority) go first, as in vLLM: in the queue, among prompts
//! that are computed, and among those that have arrived on a decode worker. When pages run out, the running request with the
//! largest number is preempted. Without such numbers everything goes in order of arrival.
//!
//! A request whose client had others counts as having come later, by [`Request::behind`](crate::request::Request::behind). So those
//! of a client with few go before the backlog of one with many, until that has waited as long as it is behind.
//!
//! A waiting request becomes more urgent by one for each [`AGEING`] that it waits, up to the most urgent one that waits. There it
//! stands before all that came later, so none starves.

use std::time::Duration;

use super::Scheduler;
use super::job::Job;
use crate::ids::{Room, Time};

/// A request that waits so long becomes more urgent by one.
pub(super) const AGEING: Duration = Duration::from_secs(5);

impl Job {
    /// Its place in a queue without priorities: preempted ones first, then in order of arrival.
    pub(super) fn turn(&self) -> (bool, Time, u64) {
        (!self.stage().is_preempted(), self.arrived, self.place)
    }

    /// Its place among requests that are past the queue.
    pub(super) fn urgency(&self) -> (i32, Time, u64) {
        (self.request.priority, self.arrived, self.place)
    }

    /// How far it is behind requests of other clients, in doublings. So the requests of one client are alike, nearly.
    pub(super) fn doublings_behind(&self) -> u32 {
        u64::BITS - self.request.behind.as_secs().leading_zeros()
    }
}

impl Scheduler {
    /// Whether arrival here is not all that orders requests.
    pub(super) fn has_urgencies(&self) -> bool {
        self.has_priorities || self.has_backlogs
    }

    /// Puts a request into the queue.
    pub(super) fn enqueue(&mut self, room: Room) {
        let turn = self.jobs[&room].turn();
        let at = self.queue.partition_point(|other| self.jobs[other].turn() < turn);
        self.queue.insert(at, room);
    }

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
            let Some(job) = jobs.get(room) else { return (i64::MIN, (false, now, 0)) };
            let aged = now.since(job.arrived).as_nanos() / AGEING.as_nanos();
            let aged = i64::try_from(aged).unwrap_or(i64::MAX);
            let urgency = i64::from(job.request.priority).saturating_sub(aged).max(i64::from(most_urgent));
            (urgency, job.turn())
        });
    }

    /// The place of the most urgent one among rooms, the first of equals.
    pub(super) fn most_urgent<'a>(&self, rooms: impl Iterator<Item = &'a Room>) -> Option<usize> {
        let urgencies = rooms.map(|room| self.jobs.get(room).map(Job::urgency));
        urgencies.enumerate().min_by_key(|(_, urgency)| *urgency).map(|(at, _)| at)
    }

    /// # Panics
    /// When the queue is in no order.
    pub(super) fn audit_queue(&self) {
        let turns = self.queue.iter().map(|room| self.jobs[room].turn());
        assert!(self.has_priorities || turns.is_sorted(), "a request waits behind one that came later");
    }
}
