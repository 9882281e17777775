//! The runs of a write: what it takes beside its bytes, where pools divide or order the KV in different ways.
//!
//! The core plans each write as on a real worker: [`copy_lane`] counts the runs, [`choose`] decides about staging, [`Cut`] makes
//! the pieces.

use host_core::heads::{head_lanes, rank_heads};
use host_core::layout::KvLayout;
use host_core::scheduler::PageWrite;
use host_core::transfer::{
    Cut, KvSlice, Lane, Path, PlanSize, StagingMode, StagingPolicy, choose, copy_lane,
};

use super::LONGEST;
use crate::cluster::{Cluster, Workers};

/// All lanes from the ranks of one worker to those of another.
#[derive(Clone, Debug)]
pub(super) struct Lanes {
    lanes: Vec<RankLane>,
    /// Ranks of the sender and of the receiver.
    ranks: [usize; 2],
    policy: StagingPolicy,
}

#[derive(Clone, Debug)]
struct RankLane {
    /// The rank that sends, and the one that receives.
    ranks: [usize; 2],
    lane: Lane,
}

/// The work for a write on the ranks that have most of it. Ranks work at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Effort {
    /// Runs and staged pieces that a rank writes.
    pub writes: usize,
    /// Bytes that a rank gathers into staging memory.
    pub gathered: usize,
    /// Bytes that a rank scatters from staging memory.
    pub scattered: usize,
}

impl Lanes {
    /// The lanes from prefill to decode workers, or `None` where a write costs nothing for its runs.
    pub(super) fn new(cluster: &Cluster, from: &Workers, to: &Workers) -> Option<Self> {
        let ranks = [from.tp, to.tp];
        let default_layout = cluster.kv_layout == Cluster::default_kv_layout();
        let whole_pages = default_layout && ranks[0] == ranks[1] && cluster.layer_groups == 1;
        let never_staged = match cluster.staging {
            StagingMode::Never => true,
            StagingMode::Auto => whole_pages,
            StagingMode::Always => false,
        };
        if cluster.link().run_us == 0.0 && never_staged {
            return None;
        }
        let heads = cluster.model().kv_heads as usize;
        let pool = |workers: &Workers, rank: usize| {
            let held = rank_heads(heads, workers.tp, rank);
            let shape = cluster.kv_shape(cluster.pool_pages(workers) as usize, held.len());
            KvSlice::pool(KvLayout::new(shape, cluster.kv_layout), held.start)
        };
        let lanes = head_lanes(heads, ranks[0], ranks[1]).into_iter().map(|lane| RankLane {
            ranks: [lane.source, lane.target],
            lane: Lane { source: pool(from, lane.source), target: pool(to, lane.target), heads: lane.heads },
        });
        let policy = StagingPolicy { mode: cluster.staging, ..StagingPolicy::default() };
        Some(Self { lanes: lanes.collect(), ranks, policy })
    }

    /// The effort of a write.
    ///
    /// # Panics
    /// When the write names pages or layers that the pools do not have.
    pub(super) fn effort(&self, write: &PageWrite) -> Effort {
        let layers = write.layers.start as usize..write.layers.end as usize;
        let mut writes = vec![0; self.ranks[0]];
        let mut copied = self.ranks.map(|ranks| vec![0; ranks]);
        for RankLane { ranks: [source, target], lane } in &self.lanes {
            let copy = copy_lane(lane, &write.source, &write.target, layers.clone());
            let size = copy.unwrap_or_else(|error| panic!("a write of the scheduler: {error}")).size();
            let pieces = self.pieces(lane, write.source.len(), layers.clone(), &size);
            writes[*source] += pieces.unwrap_or(size.runs);
            if pieces.is_some() {
                copied[0][*source] += size.bytes;
                copied[1][*target] += size.bytes;
            }
        }
        let most = |of: &[usize]| of.iter().copied().max().unwrap_or(0);
        Effort { writes: most(&writes), gathered: most(&copied[0]), scattered: most(&copied[1]) }
    }

    /// The pieces of a lane, if it is staged.
    fn pieces(
        &self,
        lane: &Lane,
        pages: usize,
        layers: std::ops::Range<usize>,
        size: &PlanSize,
    ) -> Option<usize> {
        if choose(size, &self.policy) == Path::Direct {
            return None;
        }
        let shape = &lane.source.layout.shape;
        Cut::new(shape, pages, layers, lane.heads.clone(), LONGEST).map(|cut| cut.pieces())
    }
}
