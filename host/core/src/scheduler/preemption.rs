//! Taking pages back from a running request, and continuing it later.
//!
//! When the next step's pages cannot be had, not even by eviction, one request after the other is preempted until they
//! can. What it has computed enters the radix cache, so continuing costs only what was evicted meanwhile. Without a
//! cache all of it is recomputed. What was evicted may be in the offload tiers. It is looked for there like a new
//! request's prompt, when there are pages for the request again, for by then it is known what is gone. Storage is asked
//! once, and waited for as long as for a new request, in the queue. What was found is copied into the request's pages
//! before it runs, and what fails to come is computed.
//!
//! ```text
//! Running ─(preempt)─► Preempted ─(pages)─► admitted ─► Running
//!                          │   ▲                │         ▲
//!          asks, if L1 and L2 lack some,        └► Loading┘ (copies ended)
//!          and waits ──────┘   └─ answered, read, or late
//! ```
//!
//! Its answer continues where it stopped: the tokens drawn are kept, and the next draw depends on seed and position alone.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::Scheduler;
use super::job::Job;
use super::stage::{Stage, Waiting};
use crate::ids::{Room, Time};

/// Requests of a client, in doublings: clients with nearly as many are alike. Those of which the client is not known are alike.
fn doublings(clients: &BTreeMap<u64, usize>, client: u64) -> u32 {
    let requests = if client == 0 { 1 } else { clients.get(&client).copied().unwrap_or_default() };
    usize::BITS - requests.leading_zeros()
}

impl Scheduler {
    /// Whether requests are preempted here. A decode worker gives no page to others that a transfer has brought, unless
    /// the transfer backend proves that the transfer has settled. Where no request is preempted, admission leaves room
    /// for whole answers.
    pub(super) fn preempts(&self) -> bool {
        self.config.settles || !self.config.role.receives_kv()
    }

    /// Preempts one request. Returns `false` when there is none but the last one that runs, without which nothing would be computed.
    ///
    /// Of those that are least urgent, and of these the ones whose client has most requests in the steps, in doublings, the one
    /// with the shortest answer goes. So least of what its user waits for is delayed, and those that are nearly done end and free
    /// their pages. A request that was preempted keeps its answer, so the same one is not chosen again and again while younger
    /// ones of its client run. Among equals it is the one with the longest prompt, whose pages help most.
    pub(super) fn preempt_one(&mut self) -> bool {
        if !self.preempts() {
            return false;
        }
        let running = if self.running.len() > 1 { &self.running[..] } else { &[] };
        // Those that are ready have answered nothing yet.
        let rooms = running.iter().chain(&self.ready);
        let able = rooms.enumerate().filter(|(_, room)| self.may_be_preempted(**room));
        let clients = self.in_steps();
        let victim = able.min_by_key(|(age, room)| {
            let job = &self.jobs[room];
            let size = (job.answer.tokens.len(), Reverse(job.request.prompt.len()));
            let least_urgent =
                (Reverse(job.request.priority), Reverse(doublings(&clients, job.request.client)));
            (least_urgent, size, Reverse(*age))
        });
        let Some(room) = victim.map(|(_, room)| *room) else { return false };
        self.preempt(room);
        true
    }

    /// How many requests of each client take part in batches, or may.
    fn in_steps(&self) -> BTreeMap<u64, usize> {
        let mut clients = BTreeMap::new();
        for job in self.running.iter().chain(&self.ready).filter_map(|room| self.jobs.get(room)) {
            *clients.entry(job.request.client).or_default() += 1;
        }
        clients
    }

    /// Whether a job takes part in batches, and only batches touch its pages.
    fn may_be_preempted(&self, room: Room) -> bool {
        self.jobs
            .get(&room)
            .is_some_and(|job| matches!(*job.stage(), Stage::Running(_) | Stage::Ready) && !job.is_read())
    }

    fn preempt(&mut self, room: Room) {
        self.keep_preempted(room);
        self.stats.retractions += 1;
        self.give_pages_back(room, Waiting::default());
    }

    /// Preempted requests that are admitted again, but not yet in the steps.
    pub(super) fn being_resumed(&self) -> usize {
        if !self.cache.has_tiers() {
            return 0;
        }
        let loads = |job: &&Job| job.was_preempted() && matches!(*job.stage(), Stage::Loading(_));
        self.jobs.values().filter(loads).count()
    }

    /// There are pages for a waiting request. If it was preempted, this asks the offload tiers for what it had, once.
    /// Returns whether it asked. If so, what the request finds, and whether it waits, is to be seen anew.
    pub(super) fn fetch_preempted(&mut self, now: Time, room: Room) -> bool {
        let Some(job) = self.jobs.get_mut(&room) else { return false };
        if !self.cache.has_tiers() || !job.stage().is_preempted() {
            return false;
        }
        let Some(waiting) = job.waiting_mut().filter(|waiting| !waiting.fetched) else { return false };
        waiting.fetched = true;
        self.fetch(now, room);
        true
    }

    /// Computes a request from what is cached on, whatever it has received. Nothing touches its pages.
    pub(super) fn restart(&mut self, room: Room) {
        if let Some(job) = self.jobs.get_mut(&room) {
            job.kv.has_computed(0);
        }
        self.give_pages_back(room, Waiting::fetched());
    }

    fn give_pages_back(&mut self, room: Room, waiting: Waiting) {
        self.leaders.remove(room);
        self.running.retain(|other| *other != room);
        self.ready.retain(|other| *other != room);
        let Some(job) = self.jobs.get_mut(&room) else { return };
        job.enter(Stage::Preempted(waiting));
        // Drawn again, when its last prompt token is recomputed.
        job.answer.first = None;
        job.computed_before = job.computed_before.max(job.kv.computed());
        self.cache.give_back(&mut job.kv);
        self.aux_free.extend(job.aux.take());
        // Before all that have not begun: its client is reading already.
        self.enqueue(room);
    }
}
