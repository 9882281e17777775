//! One prefill, decode or aggregated worker, live: threads that carry out what the core decides.
//!
//! ```text
//!  control plane (tokio) ──events──► scheduler thread ──batches──► rank threads (executor, KV pool)
//!        ▲                            │   ▲                          │
//!        └──messages, answers─────────┘   └──────────events──────────┤
//!                                     └──writes──► transfer threads ─┘ (plugin, one instance per rank)
//! ```
//!
//! All of them meet in channels, and nothing waits on the scheduler thread.

mod agreement;
mod allocator;
mod cache_thread;
pub mod clock;
pub mod lane_counters;
mod lane_sums;
pub mod link;
mod rank_thread;
mod scheduler_thread;
mod staging;
mod tier_thread;
mod transfer_thread;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use host_core::hierarchy::TierStats;
use host_core::request::{Failure, FinishReason, Request, Usage};
use host_core::scheduler::{Flushed, Stats};
use host_core::{Config, Event, Instance, Room, Sampled};
use host_kernels::copy::Copier;
use host_plugin_api::transfer::TransferBackend;
use tokio::sync::{mpsc, oneshot, watch};

use crate::executor::{Executor, KvMemory};
use crate::net::proto::{KvIdentity, WorkerInfo};
use crate::plugins::Running;
pub use allocator::{AllocatorPages, Pages, components};
pub use cache_thread::CacheLog;
use clock::Clock;
use link::Links;
pub use staging::Staging;
pub use tier_thread::{Below, slot_bytes};

/// Inputs that may wait for the scheduler at once; senders beyond that wait (or, on the control plane, give up and
/// repeat).
const INPUTS: usize = 4096;

/// Threads that copy a large piece into or out of staging memory: two keep up with a link of 100 Gb/s.
const COPY_THREADS: usize = 2;

/// What happens to a request, as its client is told.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The prompt's KV is complete; tokens follow.
    Began {
        /// Prompt tokens whose KV was not computed for this request.
        cached_tokens: u32,
        /// Bytes of KV that came through the transfer plugin.
        transferred_bytes: u64,
    },
    /// One more token.
    Token(Sampled),
    /// The answer is complete.
    Finished {
        /// Why.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
        /// Bytes of KV that came through the transfer plugin.
        transferred_bytes: u64,
    },
    /// There will be no complete answer.
    Failed(Failure),
}

/// What the scheduler thread is told.
#[derive(Debug)]
pub(crate) enum Input {
    /// Something happened.
    Event(Event),
    /// Something happened on one rank.
    Transfer(agreement::Report),
    /// A request, and where its answer goes.
    Submit(Request, mpsc::UnboundedSender<Answer>),
    /// The radix cache is to be emptied.
    FlushCache(oneshot::Sender<Option<Flushed>>),
}

/// What the scheduler asks of the control plane.
#[derive(Debug)]
pub enum Outgoing {
    /// [`host_core::Action::Send`].
    Message {
        /// To whom.
        to: Instance,
        /// The lowest id still repeated.
        floor: u64,
        /// What.
        message: host_core::message::Message,
    },
    /// [`host_core::Action::Connect`].
    Connect {
        /// With whom.
        peer: host_core::request::PeerRef,
        /// For the peer.
        floor: u64,
    },
    /// [`host_core::Action::Fence`].
    Fence {
        /// Whom.
        peer: Instance,
        /// Which connection.
        session: u64,
    },
}

/// Held by each thread of a worker. A thread that ends before it was asked to (a panic, a plugin that failed) leaves a
/// worker that answers nobody, so its end is told to whoever runs the process.
pub(crate) struct Alive {
    thread: &'static str,
    stopping: Arc<AtomicBool>,
    died: watch::Sender<Option<&'static str>>,
}

impl Drop for Alive {
    fn drop(&mut self) {
        if !self.stopping.load(Ordering::Acquire) {
            // The others end for the first one's sake.
            self.died.send_if_modified(|died| {
                let first = died.is_none();
                *died = died.or(Some(self.thread));
                first
            });
        }
    }
}

/// Everything a worker is made of.
pub struct Parts {
    /// Its name for people: "prefill-0".
    pub name: String,
    /// Limits and policies.
    pub config: Config,
    /// The identity of its KV.
    pub identity: KvIdentity,
    /// Who hands out the pages of its pool.
    pub pages: Pages,
    /// The transfer plugin's name; `None` for aggregated workers.
    pub transfer: Option<String>,
    /// The tensor-parallel ranks, at least one.
    pub ranks: Vec<RankParts>,
    /// Random, new at every start.
    pub instance: Instance,
    /// What lies below the pool; there when [`Config::hierarchy`] is.
    pub below: Option<Below>,
    /// Whether pages are digested on both ends of a transfer.
    pub page_integrity: bool,
    /// When pages go through staging memory, and how much there is.
    pub staging: Staging,
}

/// What one tensor-parallel rank is made of.
pub struct RankParts {
    /// Who computes.
    pub executor: Box<dyn Executor>,
    /// Its pool: all pages, and of each the heads that this rank holds ([`host_core::heads::rank_heads`]).
    pub kv: KvMemory,
    /// The rank's own instance of the transfer plugin; `None` for aggregated workers.
    pub transfer: Option<Arc<dyn TransferBackend>>,
}

/// A running worker. Dropping it does not stop it; [`Worker::stop`] does.
pub struct Worker {
    handle: Handle,
    threads: Vec<JoinHandle<()>>,
    tiers: Vec<tier_thread::RunningTier>,
    stop: scheduler_thread::Stop,
    stopping: Arc<AtomicBool>,
    died: watch::Receiver<Option<&'static str>>,
}

/// The storage tiers' names, and their counters as of the scheduler's last turn.
#[derive(Debug, Default)]
pub(crate) struct Tiers {
    names: Vec<String>,
    stats: Mutex<Vec<TierStats>>,
}

/// What one storage tier has not been given, or has not said of that it has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unwritten {
    /// Its plugin's name.
    pub tier: String,
    /// How many.
    pub pages: usize,
}

/// The way in to a running worker, for any thread or task.
#[derive(Clone)]
pub struct Handle {
    inputs: mpsc::Sender<Input>,
    stats: Arc<Mutex<Stats>>,
    tiers: Arc<Tiers>,
    links: Arc<Links>,
    cache: Option<Arc<CacheLog>>,
    info: Arc<WorkerInfo>,
    instance: Instance,
    page_bytes: u64,
}

impl Worker {
    /// Starts the threads. `outgoing` is what the scheduler asks of the control plane; it must be drained.
    ///
    /// # Errors
    /// When memory cannot be registered with the transfer plugin, or a thread cannot be started.
    pub fn start(
        parts: Parts,
        runtime: &tokio::runtime::Handle,
    ) -> anyhow::Result<(Worker, mpsc::Receiver<Outgoing>)> {
        let Parts {
            name,
            config,
            identity,
            pages,
            transfer,
            ranks,
            instance,
            below,
            page_integrity,
            staging,
        } = parts;
        anyhow::ensure!(!ranks.is_empty(), "a worker has at least one rank");
        let staging_bytes = staging.bytes_of_rank(ranks.len());
        let memories =
            ranks.iter().filter_map(|rank| Some((rank.kv.clone(), rank.transfer.clone()?))).collect();
        let kv_heads = identity.kv_heads as usize;
        let pools: Vec<KvMemory> = ranks.iter().map(|rank| rank.kv.clone()).collect();
        // A page lies on all ranks, with the heads of each.
        let page_bytes = ranks.iter().map(|rank| rank.kv.layout().shape.page_bytes() as u64).sum();
        let clock = Clock::start();
        let (inputs, receive_inputs) = mpsc::channel(INPUTS);
        let (outgoing, receive_outgoing) = mpsc::channel(INPUTS);
        let stats = Arc::new(Mutex::new(Stats::default()));
        let links = Arc::new(Links::open(transfer, memories, kv_heads, config.max_running, staging_bytes)?);
        let info = WorkerInfo {
            instance: instance.0,
            name,
            role: config.role.as_str().to_owned(),
            address: String::new(),
            identity: Some(identity),
            max_tokens: config.max_tokens,
            pages: config.pages,
            transfer: links.endpoints()?,
            cache_events: config.cache_events,
        };
        let mut threads = Vec::new();
        let stopping = Arc::new(AtomicBool::new(false));
        let (died, receive_died) = watch::channel(None);
        let alive = |thread| Alive { thread, stopping: stopping.clone(), died: died.clone() };
        let ranks = ranks.into_iter().map(|rank| (rank.executor, rank.kv)).collect();
        let (to_ranks, rank_threads) = rank_thread::start(ranks, &inputs, || alive("rank"))?;
        threads.extend(rank_threads);
        let mut to_transfer = Vec::new();
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let copier = Arc::new(Copier::new(COPY_THREADS.min(cores))?);
        for rank in 0..links.ranks().len() {
            let (inbox, thread) = transfer_thread::start(transfer_thread::Start {
                rank,
                links: links.clone(),
                inputs: inputs.clone(),
                page_integrity,
                policy: staging.policy(&links.ranks()[rank].backend.limits()),
                copier: copier.clone(),
                alive: alive("transfer"),
            })?;
            to_transfer.push(inbox);
            threads.push(thread);
        }
        let mut to_tiers = None;
        let mut running_tiers = Vec::new();
        let mut tiers = Tiers::default();
        if let (Some(below), Some(hierarchy)) = (below, &config.hierarchy) {
            tiers.names = below.tiers.iter().map(|(name, _)| name.clone()).collect();
            anyhow::ensure!(below.tiers.len() == hierarchy.tiers.len(), "a tier was planned and not opened");
            let started = tier_thread::start(tier_thread::Start {
                below,
                slots: hierarchy.host_slots,
                pools,
                kv_heads,
                inputs: inputs.clone(),
                alive: &alive,
            })?;
            to_tiers = Some(started.inbox);
            threads.push(started.copies);
            running_tiers = started.tiers;
        }
        let mut cache = None;
        let mut cache_feed = None;
        if config.cache_events {
            let (feed, log, thread) = cache_thread::start(config.pages, config.page_tokens, alive("cache"))?;
            (cache, cache_feed) = (Some(log), Some(feed));
            threads.push(thread);
        }
        let tiers = Arc::new(tiers);
        let (stop, scheduler) = scheduler_thread::start(scheduler_thread::Start {
            config,
            pages,
            page_bytes,
            clock,
            runtime: runtime.clone(),
            inputs: receive_inputs,
            outgoing,
            to_ranks,
            to_transfer,
            to_tiers,
            tiers: tiers.clone(),
            links: links.clone(),
            cache_feed,
            stats: stats.clone(),
            alive: alive("scheduler"),
        })?;
        threads.push(scheduler);
        let handle =
            Handle { inputs, stats, tiers, links, cache, info: Arc::new(info), instance, page_bytes };
        let worker = Worker { handle, threads, tiers: running_tiers, stop, stopping, died: receive_died };
        Ok((worker, receive_outgoing))
    }

    /// The way in.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Resolves with a thread's name when one ended although nobody asked it to. The worker is of no use then.
    pub async fn died(&self) -> &'static str {
        let mut died = self.died.clone();
        let thread = died.wait_for(Option::is_some).await.ok().and_then(|thread| *thread);
        thread.unwrap_or("last")
    }

    /// Ends all threads and all plugins. Requests that still run are given up.
    ///
    /// # Errors
    /// When a plugin did not stop in time.
    pub fn stop(self) -> anyhow::Result<()> {
        self.stopping.store(true, Ordering::Release);
        self.stop.now();
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!("a worker thread had panicked");
            }
        }
        let mut running = Running::default();
        self.tiers.into_iter().for_each(|tier| tier.stops_with(&mut running));
        self.handle.links.shutdown(running)
    }
}

impl Handle {
    /// What this worker tells others about itself; its address is added by who listens.
    #[must_use]
    pub fn info(&self) -> &WorkerInfo {
        &self.info
    }

    /// This process's life.
    #[must_use]
    pub fn instance(&self) -> Instance {
        self.instance
    }

    /// Bytes of a KV page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Connections to other workers' memory.
    #[must_use]
    pub fn links(&self) -> &Arc<Links> {
        &self.links
    }

    /// What happens to the radix cache, if the worker tells.
    #[must_use]
    pub fn cache(&self) -> Option<&Arc<CacheLog>> {
        self.cache.as_ref()
    }

    /// The scheduler's counters, as of its last turn.
    #[must_use]
    pub fn stats(&self) -> Stats {
        *self.stats.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The storage tiers' names and counters, as of the scheduler's last turn.
    #[must_use]
    pub fn tiers(&self) -> Vec<(String, TierStats)> {
        let stats = self.tiers.stats.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.tiers.names.iter().cloned().zip(stats.iter().copied()).collect()
    }

    /// What is on its way to each storage tier, as of the scheduler's last turn.
    #[must_use]
    pub fn unwritten(&self) -> Vec<Unwritten> {
        // On their way to host memory, and to all tiers from there.
        let saved = self.stats().hierarchy.host.filling;
        let of =
            |(tier, stats): (String, TierStats)| Unwritten { tier, pages: saved + stats.writes_under_way };
        self.tiers().into_iter().map(of).collect()
    }

    /// Hands a request in. The answer ends with [`Answer::Finished`] or [`Answer::Failed`]; a channel that just closes
    /// means that the worker stopped.
    pub async fn submit(&self, request: Request) -> mpsc::UnboundedReceiver<Answer> {
        let (answers, receive) = mpsc::unbounded_channel();
        if self.inputs.send(Input::Submit(request, answers)).await.is_err() {
            tracing::debug!("a request came after the scheduler had stopped");
        }
        receive
    }

    /// Empties the radix cache, if the worker keeps one; `None` when it has stopped.
    pub async fn flush_cache(&self) -> Option<Option<Flushed>> {
        let (flushed, receive) = oneshot::channel();
        self.inputs.send(Input::FlushCache(flushed)).await.ok()?;
        receive.await.ok()
    }

    /// Gives a request up; harmless if it has ended.
    pub async fn cancel(&self, room: Room) {
        self.event(Event::Cancel(room)).await;
    }

    /// Passes an event on, waiting while the scheduler's inbox is full.
    pub async fn event(&self, event: Event) {
        if self.inputs.send(Input::Event(event)).await.is_err() {
            tracing::debug!("an event came after the scheduler had stopped");
        }
    }

    /// Passes an event on if there is room; false when it was dropped.
    #[must_use]
    pub fn try_event(&self, event: Event) -> bool {
        self.inputs.try_send(Input::Event(event)).is_ok()
    }
}
