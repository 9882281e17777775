//! One prefill, decode or aggregated worker, live: threads that carry out what the core decides.
//!
//! ```text
//!  control plane (tokio) ──events──► scheduler thread ──batches──► rank threads (executor, KV pool)
//!        ▲                            │   ▲                          │
//!        └──messages, answers─────────┘   └──────────events──────────┤
//!                                     └──writes──► transfer threads ─┘ (plugin, one instance per rank)
//! ```
//!
//! The threads are connected by channels, and the scheduler thread waits for no other thread.

mod alive;
mod allocator;
pub mod cache_news;
mod cache_thread;
mod cannot_work;
mod channels;
pub mod clock;
mod complaints;
pub mod fit;
#[cfg(test)]
mod gpu_pools;
mod grammars;
mod handle;
pub mod lane_counters;
mod lane_sums;
pub mod link;
pub mod metrics;
mod parts;
pub mod peers;
mod rank_thread;
pub mod registration;
mod scheduler_thread;
pub mod service;
mod staging;
mod tier_thread;
#[cfg(test)]
mod told;
mod transfer_thread;
pub mod watchdog;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use host_core::scheduler::Stats;
use host_kernels::copy::Copier;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use alive::Alive;
pub use allocator::{AllocatorPages, Pages, groups};
pub use cache_thread::CacheLog;
pub use cannot_work::CannotWork;
use channels::Input;
pub use channels::Outgoing;
use clock::Clock;
pub use grammars::{Grammars, Patience, ReadVocabulary, Under};
pub use handle::{Handle, Unwritten};
use handle::{Naming, Tiers};
use host_executor::KvMemory;
use host_plugins::Running;
use host_wire::proto::WorkerInfo;
use host_wire::protocol;
use link::Links;
pub use parts::{Parts, RankParts};
pub use staging::StagingSettings;
pub use tier_thread::{OffloadTiers, seal, slot_bytes};

/// Inputs that may wait for the scheduler at once. Senders beyond that wait (or, on the control plane, give up and repeat).
const INPUTS: usize = 4096;

/// Threads that copy a large piece into or out of staging memory: two keep up with a link of 100 Gb/s.
const COPY_THREADS: usize = 2;

/// A running worker. Dropping it does not stop it, but [`Worker::stop`] does.
pub struct Worker {
    handle: Handle,
    threads: Vec<JoinHandle<()>>,
    tiers: Vec<tier_thread::RunningTier>,
    stop: scheduler_thread::Stop,
    stopping: Arc<AtomicBool>,
    died: watch::Receiver<Option<&'static str>>,
}

impl Worker {
    /// Starts the threads. The receiver gets what the scheduler asks of the control plane, and must be drained.
    ///
    /// # Errors
    /// When memory cannot be registered with the transfer plugin, or a thread cannot be started.
    pub fn start(
        parts: Parts,
        runtime: &tokio::runtime::Handle,
    ) -> anyhow::Result<(Worker, mpsc::Receiver<Outgoing>)> {
        anyhow::ensure!(!parts.ranks.is_empty(), "a worker has at least one rank");
        let links = Arc::new(open_links(&parts)?);
        let info = Arc::new(info_of(&parts, &links)?);
        let kv_heads = parts.identity.kv_heads as usize;
        let Parts { config, pages, ranks, instance, offload, page_integrity, grammars, staging, .. } = parts;
        // SAFETY: the copies thread reads and writes pages that the core's page accounting keeps from batches and transfers.
        let pools: Vec<KvMemory> = ranks.iter().map(|rank| unsafe { rank.kv.share() }).collect();
        // A page lies on all ranks, with the heads of each.
        let page_bytes = pools.iter().map(|pool| pool.layout().shape.page_bytes() as u64).sum();
        let clock = Clock::start();
        let (inputs, receive_inputs) = mpsc::channel(INPUTS);
        let (outgoing, receive_outgoing) = mpsc::channel(INPUTS);
        let stats = Arc::new(Mutex::new(Stats::default()));
        let mut threads = Vec::new();
        let stopping = Arc::new(AtomicBool::new(false));
        let (died, receive_died) = watch::channel(None);
        let alive = |thread| Alive { thread, stopping: stopping.clone(), died: died.clone() };
        let mut ranks: Vec<_> = ranks.into_iter().map(|rank| (rank.executor, rank.kv)).collect();
        if let (Some(grammars), Some((executor, _kv))) = (&grammars, ranks.first_mut()) {
            executor.constrain(grammars.clone());
        }
        let (to_ranks, rank_threads) = rank_thread::start(ranks, &inputs, || alive("rank"))?;
        threads.extend(rank_threads);
        let settles = config.settles;
        let transfer = TransferThreads { links: &links, inputs: &inputs, page_integrity, settles, staging };
        let (to_transfer, transfer_threads) = transfer.start(&alive)?;
        threads.extend(transfer_threads);
        let mut to_tiers = None;
        let mut running_tiers = Vec::new();
        let mut tiers = Tiers::default();
        if let (Some(offload), Some(hierarchy)) = (offload, &config.hierarchy) {
            tiers.names = offload.tiers.iter().map(|(name, _)| name.clone()).collect();
            anyhow::ensure!(
                offload.tiers.len() == hierarchy.tiers.len(),
                "a tier was planned and not opened"
            );
            let started = tier_thread::start(tier_thread::Start {
                offload,
                slots: hierarchy.host_slots,
                pools,
                kv_heads,
                inputs: inputs.clone(),
                alive: &alive,
            })?;
            to_tiers = Some(started.inbox);
            threads.push(started.copies);
            running_tiers = started.tiers;
            (tiers.copied, tiers.stored) = (started.copied, started.stored);
        }
        let offload = config.hierarchy.is_some();
        let naming = offload.then_some(Naming { identity: config.identity, page_tokens: config.page_tokens });
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
            grammars: grammars.clone(),
            stats: stats.clone(),
            alive: alive("scheduler"),
        })?;
        threads.push(scheduler);
        let calls = Arc::default();
        let handle = Handle {
            inputs,
            stats,
            tiers,
            links,
            cache,
            info,
            instance,
            page_bytes,
            naming,
            grammars,
            calls,
        };
        let worker = Worker { handle, threads, tiers: running_tiers, stop, stopping, died: receive_died };
        Ok((worker, receive_outgoing))
    }

    /// The handle through which requests come in.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Resolves with a thread's name when one ended before the worker was told to stop. The worker is of no use then.
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

/// Registers the ranks' pools, and opens the way to other workers' memory.
fn open_links(parts: &Parts) -> anyhow::Result<Links> {
    let Parts { transfer, vram, ranks, identity, config, staging, .. } = parts;
    // SAFETY: transfer threads read pages that the core lets no thread write. Of a batch's pages they read only the
    // layers that the executor has reported as done. They write pages that the core gives to no other use until the data
    // has arrived.
    let share = |kv: &KvMemory| unsafe { kv.share() };
    let memories = ranks.iter().filter_map(|rank| Some((share(&rank.kv), rank.transfer.clone()?))).collect();
    let opening = link::Opening {
        plugin: transfer.clone(),
        vram: *vram,
        kv_heads: identity.kv_heads as usize,
        aux_rows: config.max_running,
        staging_bytes: staging.bytes_of_rank(ranks.len()),
    };
    Links::open(opening, memories)
}

/// The worker's description of itself for others. The server that listens adds the addresses.
fn info_of(parts: &Parts, links: &Links) -> anyhow::Result<WorkerInfo> {
    let Parts { name, config, identity, instance, .. } = parts;
    Ok(WorkerInfo {
        instance: instance.0,
        name: name.clone(),
        role: config.role.as_str().to_owned(),
        address: String::new(),
        identity: Some(identity.clone()),
        max_tokens: config.max_tokens,
        pages: config.pages,
        transfer: links.endpoints()?,
        cache_events: config.cache_events,
        protocol: protocol::NEWEST,
        protocol_oldest: protocol::OLDEST,
        metrics: String::new(),
        grammars: parts.grammars.is_some(),
        scores: true,
    })
}

/// The threads that move pages, one for each rank with an instance of the transfer plugin.
struct TransferThreads<'a> {
    links: &'a Arc<Links>,
    inputs: &'a mpsc::Sender<Input>,
    page_integrity: bool,
    settles: bool,
    staging: StagingSettings,
}

impl TransferThreads<'_> {
    /// Starts the threads. Returns their inboxes in the order of the ranks.
    fn start(
        &self,
        alive: &dyn Fn(&'static str) -> Alive,
    ) -> anyhow::Result<(Vec<transfer_thread::Inbox>, Vec<JoinHandle<()>>)> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let copier = Arc::new(Copier::new(COPY_THREADS.min(cores))?);
        let started = self.links.ranks().iter().enumerate().map(|(rank, own)| {
            transfer_thread::start(transfer_thread::Start {
                rank,
                links: self.links.clone(),
                inputs: self.inputs.clone(),
                page_integrity: self.page_integrity,
                settles: self.settles,
                policy: self.staging.policy(&own.backend.limits()),
                copier: copier.clone(),
                alive: alive("transfer"),
            })
        });
        let started: anyhow::Result<Vec<_>> = started.collect();
        Ok(started?.into_iter().unzip())
    }
}
