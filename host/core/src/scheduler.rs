//! The one scheduler, live and in simulation.
//!
//! It takes [`Event`]s and the time, and returns [`Action`]s. A request is a [`job`] that moves through stages:
//!
//! ```text
//! aggregated   Queued ──────────────────────────────────────────► Running ─► finished
//! prefill      Queued ─(reserve came, pages there)──────────────► Running ─► Inflight ─(commit)─► finished
//! decode       Queued ─(pages there)─► Transfer ─► Verifying ─► Ready ─► Running ─► finished
//!
//! when pages run short, or a window is not restored   Running, Loading ─► Retracted ─(pages there)─► Running
//! ```
//!
//! Whatever ends early goes through one door ([`Scheduler::retire`]): its pages are freed if nobody can touch them,
//! and go into quarantine, with the list of who can, if somebody might.

mod admission;
mod batching;
mod cache;
mod config;
mod deadlines;
mod decode;
mod ending;
mod exchange;
mod growth;
mod job;
mod pace;
mod peers;
mod pipeline;
mod prefill;
mod prefix;
mod ready;
mod restoring;
mod retraction;
mod saving;
mod sharing;
mod stage;
mod stats;
mod window;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::hierarchy::{Hierarchy, TierStats};
use crate::ids::{Instance, PageId, Room, Time};
use crate::message::Message;
use crate::outbox::Outbox;
use crate::pool::{HeldPages, PagePool, PageSource, PoolLimits};
use crate::quarantine::{Cleared, Quarantine};
use crate::radix::{CacheChanges, CacheEvent, RadixTree};
use crate::request::{Failure, FailureCode};

pub use cache::Flushed;
pub use config::{Config, Role};
use deadlines::Deadlines;
pub use exchange::{Action, Event, PageWrite, RoomOpening};
use job::Job;
use pace::Pace;
pub use pace::PaceStats;
use peers::Peers;
use prefill::Orphan;
use sharing::Leaders;
use stage::Stage;
pub use stats::Stats;

/// The scheduler of one worker.
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    pool: PagePool,
    /// Cached prefixes, if the worker keeps any.
    cache: Option<RadixTree>,
    /// What lies below the pool, if anything.
    hierarchy: Option<Hierarchy>,
    /// Since when the batch is computed, and how many tokens it has.
    step: Option<(Time, usize)>,
    /// What has changed in the cache since the last tick.
    cache_changes: CacheChanges,
    /// Requests that others wait for, because they bring pages of the same prompt.
    leaders: Leaders,
    /// Aux rows not in use.
    aux_free: Vec<u32>,
    jobs: BTreeMap<Room, Job>,
    /// Jobs that wait for pages: retracted ones first, then those not yet admitted, each oldest first.
    queue: VecDeque<Room>,
    /// Jobs whose pages are verified and that the pace has not let in yet, oldest first.
    ready: VecDeque<Room>,
    /// Jobs that take part in batches, oldest first.
    running: Vec<Room>,
    /// Whether a batch is being computed.
    computing: bool,
    /// When each job ends unless something happens before; never later than that, sometimes earlier.
    deadlines: Deadlines,
    /// When those that follow another stop doing so.
    patience: Deadlines,
    pace: Pace,
    /// Requests that have come.
    arrivals: u64,
    last_batch: u64,
    last_tag: u64,
    quarantine: Quarantine,
    /// Reserves whose request has not come from the router yet.
    orphans: BTreeMap<Room, Orphan>,
    peers: Peers,
    outbox: Outbox,
    draining: bool,
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

    /// An idle scheduler whose pages somebody else chooses, within these limits.
    ///
    /// # Panics
    /// When a limit that must be positive is zero, or the pool's is not [`Config::pages`].
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
            "what lies below the pool needs a radix cache above"
        );
        assert!(
            config.window.is_none_or(|window| window.tokens > 0 && window.parts > 0),
            "a window has tokens and takes pages: {config:?}"
        );
        Self {
            pool: PagePool::open(limits, source),
            cache: config.radix_cache.map(|policy| cache::open(&config, policy)),
            hierarchy: config.hierarchy.clone().map(|below| Hierarchy::new(below, config.page_tokens)),
            step: None,
            cache_changes: CacheChanges::new(config.cache_events),
            leaders: Leaders::new(config.seed),
            aux_free: (0..config.max_running).rev().collect(),
            deadlines: Deadlines::default(),
            patience: Deadlines::default(),
            // Nobody waits between two tokens of a prefill worker.
            pace: Pace::new(
                config.target_itl.filter(|_| config.role != Role::Prefill),
                config.max_batch as usize,
            ),
            config,
            jobs: BTreeMap::new(),
            queue: VecDeque::new(),
            ready: VecDeque::new(),
            running: Vec::new(),
            computing: false,
            arrivals: 0,
            last_batch: 0,
            last_tag: 0,
            quarantine: Quarantine::default(),
            orphans: BTreeMap::new(),
            peers: Peers::default(),
            outbox: Outbox::default(),
            draining: false,
            stats: Stats::default(),
        }
    }

    /// Takes note of one event.
    pub fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Submit(request) => self.submit(now, request, actions),
            Event::Cancel(room) => {
                let failure = Failure::new(FailureCode::Cancelled, "the request was cancelled");
                self.fail(now, room, failure, actions);
            }
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

    /// Decides what follows from all events so far: whom to admit, what to compute, what to repeat.
    pub fn tick(&mut self, now: Time, actions: &mut Vec<Action>) {
        self.expire(now, actions);
        self.repeat(now, actions);
        self.expire_tiers(now, actions);
        self.admit(now, actions);
        self.let_in(now, actions);
        self.write_back();
        self.start_tiers(now, actions);
        self.build_batch(now, actions);
        self.start_tiers(now, actions);
        self.tell_backlog();
        actions.extend(self.cache_changes.take().map(Action::Cache));
    }

    /// The whole cache as events, for a listener that has missed some: what came before them is void.
    #[must_use]
    pub fn cache_contents(&self) -> Vec<CacheEvent> {
        let mut changes = CacheChanges::new(true);
        if let Some(tree) = &self.cache {
            tree.contents(&mut changes);
        }
        changes.take().unwrap_or_default()
    }

    /// When the next [`tick`](Self::tick) is needed if nothing happens before.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        let orphans = self.orphans.values().map(|orphan| orphan.since.after(self.config.bootstrap_timeout));
        let jobs = self.deadlines.next().into_iter().chain(self.patience.next());
        jobs.chain(orphans)
            .chain(self.outbox.next_due())
            .chain(self.peers.next_fence())
            .chain(self.hierarchy.as_ref().and_then(Hierarchy::next_deadline))
            .min()
    }

    /// Counters and what is there now.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            pool: self.pool.counts(),
            queued: self.queue.len(),
            active: self.jobs.len() - self.queue.len(),
            quarantined_rooms: self.quarantine.len(),
            locked_pages: self.cache.as_ref().map_or(0, |tree| tree.counts().locked),
            prefix_locks: self.cache.as_ref().map_or(0, |tree| tree.counts().locks),
            namespaces: self.cache.as_ref().map_or(0, |tree| tree.counts().namespaces),
            evicted_pages: self.cache.as_ref().map_or(0, |tree| tree.counts().evicted),
            hierarchy: self.hierarchy.as_ref().map(Hierarchy::stats).unwrap_or_default(),
            pace: self.pace.stats(),
            page_source_faults: u64::from(self.pool.fault().is_some()),
            unanswered: self.outbox.len(),
            unfenced_peers: self.peers.unfenced(),
            ..self.stats
        }
    }

    /// Counters of each storage tier, in their order.
    #[must_use]
    pub fn tier_stats(&self) -> Vec<TierStats> {
        self.hierarchy.as_ref().map(Hierarchy::tier_stats).unwrap_or_default()
    }

    /// Whether nothing is on its way to host memory or storage either.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.is_idle() && self.hierarchy.as_ref().is_none_or(Hierarchy::is_idle)
    }

    /// Whether nothing is queued, computed, transferred or waited for.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.quarantine.len() == 0 && self.outbox.len() == 0 && !self.computing
    }

    /// Recounts everything that is counted along the way.
    ///
    /// # Panics
    /// When an invariant does not hold.
    pub fn audit(&self) {
        self.pool.audit();
        let count = |pages: &Option<HeldPages>| pages.as_ref().map_or(0, |pages| pages.ids().len());
        let of = |job: &Job| count(&job.held) + count(&job.spare) + job.window.own.ids().len();
        let held: usize = self.jobs.values().map(of).sum();
        assert_eq!(held, self.pool.counts().held, "every held page has a job");
        if let Some(tree) = &self.cache {
            tree.audit();
            let cached = tree.counts().pages + tree.counts().window_pages;
            assert_eq!(cached, self.pool.counts().cached, "every cached page is in the tree");
            let saves = self.hierarchy.as_ref().map_or(0, Hierarchy::locks);
            let locks =
                self.jobs.values().filter(|job| job.lock.is_some()).count() + self.quarantine.locks() + saves;
            assert_eq!(tree.counts().locks, locks, "every lock has a job, pages in quarantine, or a copy");
        }
        let evicted = self.hierarchy.as_ref().map_or(0, Hierarchy::evicted_pages);
        let quarantined = self.quarantine.pages() + evicted;
        assert_eq!(
            quarantined,
            self.pool.counts().quarantined,
            "every page in quarantine has an entry or a copy"
        );
        if let Some(hierarchy) = &self.hierarchy {
            hierarchy.audit();
        }
        self.audit_leaders();
        self.audit_windows();
        for (room, job) in &self.jobs {
            let noted = self.deadlines.of(*room);
            assert!(noted.is_some_and(|at| at <= self.job_deadline(job)), "{room:?} would end too late");
        }
        assert_eq!(self.deadlines.len(), self.jobs.len(), "only jobs have deadlines");
        assert!(self.patience.len() <= self.queue.len(), "somebody is patient who does not wait");
        let in_batch = self.jobs.values().filter(|job| job.in_batch.is_some());
        assert!(
            in_batch.clone().all(|job| self.computing && *job.stage == Stage::Running),
            "who is in a batch runs"
        );
        let rows = self.jobs.values().filter(|job| job.aux.is_some()).count();
        assert!(
            rows + self.aux_free.len() <= self.config.max_running as usize,
            "an aux row is in two places"
        );
        let waits = |job: &&Job| matches!(*job.stage, Stage::Queued | Stage::Retracted);
        let queued = self.jobs.values().filter(waits).count();
        assert_eq!(queued, self.queue.len(), "the queue holds the queued jobs");
        let running = self.jobs.values().filter(|job| *job.stage == Stage::Running).count();
        assert_eq!(running, self.running.len(), "the running list holds the running jobs");
        let ready = self.jobs.values().filter(|job| *job.stage == Stage::Ready).count();
        assert_eq!(ready, self.ready.len(), "the ready list holds the ready jobs");
    }

    /// What whoever chooses the pages did for which it is out of service; the pool chooses them itself since.
    #[must_use]
    pub fn page_source_fault(&self) -> Option<&str> {
        self.pool.fault()
    }

    /// Which pages each request holds, first those of all layers or the full-attention ones, then those of its window;
    /// for tests and for finding faults.
    pub fn holdings(&self) -> impl Iterator<Item = (Room, &[PageId])> {
        self.jobs.iter().flat_map(|(room, job)| {
            let held = job.held.as_ref().map(HeldPages::ids);
            held.into_iter().flat_map(|pages| [pages, job.window.own.ids()]).map(|pages| (*room, pages))
        })
    }

    fn send(&self, to: Instance, message: Message, actions: &mut Vec<Action>) {
        actions.push(Action::Send { to, floor: self.outbox.floor(to), message });
    }

    fn repeat(&mut self, now: Time, actions: &mut Vec<Action>) {
        for peer in self.outbox.silent_peers(now, self.config.peer_patience) {
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

    fn finish_clearing(&mut self, cleared: Vec<Cleared>, actions: &mut Vec<Action>) {
        for entry in cleared {
            self.aux_free.extend(entry.aux);
            self.unlock(entry.lock);
            if entry.opened {
                actions.push(Action::ForgetRoom { room: entry.room });
            }
            self.answer_aborts(entry.room, entry.answer, actions);
        }
    }
}
