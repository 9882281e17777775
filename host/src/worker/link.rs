//! What a worker knows of other workers' memory, and the fences around it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use host_core::aux_row::AUX_ROW_BYTES;
use host_core::layout::KvOrder;
use host_core::{Instance, KvLayout, KvShape};
use host_plugin_api::transfer::{Memory, MemoryKind, PeerId, RegionId, TransferBackend};
use rustix::fd::AsRawFd;

use crate::executor::KvMemory;
use crate::executor::memory::SharedMemory;
use crate::net::proto::{TransferEndpoint, WorkerInfo};
use crate::plugins::Running;

/// How long a plugin may take to stop.
const SHUTDOWN: Duration = Duration::from_secs(3);

/// Peers whose turn is remembered before those of nobody's concern are forgotten.
const TURNS: usize = 1024;

/// A peer's memory, as writes name it.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// The plugin's handle.
    pub peer: PeerId,
    /// Names this connection among all that were made to the peer.
    pub session: u64,
    /// Region of the peer's KV pool.
    pub kv_region: u32,
    /// Generation of that region.
    pub kv_generation: u32,
    /// Region of the peer's aux rows.
    pub aux_region: u32,
    /// Generation of that region.
    pub aux_generation: u32,
    /// Layout of the peer's pool.
    pub layout: KvLayout,
    /// Aux rows that the peer has.
    pub aux_rows: u32,
}

struct Plugin {
    name: String,
    backend: Arc<dyn TransferBackend>,
    kv_region: RegionId,
    aux_region: RegionId,
}

/// The transfer plugin of a worker, its own registered memory, and its links to peers. Shared by all threads.
pub struct Links {
    plugin: Option<Plugin>,
    layout: KvLayout,
    aux: Arc<SharedMemory>,
    peers: Mutex<HashMap<Instance, Link>>,
    /// One lock per peer: connecting and fencing take their turns, so that neither undoes the other unseen.
    turns: Mutex<HashMap<Instance, Arc<Mutex<()>>>>,
    sessions: AtomicU64,
}

/// Our memory's generation: it is registered once in a worker's life.
const GENERATION: u32 = 1;

impl Links {
    /// Registers the pool and `aux_rows` aux rows with the plugin.
    ///
    /// # Errors
    /// When memory cannot be had, or the plugin does not take it.
    pub(super) fn open(
        transfer: Option<(String, Arc<dyn TransferBackend>)>,
        kv: &KvMemory,
        aux_rows: u32,
    ) -> anyhow::Result<Self> {
        let aux = Arc::new(SharedMemory::new("host-aux", aux_rows as usize * AUX_ROW_BYTES)?);
        let register = |backend: &Arc<dyn TransferBackend>, memory: &SharedMemory| {
            backend.register(&Memory {
                address: memory.address().as_ptr() as u64,
                length: memory.bytes() as u64,
                kind: MemoryKind::DRAM,
                device: 0,
                fd: memory.fd().as_raw_fd(),
                generation: GENERATION,
                fd_offset: 0,
            })
        };
        let plugin = match transfer {
            None => None,
            Some((name, backend)) => {
                let failed =
                    |what, error| anyhow::anyhow!("plugin {name:?} did not register the {what}: {error}");
                let kv_region = register(&backend, kv.memory()).map_err(|error| failed("KV pool", error))?;
                let aux_region = register(&backend, &aux).map_err(|error| failed("aux rows", error))?;
                Some(Plugin { name, backend, kv_region, aux_region })
            }
        };
        Ok(Self {
            plugin,
            layout: *kv.layout(),
            aux,
            peers: Mutex::new(HashMap::new()),
            turns: Mutex::default(),
            sessions: AtomicU64::new(0),
        })
    }

    /// The plugin's instance.
    #[must_use]
    pub fn backend(&self) -> Option<&Arc<dyn TransferBackend>> {
        self.plugin.as_ref().map(|plugin| &plugin.backend)
    }

    /// The plugin's name, or nothing.
    #[must_use]
    pub fn plugin_name(&self) -> &str {
        self.plugin.as_ref().map_or("", |plugin| &plugin.name)
    }

    pub(super) fn aux(&self) -> &SharedMemory {
        &self.aux
    }

    pub(super) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Our KV pool's and aux rows' regions.
    pub(super) fn regions(&self) -> Option<(RegionId, RegionId)> {
        self.plugin.as_ref().map(|plugin| (plugin.kv_region, plugin.aux_region))
    }

    pub(super) fn endpoint(&self) -> anyhow::Result<Option<TransferEndpoint>> {
        let Some(plugin) = &self.plugin else { return Ok(None) };
        let endpoint = plugin
            .backend
            .endpoint()
            .map_err(|error| anyhow::anyhow!("plugin {:?} offers no endpoint: {error}", plugin.name))?;
        Ok(Some(TransferEndpoint {
            plugin: plugin.name.clone(),
            endpoint,
            kv_region: plugin.kv_region.0,
            aux_region: plugin.aux_region.0,
            kv_generation: GENERATION,
            aux_generation: GENERATION,
            kv_bytes: self.layout.bytes() as u64,
            aux_bytes: self.aux.bytes() as u64,
        }))
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<Instance, Link>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The link to a peer.
    #[must_use]
    pub fn get(&self, peer: Instance) -> Option<Link> {
        self.peers().get(&peer).copied()
    }

    fn turn(&self, peer: Instance) -> Arc<Mutex<()>> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        if turns.len() >= TURNS {
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        }
        turns.entry(peer).or_default().clone()
    }

    /// Fences what is left of an earlier connection to a peer and makes a new one; returns the new session. Blocks: not
    /// for the scheduler thread.
    ///
    /// # Errors
    /// A sentence for the peer's refusal: no plugin in common, nobody there, an earlier connection not fenced.
    pub fn connect(&self, peer: &WorkerInfo) -> Result<u64, String> {
        let instance = Instance(peer.instance);
        let Some(plugin) = &self.plugin else {
            return Err("this worker has no transfer plugin".into());
        };
        let offered = peer.transfer.iter().find(|endpoint| endpoint.plugin == plugin.name);
        let Some(offered) = offered else {
            let names: Vec<&str> = peer.transfer.iter().map(|endpoint| endpoint.plugin.as_str()).collect();
            return Err(format!(
                "no transfer plugin in common: this worker has {:?}, {} offers {names:?}",
                plugin.name, peer.name
            ));
        };
        let layout = self.peer_layout(peer)?;
        if offered.kv_bytes != layout.bytes() as u64 {
            return Err(format!(
                "{} says its pool has {} bytes, but {} pages of {} bytes are {}",
                peer.name,
                offered.kv_bytes,
                peer.pages,
                layout.shape.page_bytes(),
                layout.bytes()
            ));
        }
        let turn = self.turn(instance);
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.cut(instance, |_| true)
            .map_err(|error| format!("an earlier connection could not be fenced: {error}"))?;
        let handle = plugin.backend.connect(&instance.to_string(), &offered.endpoint).map_err(|error| {
            format!("plugin {:?} could not connect to {}: {error}", plugin.name, peer.name)
        })?;
        let session = self.sessions.fetch_add(1, Ordering::Relaxed) + 1;
        let link = Link {
            peer: handle,
            session,
            kv_region: offered.kv_region,
            kv_generation: offered.kv_generation,
            aux_region: offered.aux_region,
            aux_generation: offered.aux_generation,
            layout,
            aux_rows: u32::try_from(offered.aux_bytes / AUX_ROW_BYTES as u64).unwrap_or(u32::MAX),
        };
        self.peers().insert(instance, link);
        Ok(session)
    }

    /// The identities were found equal, so the peer's pages have our shape; only their number is its own.
    fn peer_layout(&self, peer: &WorkerInfo) -> Result<KvLayout, String> {
        let identity = peer.identity.as_ref().ok_or("the peer does not say what KV it has")?;
        let order: KvOrder = identity.layout.parse()?;
        Ok(KvLayout::new(KvShape { pages: peer.pages as usize, ..self.layout.shape }, order))
    }

    /// Cuts off one connection to a peer in both directions, if it is still the one in use: an earlier one was cut off
    /// when the next was made. Blocks: not for the scheduler thread.
    ///
    /// # Errors
    /// When the plugin could not prove that nothing of the peer lands any more.
    pub fn fence(&self, peer: Instance, session: u64) -> Result<(), host_plugin_api::Error> {
        let turn = self.turn(peer);
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.cut(peer, |link| link.session == session)
    }

    /// Cuts off whatever connection to a peer there is. Blocks: not for the scheduler thread.
    ///
    /// # Errors
    /// As [`fence`](Self::fence).
    pub fn fence_all(&self, peer: Instance) -> Result<(), host_plugin_api::Error> {
        let turn = self.turn(peer);
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.cut(peer, |_| true)
    }

    /// Whoever calls has the peer's turn.
    fn cut(&self, peer: Instance, meant: impl Fn(&Link) -> bool) -> Result<(), host_plugin_api::Error> {
        let Some(link) = self.get(peer).filter(meant) else { return Ok(()) };
        if let Some(plugin) = &self.plugin {
            plugin.backend.disconnect(link.peer)?;
        }
        self.peers().remove(&peer);
        Ok(())
    }

    pub(super) fn shutdown(&self) -> anyhow::Result<()> {
        let Some(plugin) = &self.plugin else { return Ok(()) };
        let mut running = Running::default();
        let backend = plugin.backend.clone();
        running.opened(&plugin.name, move |deadline| backend.shutdown(deadline));
        running.stop(SHUTDOWN).map_err(|failed| {
            let said: Vec<_> =
                failed.iter().map(|(name, error)| format!("plugin {name:?}: {error}")).collect();
            anyhow::anyhow!("not everything stopped: {}", said.join("; "))
        })
    }
}
