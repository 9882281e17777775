//! Taking pages back from a running request, and continuing it later.
//!
//! When the pages of the next step cannot be had, not even by eviction, one request after the other is preempted until
//! they can. The computed pages of a preempted request enter the radix cache, so it recomputes only pages that were
//! evicted meanwhile. Without a cache it recomputes all. Evicted pages may be in the offload tiers. The scheduler looks
//! for them there, as for a new request's prompt, when there are pages for the request again, because only then it is
//! known which pages are gone. Storage is asked once, and the request waits for it in the queue as long as a new
//! request would. Found pages are copied into the request's pages before it runs. Pages that fail to come are computed.
//!
//! ```text
//! Running ─(preempt)─► Preempted ─(pages)─► admitted ─► Running
//!                          │   ▲                │         ▲
//!          asks, if L1 and L2 lack some,        └► Loading┘ (copies ended)
//!          and waits ──────┘   └─ answered, read, or late
//! ```
//!
//! The answer of a preempted request continues where it stopped: drawn tokens are kept, and drawing has no other state
//! ([`sampling`](crate::sampling)).

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::Scheduler;
use super::job::Job;
use super::stage::{Stage, Waiting};
use crate::ids::{Room, Time};

/// The number of a client's requests in doublings, so that clients with nearly as many requests count alike. Each request of an
/// unknown client counts as its only one.
fn doublings(clients: &BTreeMap<u64, usize>, client: u64) -> u32 {
    let requests = if client == 0 { 1 } else { clients.get(&client).copied().unwrap_or_default() };
    usize::BITS - requests.leading_zeros()
}

impl Scheduler {
    /// Whether this worker [preempts](crate::Role::preempts) requests.
    pub(super) fn preempts(&self) -> bool {
        self.config.role.preempts(self.config.settles)
    }

    /// Preempts one request. Returns `false` when only the last running request is left, without which nothing would be computed.
    ///
    /// The least [urgent](super::urgency) requests go first, of these the requests whose client has most requests in the steps (in
    /// doublings), and of these the request with the shortest answer. So the preemption delays a user who has read least, and
    /// requests that are nearly done end and free their pages. A preempted request keeps its answer, so the same request is not
    /// chosen again and again while younger ones of its client run. Among equals the request with the longest prompt goes, because
    /// its pages help most.
    pub(super) fn preempt_one(&mut self, now: Time) -> bool {
        if !self.preempts() {
            return false;
        }
        let running = if self.running.len() > 1 { &self.running[..] } else { &[] };
        // Ready requests have answered nothing yet.
        let rooms = running.iter().chain(&self.ready);
        let able = rooms.enumerate().filter(|(_, room)| self.may_be_preempted(**room));
        let clients = self.in_steps();
        let most_urgent = self.most_urgent_priority(self.running.iter().chain(&self.ready));
        let victim = able.min_by_key(|(age, room)| {
            let job = &self.jobs[room];
            let size = (job.answer.tokens.len(), Reverse(job.request.prompt.len()));
            let least_urgent =
                (Reverse(job.aged(now, most_urgent)), Reverse(doublings(&clients, job.request.client)));
            (least_urgent, size, Reverse(*age))
        });
        let Some(room) = victim.map(|(_, room)| *room) else { return false };
        self.preempt(room);
        true
    }

    /// How many requests of each client take part in batches, or are ready to.
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

    /// Asks the offload tiers, once, for the earlier pages of a preempted request for which there are pages now.
    /// Returns whether it asked. If so, the caller must look again at what the request finds, and whether it waits.
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

    /// Lets a request compute everything behind its cached prefix, and drops what it has received. Nothing may touch
    /// its pages.
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
        // The first token is drawn again when the last prompt token is recomputed.
        job.answer.first = None;
        job.computed_before = job.computed_before.max(job.kv.computed());
        self.cache.give_back(&mut job.kv);
        self.aux_free.extend(job.aux.take());
        // The request goes before all that have not begun, because its client is reading already.
        self.enqueue(room);
    }
}
