//! Taking pages back from a request that runs, and going on with it later.
//!
//! When the next step's pages cannot be had, not even by eviction, one request after the other gives its pages up until
//! they can. What it has computed enters the radix cache, so going on costs only what was evicted meanwhile; without
//! a cache all of it is computed again. What was evicted may have gone below the pool, where it is looked for like a new
//! request's prompt: when there are pages for it again, for by then it is known what is gone. Storage is asked once, and
//! waited for as long as for a new request, in the queue; what was found is copied into its pages before it runs, and what fails
//! to come is computed.
//!
//! ```text
//! Running ─(retract)─► Retracted ─(pages)─► admitted ─► Running
//!                          │   ▲                │         ▲
//!          asks, if L1 and L2 lack some,        └► Loading┘ (copies ended)
//!          and waits ──────┘   └─ answered, read, or late
//! ```
//!
//! Its answer goes on where it stopped: the tokens drawn are kept, and the next draw depends on seed and position alone.

use std::cmp::Reverse;

use super::Scheduler;
use super::job::Job;
use super::stage::Stage;
use crate::ids::{Room, Time};

impl Scheduler {
    /// Makes one request that runs give its pages up; false when only one is left that runs.
    ///
    /// The one with the shortest answer goes: least of what its user waits for is delayed, and those that are nearly
    /// done end and free their pages. A request that was retracted keeps its answer, so the same one is not chosen
    /// again and again while younger ones run. Among equals it is the one with the longest prompt, whose pages help
    /// most.
    pub(super) fn retract_one(&mut self) -> bool {
        // Those that are ready have answered nothing yet.
        let rooms = self.running.iter().chain(&self.ready);
        if self.running.len() + self.ready.len() < 2 {
            return false;
        }
        let able = rooms.enumerate().filter(|(_, room)| self.may_be_retracted(**room));
        let victim = able.min_by_key(|(age, room)| {
            let job = &self.jobs[room];
            (job.output.len(), Reverse(job.request.prompt.len()), Reverse(*age))
        });
        let Some(room) = victim.map(|(_, room)| *room) else { return false };
        self.retract(room);
        true
    }

    /// Whether a job takes part in batches, and nobody but the batches touches its pages.
    fn may_be_retracted(&self, room: Room) -> bool {
        self.jobs.get(&room).is_some_and(|job| {
            matches!(*job.stage, Stage::Running | Stage::Ready)
                && job.in_batch.is_none()
                && job.outgoing.as_ref().is_none_or(|outgoing| outgoing.tags.is_empty())
        })
    }

    fn retract(&mut self, room: Room) {
        self.cache_retracted(room);
        self.stats.retractions += 1;
        if let Some(job) = self.jobs.get_mut(&room) {
            job.looked_below = false;
        }
        self.give_pages_back(room);
    }

    /// Requests that were retracted and are admitted again, but not yet in the steps.
    pub(super) fn being_resumed(&self) -> usize {
        if self.hierarchy.is_none() {
            return 0;
        }
        let loads = |job: &&Job| job.was_retracted() && matches!(*job.stage, Stage::Loading(_));
        self.jobs.values().filter(loads).count()
    }

    /// There are pages for a request in the queue. If it was retracted, looks for what it had below the pool, once; returns
    /// whether it did, so that what the request finds, and whether it waits, is to be seen anew.
    pub(super) fn fetch_again(&mut self, now: Time, room: Room) -> bool {
        let Some(job) = self.jobs.get_mut(&room) else { return false };
        if self.hierarchy.is_none() || *job.stage != Stage::Retracted || job.looked_below {
            return false;
        }
        job.looked_below = true;
        self.begin_fetch(now, room);
        true
    }

    /// Computes a request from what is cached on, whatever it has received. Nobody touches its pages.
    pub(super) fn begin_again(&mut self, room: Room) {
        if let Some(job) = self.jobs.get_mut(&room) {
            job.restore = None;
            job.computed = 0;
        }
        self.give_pages_back(room);
    }

    fn give_pages_back(&mut self, room: Room) {
        self.leaders.remove(room);
        self.running.retain(|other| *other != room);
        self.ready.retain(|other| *other != room);
        let Some(job) = self.jobs.get_mut(&room) else { return };
        job.stage.enter(Stage::Retracted);
        job.overtaken = 0;
        job.follows = None;
        // Drawn again, when its last prompt token is computed again.
        job.first = None;
        job.computed_before = job.computed_before.max(job.computed);
        job.computed = 0;
        job.again = 0..0;
        job.restored_window = None;
        job.table.clear();
        let (pages, lock, submitted) = (job.held.take(), job.lock.take(), job.submitted);
        let window = std::mem::take(&mut job.window);
        self.pool.release(window.own);
        self.aux_free.extend(job.aux.take());
        for pages in pages.into_iter().chain(job.spare.take()) {
            self.pool.release(pages);
        }
        self.unlock(lock);
        // Before all that have not begun: its client is reading already.
        let at = self.queue.iter().position(|other| {
            let other = &self.jobs[other];
            *other.stage != Stage::Retracted || other.submitted > submitted
        });
        self.queue.insert(at.unwrap_or(self.queue.len()), room);
    }
}
