//! The scheduler of a worker, the same live and in simulation.
//!
//! It takes [`Event`]s and the time, and returns [`Action`]s. This file routes events and defines the order of a
//! [tick](Scheduler::tick). The parts decide:
//!
//! | Part | Holds | Files |
//! | --- | --- | --- |
//! | [cache](crate::cache) | where every page is: pool, radix tree, offload tiers, windows, quarantine | `cache/` |
//! | request | a [`job`] and its [`stage`]: one table says which stage follows which | `job.rs`, `stage.rs`, `ending.rs` |
//! | hand-over | prefill's side and decode's side of a transfer, peers, messages | [`hand_over`](crate::hand_over), `sending.rs`, `receiving.rs`, `restoring.rs`, `peers.rs` |
//! | policy | which request is next: admission, batching, drafts, pace, preemption, sharing | `admission.rs`, `batching.rs`, `drafting.rs`, `pace.rs`, `preemption.rs`, `sharing.rs`, `headroom.rs`, `ready.rs` |
//! | roles | what differs between prefill, decode and aggregated workers | `roles.rs` |
//!
//! A request's way through the stages, per role, is drawn in `docs/internals/request.md`. The table of allowed moves is
//! in `stage.rs`. A request leaves through one function (`retire`). Its pages are free if nothing can touch them. If
//! something might, they go into quarantine, with the list of everything that may touch them.

mod admission;
mod batching;
mod deadlines;
mod drafting;
mod ending;
mod exchange;
mod headroom;
mod job;
mod keeping;
mod pace;
mod peers;
mod preemption;
mod ready;
mod receiving;
mod restoring;
mod roles;
mod sending;
mod sharing;
mod stage;
mod stats;
mod turns;
mod urgency;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::cache::Cache;
pub use crate::cache::Flushed;
pub use crate::config::{Config, Role};
use crate::hand_over::Orphans;
use crate::hierarchy::TierStats;
use crate::ids::{Instance, PageId, Room, Time};
use crate::message::Message;
use crate::outbox::Outbox;
use crate::pool::{PageSource, PoolLimits};
use crate::radix::CacheEvent;
use crate::request::{Failure, FailureCode};
use crate::transfer::Tag;

use deadlines::Deadlines;
use ending::Leftovers;
pub use exchange::{Action, Event, PageWrite, RoomOpening};
use job::Job;
use pace::Pace;
pub use pace::PaceStats;
use peers::Peers;
use sharing::Leaders;
use stage::Stage;
pub use stats::Stats;
use turns::Turns;

/// The scheduler of one worker.
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    cache: Cache,
    /// When the batch began, and how many tokens of prompts it has. `None` if it has none.
    step: Option<(Time, usize)>,
    /// Requests that others wait for, because they bring pages of the same prompt.
    leaders: Leaders,
    /// Aux rows not in use.
    aux_free: Vec<u32>,
    jobs: BTreeMap<Room, Job>,
    /// Leftovers of ended requests whose pages are in quarantine.
    leftovers: BTreeMap<Room, Leftovers>,
    /// Jobs that wait for pages: preempted ones first, then those not yet admitted, each by turns. If requests have priorities,
    /// these decide first.
    queue: VecDeque<Room>,
    /// Jobs whose pages are verified and that the pace has not activated yet, oldest first.
    ready: VecDeque<Room>,
    /// Jobs that take part in batches, oldest first.
    running: Vec<Room>,
    /// Whether a batch is being computed.
    computing: bool,
    /// When each job ends unless something happens before. A time kept here may be earlier than that, but never later.
    deadlines: Deadlines,
    /// When requests that follow another one stop waiting for it.
    patience: Deadlines,
    /// When the writes of ended requests must have settled.
    settling: Deadlines,
    pace: Pace,
    /// Requests that have come.
    arrivals: u64,
    last_batch: u64,
    last_tag: u64,
    /// Writes of running transfers that have not settled, and their rooms. Those of ended requests are known to the cache.
    writes: BTreeMap<Tag, Room>,
    /// Reserves whose request has not come from the router yet.
    orphans: Orphans,
    peers: Peers,
    outbox: Outbox,
    draining: bool,
    turns: Turns,
    /// Whether the queue is in the order of priorities.
    by_priority: bool,
    stats: Stats,
}

impl Scheduler {
    /// An idle scheduler.
    ///
    /// # Panics
    /// When a limit that must be positive is zero.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let limits = PoolLimits::shared(config.pages);
        Self::with_pages(config, limits, None)
    }

    /// An idle scheduler whose pages an allocator chooses, within these limits.
    ///
    /// # Panics
    /// When a limit that must be positive is zero, or the pool's size is not [`Config::pages`].
    #[must_use]
    pub fn with_pages(config: Config, limits: PoolLimits, source: Option<Box<dyn PageSource>>) -> Self {
        assert_eq!(limits.total, config.pages, "one pool has one size");
        assert!(
            config.pages > 0
                && config.page_tokens > 0
                && config.chunk_tokens > 0
                && config.max_batch > 0
                && config.max_running > 0
                && config.max_attempts > 0
                && config.reserved_decode_tokens > 0
                && config.target_itl != Some(Duration::ZERO),
            "limits must be positive: {config:?}"
        );
        assert!(
            config.hierarchy.is_none() || config.radix_cache.is_some(),
            "offload tiers need a radix cache"
        );
        assert!(
            config.settles || config.radix_cache.is_none(),
            "cached pages outlive a transfer only where the backend proves that it has settled"
        );
        assert!(
            config.window.is_none_or(|window| window.tokens > 0 && window.parts > 0),
            "a window has tokens and takes pages: {config:?}"
        );
        Self {
            cache: Cache::new(&config, limits, source),
            step: None,
            leaders: Leaders::new(config.seed),
            aux_free: (0..config.max_running).rev().collect(),
            deadlines: Deadlines::default(),
            patience: Deadlines::default(),
            settling: Deadlines::default(),
            pace: Pace::new(
                config.target_itl.filter(|_| config.role.draws_whole_answers()),
                config.max_batch as usize,
            ),
            config,
            jobs: BTreeMap::new(),
            leftovers: BTreeMap::new(),
            queue: VecDeque::new(),
            ready: VecDeque::new(),
            running: Vec::new(),
            computing: false,
            arrivals: 0,
            last_batch: 0,
            last_tag: 0,
            writes: BTreeMap::new(),
            orphans: Orphans::default(),
            peers: Peers::default(),
            outbox: Outbox::default(),
            draining: false,
            turns: Turns::default(),
            by_priority: false,
            stats: Stats::default(),
        }
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Submit(request) => self.submit(now, request, actions),
            Event::Cancel(room) => {
                let failure = Failure::new(FailureCode::Cancelled, "the request was cancelled");
                self.fail(now, room, failure, actions);
            }
            Event::EndAnswer(room) => self.end_answer(now, room, actions),
            Event::Message { from, floor, message } => self.message(now, from, floor, message, actions),
            Event::PeerReady { peer, floor, session } => self.peer_ready(now, peer, floor, session, actions),
            Event::PeerRefused { peer, message } => self.peer_refused(now, peer, &message, actions),
            Event::PeerLost { peer, session, fenced } => {
                self.peer_lost(now, (peer, session), fenced, actions);
            }
            Event::FenceFailed { peer, session } => self.fence_failed(now, peer, session),
            Event::LayersDone { batch, layers } => self.layers_done(batch, layers, actions),
            Event::BatchDone(outputs) => self.batch_done(now, &outputs, actions),
            Event::BatchFailed(message) => self.batch_failed(now, &message, actions),
            Event::Written { tag, error } => self.written(now, tag, error, actions),
            Event::Arrived(notice) => self.arrived(now, notice, actions),
            Event::Verified { room, attempt, found } => self.verified(now, room, attempt, &found, actions),
            Event::Tier(event) => self.tier_event(now, event, actions),
            Event::RoomClosed { room } => self.room_closed(room, actions),
            Event::Drain => self.draining = true,
        }
    }

    /// Decides what follows from all events so far: what to admit, to compute, to repeat.
    pub fn tick(&mut self, now: Time, actions: &mut Vec<Action>) {
        self.expire(now, actions);
        self.repeat(now, actions);
        self.expire_tiers(now, actions);
        self.admit(now, actions);
        // A request whose first token ends its answer frees pages for waiting requests. Perhaps no later event would admit
        // them.
        while self.activate(now, actions) {
            self.admit(now, actions);
        }
        self.cache.write_back();
        self.start_tiers(now, actions);
        self.build_batch(now, actions);
        self.start_tiers(now, actions);
        self.tell_backlog();
        actions.extend(self.cache.take_changes().map(Action::Cache));
    }

    /// The whole cache as events, for a listener that has missed some. They replace all earlier events.
    #[must_use]
    pub fn cache_contents(&self) -> Vec<CacheEvent> {
        self.cache.contents()
    }

    /// When the next [`tick`](Self::tick) is needed if nothing happens before.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        let orphans = self.orphans.arrivals().map(|at| at.after(self.config.bootstrap_timeout));
        let jobs = [&self.deadlines, &self.patience, &self.settling].into_iter().filter_map(Deadlines::next);
        jobs.chain(orphans)
            .chain(self.outbox.next_due())
            .chain(self.peers.next_fence())
            .chain(self.cache.next_deadline())
            .min()
    }

    /// Counters and present states.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let tree = self.cache.tree_counts();
        Stats {
            pool: self.cache.counts(),
            queued: self.queue.len(),
            active: self.jobs.len() - self.queue.len(),
            quarantined_rooms: self.cache.quarantined(),
            locked_pages: tree.locked,
            prefix_locks: tree.locks,
            namespaces: tree.namespaces,
            evicted_pages: tree.evicted,
            hierarchy: self.cache.hierarchy_stats(),
            pace: self.pace.stats(),
            page_source_faults: u64::from(self.cache.page_source_fault().is_some()),
            unanswered: self.outbox.len(),
            unfenced_peers: self.peers.unfenced(),
            ..self.stats
        }
    }

    /// Counters of each storage tier, in their order.
    #[must_use]
    pub fn tier_stats(&self) -> Vec<TierStats> {
        self.cache.tier_stats()
    }

    /// Whether the worker is idle and nothing is on its way to host memory or storage.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.is_idle() && self.cache.is_idle()
    }

    /// Whether nothing is queued, computed, transferred or waited for.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.cache.quarantined() == 0 && self.outbox.len() == 0 && !self.computing
    }

    /// Recounts everything for which a running count is kept.
    ///
    /// # Panics
    /// When an invariant does not hold.
    pub fn audit(&self) {
        self.cache.audit(self.jobs.values().map(|job| &job.kv));
        self.audit_leaders();
        self.audit_queue();
        for (room, job) in &self.jobs {
            let in_steps = matches!(*job.stage(), Stage::Running(_) | Stage::Ready | Stage::Inflight);
            let computes_to = in_steps.then(|| job.stage().in_batch().unwrap_or(job.kv.computed()));
            self.cache.audit_window(*room, &job.kv, computes_to);
            let noted = self.deadlines.of(*room);
            assert!(noted.is_some_and(|at| at <= self.job_deadline(job)), "{room:?} would end too late");
        }
        assert_eq!(self.deadlines.len(), self.jobs.len(), "only jobs have deadlines");
        assert_eq!(self.leftovers.len(), self.cache.quarantined(), "what a room leaves waits for its pages");
        assert!(
            self.settling.len() <= self.leftovers.len(),
            "a write is waited for that nothing keeps pages for"
        );
        assert!(self.patience.len() <= self.queue.len(), "a request is patient that does not wait");
        let tags = |(room, job): (&Room, &Job)| {
            let (room, tags) = (*room, job.outgoing.as_ref().map(|outgoing| outgoing.tags.clone()));
            tags.into_iter().flatten().map(move |tag| (tag, room))
        };
        assert!(
            self.jobs.iter().flat_map(tags).collect::<BTreeMap<_, _>>() == self.writes,
            "a write has no owner"
        );
        let in_batch = self.jobs.values().filter(|job| job.stage().in_batch().is_some()).count();
        assert!(self.computing || in_batch == 0, "a request is in a batch that is not computed");
        let rows = self.jobs.values().filter(|job| job.aux.is_some()).count();
        assert!(
            rows + self.aux_free.len() <= self.config.max_running as usize,
            "an aux row is in two places"
        );
        let waits = |job: &&Job| job.stage().waiting().is_some();
        let queued = self.jobs.values().filter(waits).count();
        assert_eq!(queued, self.queue.len(), "the queue holds the queued jobs");
        let running = self.jobs.values().filter(|job| job.stage().is_running()).count();
        assert_eq!(running, self.running.len(), "the running list holds the running jobs");
        let ready = self.jobs.values().filter(|job| *job.stage() == Stage::Ready).count();
        assert_eq!(ready, self.ready.len(), "the ready list holds the ready jobs");
    }

    /// The fault for which the allocator was disabled. Since then the pool chooses pages itself.
    #[must_use]
    pub fn page_source_fault(&self) -> Option<&str> {
        self.cache.page_source_fault()
    }

    /// Which pages each request holds: first those of all layers or the full-attention ones, then those of its window.
    /// For tests and for finding faults.
    pub fn holdings(&self) -> impl Iterator<Item = (Room, &[PageId])> {
        self.jobs
            .iter()
            .flat_map(|(room, job)| job.kv.own_pages().into_iter().flatten().map(|pages| (*room, pages)))
    }

    fn send(&self, to: Instance, message: Message, actions: &mut Vec<Action>) {
        actions.push(Action::Send { to, floor: self.outbox.floor(to), message });
    }

    fn repeat(&mut self, now: Time, actions: &mut Vec<Action>) {
        let (patience, write) = (self.config.peer_patience, self.config.transfer_patience);
        for peer in self.outbox.silent_peers(now, patience, write, |peer| self.peers.last_heard(peer)) {
            let session = self.peers.session(peer);
            self.peer_lost(now, (peer, session), false, actions);
        }
        for (to, message) in self.outbox.due(now) {
            self.stats.messages_repeated += 1;
            self.send(to, message, actions);
        }
        for peer in self.peers.fences_due(now) {
            actions.push(Action::Fence { peer, session: self.peers.session(peer) });
        }
    }

    /// Cleans up after ended requests whose pages nothing touches any more.
    fn finish_clearing(&mut self, cleared: impl IntoIterator<Item = Room>, actions: &mut Vec<Action>) {
        for room in cleared {
            let leftovers = self.leftovers.remove(&room).unwrap_or_default();
            self.settling.remove(room);
            self.aux_free.extend(leftovers.aux);
            if leftovers.opened {
                actions.push(Action::ForgetRoom { room });
            }
            self.answer_aborts(room, leftovers.answer, actions);
        }
    }
}
