//! Ready requests: from a verified transfer to the first token.
//!
//! Transfers run ahead of the steps: a request whose KV has arrived waits here until it fits into a step. Its first
//! token is kept back, so that it waits before its answer and not within it. With a target for the time between tokens,
//! the [pace](super::pace) limits the requests in a step. Without one, the size of a batch does.

use super::stage::Stage;
use super::{Action, Scheduler};
use crate::ids::{Room, Time};

impl Scheduler {
    /// Requests that may be past the queue at once under the target, if there is one: those that decode, and on a
    /// decode worker a few whose transfers run ahead.
    pub(super) fn most_active(&self) -> usize {
        let role = self.config.role;
        self.pace.limit().map_or(usize::MAX, |limit| limit + role.transfers_ahead(limit))
    }

    /// Whether one more request may join those in the steps, besides `others` that are about to join.
    pub(super) fn may_join(&self, others: usize) -> bool {
        let batch = self.config.role.most_in_steps(self.config.max_batch as usize);
        self.running.len() + others < self.pace.limit().unwrap_or(batch)
    }

    /// Activates requests that have arrived, the most urgent and of these the oldest first. With a target they join only while no
    /// step is being computed, so that their first token is out when their first step begins. Returns whether a request has ended
    /// with its first token.
    pub(super) fn activate(&mut self, now: Time, actions: &mut Vec<Action>) -> bool {
        let before = self.jobs.len();
        while !(self.pace.is_set() && self.computing) && self.may_join(0) {
            let next = if self.has_urgencies() { self.most_urgent(now, self.ready.iter()) } else { Some(0) };
            let Some(room) = next.and_then(|next| self.ready.remove(next)) else { break };
            self.join(now, room, actions);
        }
        self.jobs.len() < before
    }

    fn join(&mut self, now: Time, room: Room, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let Some(first) = job.answer.first.take() else { return };
        job.enter(Stage::Running(None));
        self.running.push(room);
        self.prompt_ready(room, actions);
        self.drawn(now, room, &first, actions);
    }
}
