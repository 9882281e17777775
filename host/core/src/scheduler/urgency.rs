//! Which of several requests goes first.
//!
//! Smaller numbers of [`Request::priority`](crate::request::Request::priority) go first, as in vLLM: in the queue, among prompts
//! that are computed, and among those that have arrived on a decode worker. When pages run out, the running request with the
//! largest number is preempted. Among requests with the same number clients take [turns](super::turns). Requests of one client go
//! in order of arrival.
//!
//! A waiting request becomes more urgent by one for each [`AGEING`] that it waits, up to the most urgent one that waits. There it
//! stands before all that have later turns, so none starves.

use std::time::Duration;

use super::Scheduler;
use super::job::Job;
use crate::ids::{Room, Time};

/// A request that waits so long becomes more urgent by one.
pub(super) const AGEING: Duration = Duration::from_secs(5);

impl Job {
    /// Its place in a queue without priorities: preempted ones first, then by turns.
    fn place_in_queue(&self) -> (bool, u64, u64) {
        (!self.stage().is_preempted(), self.turn, self.place)
    }

    /// Its place among requests that are past the queue.
    pub(super) fn urgency(&self) -> (i32, u64, u64) {
        (self.request.priority, self.turn, self.place)
    }
}

impl Scheduler {
    /// Whether arrival here is not all that orders requests.
    pub(super) fn has_urgencies(&self) -> bool {
        self.turns.has_priorities() || self.turns.are_several()
    }

    /// Puts a request into the queue.
    pub(super) fn enqueue(&mut self, room: Room) {
        if self.by_priority {
            // Its order follows when it is looked at.
            self.queue.push_back(room);
            return;
        }
        let place = self.jobs[&room].place_in_queue();
        let at = self.queue.partition_point(|other| self.jobs[other].place_in_queue() < place);
        self.queue.insert(at, room);
    }

    /// Brings the queue into the order in which its requests are admitted: by urgency, and within it preempted ones first, then by
    /// turns.
    pub(super) fn order_queue(&mut self, now: Time) {
        let has_priorities = self.turns.has_priorities();
        if !has_priorities && !self.by_priority {
            return;
        }
        self.by_priority = has_priorities;
        let jobs = &self.jobs;
        let priority = |room: &Room| jobs.get(room).map_or(0, |job| job.request.priority);
        let most_urgent = self.queue.iter().map(priority).min().unwrap_or(0);
        self.queue.make_contiguous().sort_by_cached_key(|room| {
            let Some(job) = jobs.get(room) else { return (i64::MIN, (false, 0, 0)) };
            let aged = now.since(job.submitted).as_nanos() / AGEING.as_nanos();
            let aged = i64::try_from(aged).unwrap_or(i64::MAX);
            let urgency = i64::from(job.request.priority).saturating_sub(aged).max(i64::from(most_urgent));
            (urgency, job.place_in_queue())
        });
    }

    /// The place of the most urgent one among rooms, the first of equals.
    pub(super) fn most_urgent<'a>(&self, rooms: impl Iterator<Item = &'a Room>) -> Option<usize> {
        let urgencies = rooms.map(|room| self.jobs.get(room).map(Job::urgency));
        urgencies.enumerate().min_by_key(|(_, urgency)| *urgency).map(|(at, _)| at)
    }

    /// # Panics
    /// When the queue is in no order, or a request has no turn.
    pub(super) fn audit_queue(&self) {
        let places = self.queue.iter().map(|room| self.jobs[room].place_in_queue());
        assert!(self.by_priority || places.is_sorted(), "a request waits behind one with a later turn");
        assert_eq!(self.turns.requests(), self.jobs.len(), "each request has a turn, and no other has");
    }
}
