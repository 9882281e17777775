//! Urgency: which of several requests goes first.
//!
//! Smaller numbers of [`Request::priority`](crate::request::Request::priority) go first, as in vLLM: in the queue, among prompts
//! that are computed, and among those that have arrived on a decode worker. When pages run out, the least urgent request is
//! preempted. Among equally urgent requests clients take [turns](super::turns). Requests of one client go in order of arrival.
//!
//! In all these places a request counts as more urgent by one for each [`AGEING`] since its submission, up to the priority of the
//! most urgent request that it is compared with. There it takes its turn, so no request waits for ever.
//!
//! Two requests do not preempt each other in a loop:
//!
//! - Requests age at the same rate, and a preemption does not change the age. So a request may become as urgent as one that was more
//!   urgent, but never more urgent than it.
//! - Admission takes no pages from requests in the steps. A preempted request waits for free pages for all its tokens, and for
//!   headroom for all requests.
//! - Among equally urgent requests of one client the shortest answer is preempted, and a preempted request keeps its answer.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Scheduler;
use super::job::Job;
use crate::ids::{Room, Time};

/// A request becomes more urgent by one each time this passes.
pub(super) const AGEING: Duration = Duration::from_secs(5);

impl Job {
    /// The job's place in a queue without priorities: preempted jobs first, then by turns.
    fn place_in_queue(&self) -> (bool, u64, u64) {
        (!self.stage().is_preempted(), self.turn, self.place)
    }

    /// The job's priority beside requests of which the most urgent has the priority `most_urgent`: one less for each [`AGEING`]
    /// since its submission, but not below that one.
    pub(super) fn aged(&self, now: Time, most_urgent: i32) -> i64 {
        let aged = now.since(self.submitted).as_nanos() / AGEING.as_nanos();
        let aged = i64::try_from(aged).unwrap_or(i64::MAX);
        i64::from(self.request.priority).saturating_sub(aged).max(i64::from(most_urgent))
    }

    /// The job's place among requests that are past the queue, of which the most urgent has the priority `most_urgent`.
    pub(super) fn urgency(&self, now: Time, most_urgent: i32) -> (i64, u64, u64) {
        (self.aged(now, most_urgent), self.turn, self.place)
    }
}

impl Scheduler {
    /// Whether priorities or turns of several clients order requests, and not arrival alone.
    pub(super) fn has_urgencies(&self) -> bool {
        self.turns.has_priorities() || self.turns.are_several()
    }

    /// Puts a request into the queue.
    pub(super) fn enqueue(&mut self, room: Room) {
        if self.by_priority {
            // `order_queue` sorts the queue before it is used.
            self.queue.push_back(room);
            return;
        }
        let place = self.jobs[&room].place_in_queue();
        let at = self.queue.partition_point(|other| self.jobs[other].place_in_queue() < place);
        self.queue.insert(at, room);
    }

    /// Brings the queue into the order in which its requests are admitted: by urgency, among equals preempted requests first, then
    /// by turns.
    pub(super) fn order_queue(&mut self, now: Time) {
        let has_priorities = self.turns.has_priorities();
        let mut waiting = self
            .queue
            .iter()
            .map(|room| &self.jobs[room])
            .filter(|job| !job.stage().is_preempted() && job.request.answered == 0);
        let passed =
            self.turns.are_several() && waiting.next().is_some_and(|job| self.turns.has_passed(job.turn));
        if !has_priorities && !self.by_priority && !passed {
            return;
        }
        self.by_priority = has_priorities;
        self.renew_turns();
        let (jobs, most_urgent) = (&self.jobs, self.most_urgent_priority(&self.queue));
        self.queue.make_contiguous().sort_by_cached_key(|room| {
            let job = &jobs[room];
            (job.aged(now, most_urgent), job.place_in_queue())
        });
    }

    fn renew_turns(&mut self) {
        let mut waiting: Vec<(u64, u64, Room)> = Vec::with_capacity(self.queue.len());
        for room in &self.queue {
            let job = &self.jobs[room];
            // A resumed request keeps its turn, because it has waited before.
            if !job.stage().is_preempted() && job.request.answered == 0 {
                waiting.push((job.turn, job.place, *room));
            }
        }
        waiting.sort_unstable();
        let mut last = BTreeMap::new();
        for (turn, _, room) in waiting {
            let Some(job) = self.jobs.get_mut(&room) else { continue };
            let (client, priority) = (job.request.client, job.request.priority);
            job.turn = self.turns.renew(&mut last, client, priority, turn);
        }
    }

    /// The priority of the most urgent of some requests, without their age.
    pub(super) fn most_urgent_priority<'a>(&self, rooms: impl IntoIterator<Item = &'a Room>) -> i32 {
        let jobs = rooms.into_iter().filter_map(|room| self.jobs.get(room));
        jobs.map(|job| job.request.priority).min().unwrap_or(0)
    }

    /// The request that would be admitted last, of those that have not begun, if it would be admitted later than a new
    /// request of this priority and turn.
    pub(super) fn last_after(&self, now: Time, priority: i32, turn: u64) -> Option<Room> {
        let most_urgent = self.most_urgent_priority(&self.queue).min(priority);
        let waiting = self.queue.iter().map(|room| (room, &self.jobs[room]));
        let waiting = waiting.filter(|(_, job)| job.stage().is_queued());
        let order = |job: &Job| (job.aged(now, most_urgent), job.turn);
        let last = waiting.max_by_key(|(_, job)| (order(job), job.place));
        let (room, _) = last.filter(|(_, job)| order(job) > (i64::from(priority), turn))?;
        Some(*room)
    }

    /// The place of the most urgent request in a list of rooms, the first of equals.
    pub(super) fn most_urgent<'a>(
        &self,
        now: Time,
        rooms: impl Iterator<Item = &'a Room> + Clone,
    ) -> Option<usize> {
        let most_urgent = self.most_urgent_priority(rooms.clone());
        let urgencies = rooms.map(|room| self.jobs.get(room).map(|job| job.urgency(now, most_urgent)));
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
