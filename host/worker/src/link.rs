//! Links to other workers' memory: how they are made, found and fenced.
//!
//! Every rank has its own instance of the transfer plugin. A link to a peer is a connection for each pair of ranks that
//! share KV heads: it is made, fenced and lost as one.

mod peer;
mod table;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use host_core::Instance;
use host_core::aux_row::AUX_ROW_BYTES;
use host_core::staging::{RingStats, SenderStats, piece_limit};
use host_core::transfer::KvSlice;
use host_executor::KvMemory;
use host_executor::memory::{Location, PageBuffer};
use host_memory::{Mapping, SharedMemory};
use host_plugin_api::ErrorCode;
use host_plugin_api::transfer::{Address, Memory, MemoryKind, PeerId, RegionId, TransferBackend};
use host_plugins::Running;
use host_wire::proto::{TransferEndpoint, WorkerInfo};
use parking_lot::Mutex;
use rustix::fd::AsRawFd;

use super::cannot_work::{CannotWork, not_registered};
use super::fit::no_endpoint;
use super::lane_counters::LaneCounters;
pub use peer::{Link, PeerRank};
use table::{NotReplaced, Table};

/// How long a plugin may take to stop.
const SHUTDOWN: Duration = Duration::from_secs(3);

/// The name under which a rank opens its instance of the transfer plugin.
#[must_use]
pub fn rank_name(instance: Instance, rank: usize) -> String {
    format!("{instance}.{rank}")
}

/// The instance and the rank whose transfer plugin has this name.
#[must_use]
pub fn rank_of(name: &str) -> Option<(Instance, usize)> {
    let (instance, rank) = name.split_once('.')?;
    Some((Instance(u64::from_str_radix(instance, 16).ok()?), rank.parse().ok()?))
}

/// A rank's instance of the transfer plugin, and the memory that is registered with it.
pub(super) struct Rank {
    pub backend: Arc<dyn TransferBackend>,
    pub kv: KvMemory,
    /// `None` when the plugin does not reach the pool's memory: then pages go through staging memory alone.
    pub kv_region: Option<RegionId>,
    /// The region of the aux rows. Rank 0 alone has one.
    pub aux_region: Option<RegionId>,
    /// Memory in which pieces of KV are gathered before they are sent, and in which they arrive. `None` without staging.
    pub staging: Option<StagingMemory>,
    /// The counters of staging that the transfer thread last reported.
    stats: Mutex<(SenderStats, RingStats)>,
}

/// A rank's staging memory.
pub(super) struct StagingMemory {
    pub memory: Arc<PageBuffer>,
    pub region: RegionId,
}

impl Rank {
    /// The part of the model's KV that the pool holds.
    pub(super) fn share(&self) -> KvSlice {
        KvSlice::pool(*self.kv.layout(), self.kv.heads().start)
    }

    pub(super) fn set_staging_stats(&self, stats: (SenderStats, RingStats)) {
        *self.stats.lock() = stats;
    }

    /// Bytes of the staging memory.
    pub(super) fn staging_bytes(&self) -> u64 {
        self.staging.as_ref().map_or(0, |staging| staging.memory.bytes() as u64)
    }
}

/// A pool as it is registered.
fn of_pool(pool: &Location) -> Memory {
    Memory {
        address: Address(pool.address),
        length: pool.bytes as u64,
        kind: if pool.device.is_some() { MemoryKind::VRAM } else { MemoryKind::DRAM },
        device: pool.device.unwrap_or_default(),
        fd: pool.fd.map_or(-1, |fd| fd.as_raw_fd()),
        generation: GENERATION,
        fd_offset: 0,
    }
}

/// Host memory as it is registered.
fn host_memory(memory: &Mapping, fd: i32) -> Memory {
    Memory {
        address: Address::of(memory.address().as_ptr()),
        length: memory.bytes() as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd,
        generation: GENERATION,
        fd_offset: 0,
    }
}

/// The transfer plugin of a worker, its own registered memory, and its links to peers. Shared by all threads.
pub struct Links {
    plugin: String,
    /// Empty on aggregated workers.
    ranks: Vec<Rank>,
    kv_heads: usize,
    aux: Arc<SharedMemory>,
    peers: Table<Instance, Link>,
    counters: LaneCounters,
}

/// The log line for a peer that could not be cut off.
pub(super) fn not_cut_off(plugin: &str, peer: Instance, error: &host_plugin_api::Error) -> String {
    format!(
        "plugin {plugin:?}: disconnect did not cut off the peer {peer}: {error}; pages that it may write stay in quarantine, and it \
         is tried again"
    )
}

/// Stops all running plugins at the same time.
///
/// # Errors
/// With each plugin that did not stop in time, and why.
pub(super) fn stop(running: Running) -> anyhow::Result<()> {
    running.stop_together(SHUTDOWN).map_err(|failed| {
        let said: Vec<_> = failed.iter().map(|(name, error)| format!("plugin {name:?}: {error}")).collect();
        anyhow::anyhow!("not everything stopped: {}", said.join("; "))
    })
}

fn panicked() -> host_plugin_api::Error {
    host_plugin_api::Error::new(ErrorCode::PANICKED, "its disconnect panicked")
}

/// The generation of this worker's memory, which is registered once in its life.
const GENERATION: u32 = 1;
/// The region of a pool that is not registered: no plugin has it.
const NO_REGION: u32 = u32::MAX;

/// The transfer plugin of a worker, and the sizes of its memory.
#[derive(Debug)]
pub(super) struct Opening {
    /// The plugin's name, or `None` when there are no links.
    pub plugin: Option<String>,
    /// Whether it registers the memory of devices.
    pub vram: bool,
    /// KV heads of the model, over all ranks.
    pub kv_heads: usize,
    /// Aux rows of rank 0.
    pub aux_rows: u32,
    /// Bytes of staging memory of each rank, 0 for none.
    pub staging_bytes: usize,
}

impl Opening {
    /// Whether the plugin reaches this pool. If it does not, checks that there is enough staging memory.
    ///
    /// # Errors
    /// When there is too little staging memory.
    fn reaches(&self, pool: &KvMemory) -> Result<bool, CannotWork> {
        let Some(device) = pool.location().device.filter(|_| !self.vram) else { return Ok(true) };
        let (bytes, block) = (self.staging_bytes as u64, pool.layout().shape.block_bytes() as u64);
        if piece_limit(bytes, bytes) >= block {
            return Ok(false);
        }
        let there_is = match bytes {
            0 => "none: leave --staging never and --staging-bytes 0 out".to_owned(),
            _ => format!(
                "{bytes} bytes for a rank, too few for one head of one layer of a page, which has {block}: raise --staging-bytes to \
                 {} for each rank",
                block * 8
            ),
        };
        Err(CannotWork(format!(
            "plugin {:?} does not declare vram, so that pages of a KV pool in the memory of GPU {device} go through staging memory, \
             of which there is {there_is}, or name a transfer plugin that declares vram",
            self.plugin.as_deref().unwrap_or_default()
        )))
    }
}

impl Links {
    /// Registers each rank's pool and its staging memory with its instance of the plugin, and the aux rows with that of rank 0. A
    /// pool that the plugin does not reach is not registered.
    ///
    /// # Errors
    /// When memory cannot be allocated, the plugin refuses it, or there is no way to a pool.
    pub(super) fn open(
        opening: Opening,
        ranks: Vec<(KvMemory, Arc<dyn TransferBackend>)>,
    ) -> anyhow::Result<Self> {
        let Opening { kv_heads, aux_rows, staging_bytes, .. } = opening;
        let aux = Arc::new(SharedMemory::new("host-aux", aux_rows as usize * AUX_ROW_BYTES)?);
        let plugin = opening.plugin.clone().unwrap_or_default();
        let register = |backend: &Arc<dyn TransferBackend>, memory: &Memory, what| {
            backend.register(memory).map_err(|error| not_registered(&plugin, what, memory.kind, &error))
        };
        let ranks = ranks.into_iter().enumerate().map(|(rank, (kv, backend))| {
            let reaches = opening.reaches(&kv)?;
            let kv_region =
                reaches.then(|| register(&backend, &of_pool(&kv.location()), "KV pool")).transpose()?;
            let aux_rows = host_memory(&aux, aux.fd().as_raw_fd());
            let aux_region = (rank == 0).then(|| register(&backend, &aux_rows, "aux rows")).transpose()?;
            let staging = match staging_bytes {
                0 => None,
                bytes => {
                    let memory = PageBuffer::shared(&kv, "host-staging", bytes).with_context(|| {
                        format!("no {bytes} bytes of staging memory for rank {rank}: lower --staging-bytes")
                    })?;
                    let fd = memory.fd().map_or(-1, |fd| fd.as_raw_fd());
                    let region = register(&backend, &host_memory(&memory, fd), "staging memory")?;
                    Some(StagingMemory { memory: Arc::new(memory), region })
                }
            };
            if rank == 0 && !reaches {
                tracing::info!(
                    "plugin {plugin:?} does not reach the memory of a GPU, where the KV pool is: all pages go through {staging_bytes} \
                     bytes of staging memory of each rank, which copies them once more; a transfer plugin that declares vram would \
                     not"
                );
            }
            Ok(Rank { backend, kv, kv_region, aux_region, staging, stats: Mutex::default() })
        });
        Ok(Self {
            ranks: ranks.collect::<anyhow::Result<_>>()?,
            plugin,
            kv_heads,
            aux,
            peers: Table::default(),
            counters: LaneCounters::default(),
        })
    }

    /// The plugin's name. Empty without a plugin.
    #[must_use]
    pub fn plugin_name(&self) -> &str {
        &self.plugin
    }

    /// The ranks that can exchange pages.
    pub(super) fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// The counters of what the ranks send and receive through staging memory.
    #[must_use]
    pub fn staging_stats(&self) -> Vec<(SenderStats, RingStats)> {
        let stats = |rank: &Rank| *rank.stats.lock();
        self.ranks.iter().map(stats).collect()
    }

    /// The counters of the lanes.
    #[must_use]
    pub fn counters(&self) -> &LaneCounters {
        &self.counters
    }

    pub(super) fn aux(&self) -> &SharedMemory {
        &self.aux
    }

    /// The endpoint of each rank, with what a peer needs to connect to it.
    pub(super) fn endpoints(&self) -> anyhow::Result<Vec<TransferEndpoint>> {
        let endpoint = |(rank, own): (usize, &Rank)| {
            let endpoint = own.backend.endpoint().map_err(|error| no_endpoint(&self.plugin, &error))?;
            let aux_bytes = if own.aux_region.is_some() { self.aux.bytes() as u64 } else { 0 };
            Ok(TransferEndpoint {
                plugin: self.plugin.clone(),
                endpoint,
                kv_region: own.kv_region.map_or(NO_REGION, |region| region.0),
                aux_region: own.aux_region.map_or(0, |region| region.0),
                kv_generation: GENERATION,
                aux_generation: GENERATION,
                // No peer writes to a pool of no bytes.
                kv_bytes: own.kv_region.map_or(0, |_| own.kv.layout().bytes() as u64),
                aux_bytes,
                rank: u32::try_from(rank)?,
                staging_region: own.staging.as_ref().map_or(0, |staging| staging.region.0),
                staging_generation: GENERATION,
                staging_bytes: own.staging_bytes(),
            })
        };
        self.ranks.iter().enumerate().map(endpoint).collect()
    }

    /// The link to a peer.
    #[must_use]
    pub fn get(&self, peer: Instance) -> Option<Arc<Link>> {
        self.peers.get(peer)
    }

    /// Whether the connection with this plugin handle is proven to be cut off: then no link has it any more.
    #[must_use]
    pub(super) fn is_cut_off(&self, (peer, session): (Instance, u64), handle: PeerId) -> bool {
        let link = self.get(peer).filter(|link| link.session == session);
        link.is_none_or(|link| !link.connections.values().any(|other| *other == handle))
    }

    /// Fences what is left of an earlier link to a peer and makes a new link. Returns the new session. Blocks, so it must
    /// not be called on the scheduler thread.
    ///
    /// # Errors
    /// A sentence for the peer's refusal: no plugin in common, no peer there, an earlier connection not fenced.
    pub fn connect(&self, peer: &WorkerInfo) -> Result<u64, String> {
        let instance = Instance(peer.instance);
        let Some(own) = self.ranks.first() else {
            return Err("this worker has no transfer plugin".into());
        };
        let (ranks, endpoints) = peer::read(peer, &self.plugin, own.kv.layout(), self.kv_heads)?;
        let (lanes, pairs) = peer::lanes(peer, self.kv_heads, self.ranks.len(), ranks.len())?;
        pairs
            .iter()
            .try_for_each(|(own, theirs)| self.can_exchange(&self.ranks[*own], &ranks[*theirs], peer))?;
        let make = |session| {
            let mut link = Link { session, lanes, ranks, connections: HashMap::new() };
            for (own, theirs) in pairs {
                let name = rank_name(instance, theirs);
                match self.ranks[own].backend.connect(&name, &endpoints[theirs]) {
                    Ok(handle) => {
                        link.connections.insert((own, theirs), handle);
                    }
                    Err(error) => {
                        let why = format!(
                            "plugin {:?} could not connect rank {own} to rank {theirs} of {}: {error}",
                            self.plugin, peer.name
                        );
                        return Err((Arc::new(link), why));
                    }
                }
            }
            Ok(link)
        };
        self.peers.replace(instance, |link| self.cut(link), make).map_err(|failed| match failed {
            NotReplaced::Earlier(error) => format!("an earlier connection could not be fenced: {error}"),
            NotReplaced::Made { why, left } => {
                if let Some(error) = left {
                    tracing::warn!(peer = %instance, %error, "half of a link could not be cut off yet");
                }
                why
            }
        })
    }

    /// Checks that pages between two ranks fit through staging memory, if there is no other way for them.
    fn can_exchange(&self, own: &Rank, theirs: &PeerRank, peer: &WorkerInfo) -> Result<(), String> {
        let whose = match (own.kv_region, theirs.kv_region) {
            (Some(_), Some(_)) => return Ok(()),
            (None, _) => "this worker",
            (_, None) => peer.name.as_str(),
        };
        let block = own.kv.layout().shape.block_bytes();
        let (here, there) = (own.staging_bytes(), theirs.staging_bytes);
        if piece_limit(here, there) >= block as u64 {
            return Ok(());
        }
        Err(format!(
            "plugin {:?} does not reach the KV pool of {whose}, so that pages between this worker and {} go through staging memory, \
             of which a rank has {here} bytes here and {there} there: one head of one layer of a page, {block} bytes, needs {} on \
             both sides; raise --staging-bytes, without --staging never",
            self.plugin,
            peer.name,
            block * 8
        ))
    }

    /// Cuts off one link to a peer in both directions, if it is still in use. An earlier link was cut off when the next
    /// one was made. Blocks: not for the scheduler thread.
    ///
    /// # Errors
    /// When the plugin could not prove for every pair of ranks that nothing of the peer lands any more.
    pub fn fence(&self, peer: Instance, session: u64) -> Result<(), host_plugin_api::Error> {
        self.peers.cut(peer, Some(session), |link| self.cut(link))
    }

    /// Cuts off the link to a peer, whatever its session. Blocks: not for the scheduler thread.
    ///
    /// # Errors
    /// As [`fence`](Self::fence).
    pub fn fence_all(&self, peer: Instance) -> Result<(), host_plugin_api::Error> {
        self.peers.cut(peer, None, |link| self.cut(link))
    }

    /// Disconnects all connections of a link. On failure, returns a link of the connections that are not proven to be cut
    /// off, for another try.
    fn cut(&self, link: &Link) -> Result<(), (Arc<Link>, host_plugin_api::Error)> {
        let mut left = Link::clone(link);
        let mut failed = None;
        for (pair, ended) in self.disconnect(&link.connections) {
            match ended {
                Ok(()) => {
                    left.connections.remove(&pair);
                }
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(()), |error| Err((Arc::new(left), error)))
    }

    /// Disconnects all pairs of ranks at the same time: each may take as long as a plugin waits for a peer that hangs.
    fn disconnect(
        &self,
        connections: &HashMap<(usize, usize), PeerId>,
    ) -> Vec<((usize, usize), host_plugin_api::Result<()>)> {
        let disconnect = |pair: (usize, usize), handle| self.ranks[pair.0].backend.disconnect(handle);
        std::thread::scope(|scope| {
            let begin = |(pair, handle): (&(usize, usize), &PeerId)| {
                let (pair, handle) = (*pair, *handle);
                let thread = std::thread::Builder::new().name("fence".into());
                (pair, handle, thread.spawn_scoped(scope, move || disconnect(pair, handle)))
            };
            let begun: Vec<_> = connections.iter().map(begin).collect();
            let ended = begun.into_iter().map(|(pair, handle, thread)| match thread {
                Ok(thread) => (pair, thread.join().unwrap_or_else(|_panic| Err(panicked()))),
                Err(_no_thread) => (pair, disconnect(pair, handle)),
            });
            ended.collect()
        })
    }

    /// Stops the plugin on all ranks, together with the other running plugins.
    ///
    /// # Errors
    /// When a plugin did not stop in time.
    pub(super) fn shutdown(&self, mut running: Running) -> anyhow::Result<()> {
        for (rank, own) in self.ranks.iter().enumerate() {
            let backend = own.backend.clone();
            let name =
                if self.ranks.len() == 1 { self.plugin.clone() } else { format!("{}.{rank}", self.plugin) };
            // Memory that a plugin may still access stays mapped as long as the process lives.
            let staging = own.staging.as_ref().map(|staging| staging.memory.clone());
            let kept = (own.kv.hold(), self.aux.clone(), staging);
            running.opened(&name, move |deadline| {
                let stopped = backend.shutdown(deadline);
                if stopped.is_err() {
                    std::mem::forget(kept);
                }
                stopped
            });
        }
        stop(running)
    }
}
