//! Reads and checks a peer's description of its ranks, and finds which ranks exchange which heads.

use std::collections::{BTreeSet, HashMap};

use host_core::aux_row::AUX_ROW_BYTES;
use host_core::heads::{HeadLane, head_lanes, rank_heads};
use host_core::layout::KvOrder;
use host_core::notice::MAX_RANKS;
use host_core::transfer::KvSlice;
use host_core::{KvLayout, KvShape};
use host_plugin_api::transfer::PeerId;

use host_wire::proto::{TransferEndpoint, WorkerInfo};

use super::table::Connected;

/// A link to a peer: its connections, and the peer's memory as writes name it.
#[derive(Clone, Debug)]
pub struct Link {
    /// Identifies this link among all links that were made to the peer.
    pub session: u64,
    /// Which of the prefill worker's ranks sends which heads to which of the decode worker's.
    pub lanes: Vec<HeadLane>,
    /// The peer's ranks.
    pub ranks: Vec<PeerRank>,
    /// The plugin's handle for each pair of an own rank and a peer's rank that exchange heads.
    pub(super) connections: HashMap<(usize, usize), PeerId>,
}

/// The memory of one of a peer's ranks.
#[derive(Clone, Debug)]
pub struct PeerRank {
    /// Region of the KV pool. `None` when it is reached through the staging memory alone.
    pub kv_region: Option<u32>,
    /// Generation of that region.
    pub kv_generation: u32,
    /// Region of the aux rows, which only rank 0 has.
    pub aux_region: u32,
    /// Generation of that region.
    pub aux_generation: u32,
    /// The part of the model's KV that the pool holds, and its layout.
    pub share: KvSlice,
    /// The number of aux rows.
    pub aux_rows: u32,
    /// Region of the staging memory.
    pub staging_region: u32,
    /// Generation of that region.
    pub staging_generation: u32,
    /// Bytes of the staging memory, 0 without staging.
    pub staging_bytes: u64,
}

impl Link {
    /// The plugin's handle by which an own rank reaches a peer's rank. `None` when they exchange nothing, or when the
    /// link is being cut off.
    #[must_use]
    pub fn connection(&self, own: usize, theirs: usize) -> Option<PeerId> {
        self.connections.get(&(own, theirs)).copied()
    }
}

impl Connected for Link {
    fn session(&self) -> u64 {
        self.session
    }
}

type Endpoints = Vec<Vec<u8>>;

/// The peer's ranks, in order, and their endpoints. The identities were compared before, so the peer's pages differ from
/// the own pages in their number and order only.
pub(super) fn read(
    peer: &WorkerInfo,
    plugin: &str,
    own: &KvLayout,
    kv_heads: usize,
) -> Result<(Vec<PeerRank>, Endpoints), String> {
    let mut offered: Vec<&TransferEndpoint> =
        peer.transfer.iter().filter(|endpoint| endpoint.plugin == plugin).collect();
    if offered.is_empty() {
        let names: BTreeSet<&str> = peer.transfer.iter().map(|endpoint| endpoint.plugin.as_str()).collect();
        return Err(format!(
            "no transfer plugin in common: this worker has {plugin:?}, {} offers {names:?}",
            peer.name
        ));
    }
    let identity = peer.identity.as_ref().ok_or("the peer does not say what KV it has")?;
    let order: KvOrder = identity.layout.parse()?;
    let ranks = identity.ranks as usize;
    offered.sort_by_key(|endpoint| endpoint.rank);
    let said: Vec<usize> = offered.iter().map(|endpoint| endpoint.rank as usize).collect();
    if ranks > MAX_RANKS || said.len() != ranks || said.iter().enumerate().any(|(rank, said)| rank != *said) {
        return Err(format!("{} has {ranks} ranks, but offers endpoints for the ranks {said:?}", peer.name));
    }
    let read = |(rank, endpoint): (usize, &&TransferEndpoint)| {
        let heads = rank_heads(kv_heads, ranks, rank);
        let shape = KvShape { pages: peer.pages as usize, heads: heads.len(), ..own.shape };
        let layout = KvLayout::new(shape, order);
        // A pool that its plugin does not reach has no bytes to write to.
        let is_reached = endpoint.kv_bytes > 0;
        if is_reached && endpoint.kv_bytes != layout.bytes() as u64 {
            return Err(format!(
                "{} says that the pool of rank {rank} has {} bytes, but {} pages of {} bytes are {}",
                peer.name,
                endpoint.kv_bytes,
                peer.pages,
                layout.shape.page_bytes(),
                layout.bytes()
            ));
        }
        Ok(PeerRank {
            kv_region: is_reached.then_some(endpoint.kv_region),
            kv_generation: endpoint.kv_generation,
            aux_region: endpoint.aux_region,
            aux_generation: endpoint.aux_generation,
            share: KvSlice::pool(layout, heads.start),
            aux_rows: u32::try_from(endpoint.aux_bytes / AUX_ROW_BYTES as u64).unwrap_or(u32::MAX),
            staging_region: endpoint.staging_region,
            staging_generation: endpoint.staging_generation,
            staging_bytes: endpoint.staging_bytes,
        })
    };
    let read: Result<Vec<PeerRank>, String> = offered.iter().enumerate().map(read).collect();
    Ok((read?, offered.into_iter().map(|endpoint| endpoint.endpoint.clone()).collect()))
}

type Pairs = BTreeSet<(usize, usize)>;

/// The lanes between prefill and decode, and the pairs of our ranks and the peer's that share one.
pub(super) fn lanes(
    peer: &WorkerInfo,
    kv_heads: usize,
    own: usize,
    theirs: usize,
) -> Result<(Vec<HeadLane>, Pairs), String> {
    let (lanes, sends) = match peer.role.as_str() {
        "decode" => (head_lanes(kv_heads, own, theirs), true),
        "prefill" => (head_lanes(kv_heads, theirs, own), false),
        role => return Err(format!("{} is a {role} worker: KV goes from prefill to decode", peer.name)),
    };
    let pair = |lane: &HeadLane| if sends { (lane.source, lane.target) } else { (lane.target, lane.source) };
    let pairs = lanes.iter().map(pair).collect();
    Ok((lanes, pairs))
}
