//! The one scheduler, live and in simulation.
//!
//! It takes [`Event`]s and the time, and returns [`Action`]s. A request is a [`job`] that moves through stages:
//!
//! ```text
//! aggregated   Queued ──────────────────────────────────────────► Running ─► finished
//! prefill      Queued ─(reserve came, pages there)──────────────► Running ─► Inflight ─(commit)─► finished
//! decode       Queued ─(pages there)─► Transfer ─► Verifying ─► Ready ─► Running ─► finished
//!
//! when pages run short, decode and aggregated     Running ─► Retracted ─(pages there)─► Running
//! ```
//!
//! Whatever ends early goes through one door ([`Scheduler::retire`]): its pages are freed if nobody can touch them,
//! and go into quarantine, with the list of who can, if somebody might.

mod admission;
mod batching;
mod cache;
mod decode;
mod growth;
mod job;
mod pace;
mod peers;
mod pipeline;
mod prefill;
mod ready;
mod retraction;
mod sharing;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

use crate::aux_row::AuxRow;
use crate::batch::{Batch, Sampled, SequenceOutput};
use crate::histogram::Histogram;
use crate::ids::{Instance, PageId, Room, Time};
use crate::integrity::Found;
use crate::layer_groups::LayerGroups;
use crate::message::Message;
use crate::notice::Notice;
use crate::outbox::Outbox;
use crate::pool::{HeldPages, PagePool, PoolCounts};
use crate::quarantine::{Cleared, Quarantine};
use crate::radix::{CacheChanges, CacheEvent, PageHash, Policy, RadixTree};
use crate::request::{Failure, FailureCode, FinishReason, PeerRef, Request, Usage};
use crate::transfer::Tag;

pub use cache::Flushed;
use job::{Job, Stage};
use pace::Pace;
pub use pace::PaceStats;
use peers::Peers;
use prefill::Orphan;
use sharing::Leaders;

/// What a worker does with requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Computes prompts and hands their KV over.
    Prefill,
    /// Takes prompts' KV over and generates.
    Decode,
    /// Does both, without a transfer. What the other two do together must equal this.
    Aggregated,
}

impl Role {
    /// As flags and the control plane write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Aggregated => "aggregated",
        }
    }
}

/// Limits and policies of one worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// What the worker does.
    pub role: Role,
    /// Pages in its pool.
    pub pages: u32,
    /// Tokens in a page.
    pub page_tokens: u32,
    /// Longest prompt + answer, in tokens.
    pub max_tokens: u32,
    /// Token ids are below this.
    pub vocabulary: u32,
    /// Prompt tokens computed in one batch at most.
    pub chunk_tokens: u32,
    /// Keep the KV of ended requests, and let later ones that begin alike use it: what goes first when pages are short.
    pub radix_cache: Option<Policy>,
    /// Tell what enters and leaves the radix cache ([`Action::Cache`]). Without anybody who listens it is work for
    /// nothing.
    pub cache_events: bool,
    /// Digest of everything beside namespace and tokens that makes KV differ; see
    /// [`crate::radix::TreeConfig::identity`]. Whoever is to know this worker's pages by their prompts must know it.
    pub identity: PageHash,
    /// Tokens of its answer for which each request finds pages ready when another is admitted, at least one. More makes
    /// retractions rare, fewer lets more requests run at once.
    pub reserved_decode_tokens: u32,
    /// Mean time between two tokens of an answer that batches are to stay under; `None` lets as many run as fit.
    pub target_itl: Option<Duration>,
    /// A number that clients do not know; see [`crate::radix::TreeConfig::seed`].
    pub seed: u64,
    /// In how many groups of layers pages are sent; the model's layers.
    pub layer_groups: LayerGroups,
    /// Sequences in one batch at most.
    pub max_batch: u32,
    /// Requests past the queue at most: computing, or with a transfer under way. Each has an aux row.
    pub max_running: u32,
    /// Requests in the queue at most; more are refused as busy.
    pub max_queued: u32,
    /// Transfers of one room at most, the first included.
    pub max_attempts: u32,
    /// How long one leg waits for the other to appear.
    pub bootstrap_timeout: Duration,
    /// How long a request may take in all.
    pub request_timeout: Duration,
    /// How long a peer may leave a message unanswered before it counts as lost.
    pub peer_patience: Duration,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The router sent a request.
    Submit(Request),
    /// The router no longer wants the answer.
    Cancel(Room),
    /// A peer said something.
    Message {
        /// Who.
        from: Instance,
        /// The lowest id that the sender still repeats to us.
        floor: u64,
        /// What.
        message: Message,
    },
    /// The handshake with a peer succeeded; pages can be exchanged from now on. An earlier connection to the same
    /// peer was fenced before.
    PeerReady {
        /// Who.
        peer: Instance,
        /// Messages of the peer below this id belong to an earlier connection ([`Action::Connect`] carries it over).
        floor: u64,
        /// Names the connection, higher than any before; every write over it says so ([`PageWrite::session`]).
        session: u64,
    },
    /// The handshake failed.
    PeerRefused {
        /// Who.
        peer: Instance,
        /// Why.
        message: String,
    },
    /// A connection to a peer is gone. `fenced`: it is proven that none of the writes over it lands any more.
    PeerLost {
        /// Who.
        peer: Instance,
        /// Which connection. News of an earlier one than that in use changes nothing: the one in use was begun when
        /// the earlier one was fenced.
        session: u64,
        /// Whether its late writes are proven to land nowhere.
        fenced: bool,
    },
    /// The fence around a connection could not be proven yet.
    FenceFailed {
        /// Who.
        peer: Instance,
        /// Which connection.
        session: u64,
    },
    /// The KV of layers `0..layers` is in the pool for all positions of the batch that is being computed, and is not
    /// written again. May be left out or come late; says nothing once the batch has ended.
    LayersDone {
        /// [`Batch::id`].
        batch: u64,
        /// How many layers.
        layers: u32,
    },
    /// The batch was computed.
    BatchDone(Vec<SequenceOutput>),
    /// The batch could not be computed.
    BatchFailed(String),
    /// A write of ours has settled.
    Written {
        /// Which.
        tag: Tag,
        /// Its error, if it failed.
        error: Option<String>,
    },
    /// A part of a room's pages is in our memory.
    Arrived(Notice),
    /// What [`Action::Verify`] found.
    Verified {
        /// The room.
        room: Room,
        /// The try within the room.
        attempt: u32,
        /// What lies in our memory.
        found: Box<Found>,
    },
    /// No new requests from now on.
    Drain,
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Compute this; answer with [`Event::BatchDone`] or [`Event::BatchFailed`].
    Run(Batch),
    /// Say this to a peer; it may get lost.
    Send {
        /// To whom.
        to: Instance,
        /// The lowest id still repeated to this peer.
        floor: u64,
        /// What.
        message: Message,
    },
    /// Fence what is left of an earlier connection and shake hands with a peer; answer with [`Event::PeerReady`] or
    /// [`Event::PeerRefused`].
    Connect {
        /// With whom.
        peer: PeerRef,
        /// For the peer's [`Event::PeerReady`].
        floor: u64,
    },
    /// Cut one connection to a peer off in both directions; answer with [`Event::PeerLost`] (fenced) or
    /// [`Event::FenceFailed`]. Proven already when that connection is not the one in use any more.
    Fence {
        /// Who.
        peer: Instance,
        /// Which connection.
        session: u64,
    },
    /// Write pages into a peer's memory; answer with [`Event::Written`] once settled.
    Write(PageWrite),
    /// Ask that what has not started of a write never starts; it still settles.
    CancelWrite(Tag),
    /// Read the aux row and digest the pages; answer with [`Event::Verified`].
    Verify {
        /// The room.
        room: Room,
        /// The try within the room.
        attempt: u32,
        /// The pages that were written, in order.
        pages: Vec<PageId>,
        /// The room's aux row.
        aux_slot: u32,
    },
    /// Give the client a token.
    Emit {
        /// The request.
        room: Room,
        /// The token.
        token: Sampled,
    },
    /// The answer is complete.
    Finish {
        /// The request.
        room: Room,
        /// Why it is complete.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
    },
    /// The request ended without a complete answer.
    Fail {
        /// The request.
        room: Room,
        /// Why.
        failure: Failure,
    },
    /// The contents of the radix cache changed so, in this order; for those who listen.
    Cache(Vec<CacheEvent>),
    /// A prompt's KV is complete in these pages; for digests and events.
    PromptReady {
        /// The request.
        room: Room,
        /// Tokens of the prompt.
        tokens: u32,
        /// Its pages, in order.
        pages: Vec<PageId>,
        /// Tokens of it whose KV was not computed for this request.
        cached_tokens: u32,
        /// Pages of it that came in through a transfer backend.
        transferred_pages: u32,
    },
}

/// One part of a room on its way.
#[derive(Clone, Debug, PartialEq)]
pub struct PageWrite {
    /// Names the write until it has settled.
    pub tag: Tag,
    /// Whose memory is written.
    pub to: Instance,
    /// The connection that the room belongs to. A write must not go out over a later one: its pages may be another
    /// request's by then.
    pub session: u64,
    /// Travels behind the data.
    pub notice: Notice,
    /// Our pages.
    pub source: Vec<PageId>,
    /// The peer's pages, pair by pair.
    pub target: Vec<PageId>,
    /// Which of their layers.
    pub layers: Range<u32>,
    /// With the last part: the row, our slot for it and the peer's. The digest is filled in by who writes.
    pub aux: Option<(AuxRow, u32, u32)>,
}

/// Counters since start, and what is there now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Where the pages are.
    pub pool: PoolCounts,
    /// Requests waiting.
    pub queued: usize,
    /// Requests past the queue.
    pub active: usize,
    /// Rooms whose pages are in quarantine.
    pub quarantined_rooms: usize,
    /// Cached pages that a request uses.
    pub locked_pages: usize,
    /// Requests that keep a cached prefix, one without pages too.
    pub prefix_locks: usize,
    /// Cache namespaces that hold pages, or that a request uses.
    pub namespaces: usize,
    /// Cached pages given up for want of free ones.
    pub evicted_pages: u64,
    /// Prompt tokens found cached at admission.
    pub cached_tokens: u64,
    /// How long steps take, and what follows from it.
    pub pace: PaceStats,
    /// Time between two tokens of an answer, as they were drawn.
    pub between_tokens: Histogram,
    /// Of [`cached_tokens`](Self::cached_tokens), those of prompts that were completed with them.
    pub delivered_tokens: u64,
    /// Decode: verified transfers of whole prompts.
    pub full_transfers: u64,
    /// Decode: verified transfers of what was not cached of a prompt.
    pub delta_transfers: u64,
    /// Decode: prompts that were cached completely, so that only the aux row moved.
    pub full_hits: u64,
    /// Decode: pages of prompts that were there and did not have to be sent.
    pub pages_saved: u64,
    /// Requests that waited for another one's pages instead of having their own sent or computed.
    pub shared_transfers: u64,
    /// Pages that were neither sent nor computed for that.
    pub shared_pages: u64,
    /// Messages repeated until answered.
    pub unanswered: usize,
    /// Peers that were cut off without proof so far that nothing of them lands here any more.
    pub unfenced_peers: usize,
    /// Batches computed.
    pub batches: u64,
    /// Prompt tokens computed.
    pub prefill_tokens: u64,
    /// Decode steps computed.
    pub decode_tokens: u64,
    /// Times that a request gave its pages up for others and went back to the queue.
    pub retractions: u64,
    /// Tokens whose KV a retracted request found cached when it went on.
    pub restored_tokens: u64,
    /// Tokens whose KV was computed again after a retraction.
    pub recomputed_tokens: u64,
    /// Pages whose arrival was verified.
    pub pages_received: u64,
    /// Pages written to peers.
    pub pages_sent: u64,
    /// Parts of transfers that were sent while later layers of their pages were being computed.
    pub layer_parts_sent: u64,
    /// Transfers that were not what prefill sent, and were asked for again.
    pub integrity_failures: u64,
    /// Messages repeated because no answer came.
    pub messages_repeated: u64,
    /// Messages dropped because their sender had given them up.
    pub messages_stale: u64,
    /// Requests finished.
    pub finished: u64,
    /// Requests failed.
    pub failed: u64,
}

/// The scheduler of one worker.
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    pool: PagePool,
    /// Cached prefixes, if the worker keeps any.
    cache: Option<RadixTree>,
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
    pace: Pace,
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
        Self {
            pool: PagePool::new(config.pages),
            cache: config.radix_cache.map(|policy| cache::open(&config, policy)),
            cache_changes: CacheChanges::new(config.cache_events),
            leaders: Leaders::new(config.seed),
            aux_free: (0..config.max_running).rev().collect(),
            pace: Pace::new(config.target_itl, config.max_batch as usize),
            config,
            jobs: BTreeMap::new(),
            queue: VecDeque::new(),
            ready: VecDeque::new(),
            running: Vec::new(),
            computing: false,
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
            Event::Drain => self.draining = true,
        }
    }

    /// Decides what follows from all events so far: whom to admit, what to compute, what to repeat.
    pub fn tick(&mut self, now: Time, actions: &mut Vec<Action>) {
        self.expire(now, actions);
        self.repeat(now, actions);
        self.admit(now, actions);
        self.let_in(now, actions);
        self.build_batch(now, actions);
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
        let jobs = self.jobs.values().map(|job| self.job_deadline(job));
        let orphans = self.orphans.values().map(|orphan| orphan.since.after(self.config.bootstrap_timeout));
        jobs.chain(orphans)
            .chain(self.outbox.next_due())
            .chain(self.peers.next_fence())
            .chain(self.next_impatient())
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
            pace: self.pace.stats(),
            unanswered: self.outbox.len(),
            unfenced_peers: self.peers.unfenced(),
            ..self.stats
        }
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
        let held: usize = self.jobs.values().map(|job| count(&job.held) + count(&job.spare)).sum();
        assert_eq!(held, self.pool.counts().held, "every held page has a job");
        if let Some(tree) = &self.cache {
            tree.audit();
            assert_eq!(tree.counts().pages, self.pool.counts().cached, "every cached page is in the tree");
            let locks = self.jobs.values().filter(|job| job.lock.is_some()).count() + self.quarantine.locks();
            assert_eq!(tree.counts().locks, locks, "every lock has a job, or pages in quarantine");
        }
        self.audit_leaders();
        let rows = self.jobs.values().filter(|job| job.aux.is_some()).count();
        assert!(
            rows + self.aux_free.len() <= self.config.max_running as usize,
            "an aux row is in two places"
        );
        let waits = |job: &&Job| matches!(job.stage, Stage::Queued | Stage::Retracted);
        let queued = self.jobs.values().filter(waits).count();
        assert_eq!(queued, self.queue.len(), "the queue holds the queued jobs");
        let running = self.jobs.values().filter(|job| job.stage == Stage::Running).count();
        assert_eq!(running, self.running.len(), "the running list holds the running jobs");
        let ready = self.jobs.values().filter(|job| job.stage == Stage::Ready).count();
        assert_eq!(ready, self.ready.len(), "the ready list holds the ready jobs");
    }

    /// Which pages each request holds; for tests and for finding faults.
    pub fn holdings(&self) -> impl Iterator<Item = (Room, &[PageId])> {
        self.jobs.iter().filter_map(|(room, job)| Some((*room, job.held.as_ref()?.ids())))
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
            self.answer_aborts(entry.room, entry.answer, actions);
        }
    }
}
