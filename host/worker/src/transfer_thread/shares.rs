//! The shares of a page write that a rank sends to the peer's ranks. All are planned and digested before any of them is
//! sent.

use std::ops::Range;

use host_core::aux_row::AUX_ROW_BYTES;
use host_core::heads::HeadLane;
use host_core::notice::LaneNotice;
use host_core::scheduler::PageWrite;
use host_core::staging::{Span, piece_limit};
use host_core::transfer::{Cut, KvSlice, Lane, PagesCopy, Path, Run, StagingPolicy, choose, copy_lane};
use host_plugin_api::transfer::{PeerId, RegionId, Write};

use crate::lane_sums;
use crate::link::{Link, Links, PeerRank, Rank};

/// The data of a write that one own rank sends to one of the peer's ranks.
pub(super) struct Share {
    pub peer: PeerId,
    pub target: usize,
    /// Direct writes, each to its place.
    pub writes: Vec<Write>,
    /// Pieces that go through staging memory. They are numbered before the direct fragments.
    pub staged: Vec<Span>,
    /// Digest of the share's pages.
    pub sum: u64,
}

/// Plans and digests the shares that a rank sends of a write. On rank 0 the last part is complete only with the aux row
/// behind it, which travels from rank 0 to rank 0.
///
/// # Errors
/// The fault of the link or of the write.
pub(super) fn shares(
    links: &Links,
    link: &Link,
    rank: usize,
    write: &PageWrite,
    policy: &StagingPolicy,
    page_integrity: bool,
) -> Result<Vec<Share>, String> {
    let plan = Plan { links, link, rank, write, policy, page_integrity };
    let own = link.lanes.iter().filter(|lane| lane.source == rank);
    // A write without pages has the aux row alone.
    let wanted = own.filter(|lane| !write.source.is_empty() || (lane.source, lane.target) == (0, 0));
    wanted.map(|lane| plan.share(lane)).collect()
}

/// Cuts a lane's data of a write into pieces of at most `limit` bytes. `None` if it cannot be cut so: then it goes
/// directly.
fn pieces(pool: &KvSlice, heads: &Range<usize>, write: &PageWrite, limit: u64) -> Option<Vec<Span>> {
    let shape = pool.layout.shape;
    let layers = write.layers.start as usize..write.layers.end as usize;
    let limit = usize::try_from(limit).ok()?;
    let cut = Cut::new(&shape, write.source.len(), layers, heads.clone(), limit)?;
    if cut.pieces() >= usize::from(u16::MAX) {
        return None;
    }
    let short = |range: Range<usize>| Some(u16::try_from(range.start).ok()?..u16::try_from(range.end).ok()?);
    (0..cut.pieces())
        .map(|number| {
            let piece = cut.piece(number)?;
            let bytes = u32::try_from(piece.bytes(&shape)).ok()?;
            let page = |page: usize| u32::try_from(page).ok()?.checked_add(write.first_page);
            Some(Span {
                pages: page(piece.pages.start)?..page(piece.pages.end)?,
                layers: short(piece.layers)?,
                heads: short(piece.heads)?,
                bytes,
            })
        })
        .collect()
}

/// The inputs from which a rank's shares of a write are planned.
struct Plan<'a> {
    links: &'a Links,
    link: &'a Link,
    rank: usize,
    write: &'a PageWrite,
    policy: &'a StagingPolicy,
    page_integrity: bool,
}

impl Plan<'_> {
    /// The share of one lane: its pages, staged or direct, and the aux row, which is direct.
    fn share(&self, lane: &HeadLane) -> Result<Share, String> {
        let (own, write) = (&self.links.ranks()[self.rank], self.write);
        let peer = self.link.connection(self.rank, lane.target);
        let peer = peer.ok_or_else(|| format!("the connection to worker {} is being cut off", write.to))?;
        let theirs = &self.link.ranks[lane.target];
        let layers = write.layers.start as usize..write.layers.end as usize;
        let planned = Lane { source: own.share(), target: theirs.share, heads: lane.heads.clone() };
        let copy = copy_lane(&planned, &write.source, &write.target, layers.clone())
            .map_err(|error| error.to_string())?;
        let (staged, mut writes) = self.ways(&planned, &copy, own, theirs)?;
        writes.extend(self.aux_row(lane.target)?);
        let pages = (write.first_page as usize..).zip(write.source.iter().copied());
        let sum = match self.page_integrity {
            true => lane_sums::of(&own.kv, pages, &layers, &lane.heads)?,
            false => 0,
        };
        Ok(Share { peer, target: lane.target, writes, staged, sum })
    }

    /// Plans a lane's pages as pieces for staging memory, or else as direct writes.
    fn ways(
        &self,
        lane: &Lane,
        copy: &PagesCopy,
        own: &Rank,
        theirs: &PeerRank,
    ) -> Result<(Vec<Span>, Vec<Write>), String> {
        let limit = piece_limit(own.staging_bytes(), theirs.staging_bytes);
        let (size, regions) = (copy.size(), own.kv_region.zip(theirs.kv_region));
        let path = match regions {
            None if size.bytes > 0 => Path::Staged,
            _ => choose(&size, self.policy),
        };
        let pieces = match path {
            Path::Staged => pieces(&lane.source, &lane.heads, self.write, limit),
            Path::Direct => None,
        };
        match (pieces, regions) {
            (Some(pieces), _) => Ok((pieces, Vec::new())),
            (None, Some((source_region, target_region))) => {
                let to_its_place = |run: &Run| Write {
                    source_region,
                    target_region: RegionId(target_region),
                    source_offset: run.source as u64,
                    target_offset: run.target as u64,
                    length: run.length as u32,
                    target_generation: theirs.kv_generation,
                };
                Ok((Vec::new(), copy.runs().iter().map(to_its_place).collect()))
            }
            (None, None) if size.bytes == 0 => Ok((Vec::new(), Vec::new())),
            (None, None) => Err(format!(
                "{} bytes for worker {} cannot be cut into pieces of at most {limit} bytes, and go through staging memory alone",
                size.bytes, self.write.to
            )),
        }
    }

    /// Puts the aux row into its place here, and returns the write that takes it to rank 0 of the peer. Only rank 0 has aux rows.
    fn aux_row(&self, target: usize) -> Result<Option<Write>, String> {
        let region = self.links.ranks()[self.rank].aux_region;
        let (Some((row, own_slot, peer_slot)), Some(region), 0) = (&self.write.aux, region, target) else {
            return Ok(None);
        };
        let theirs = &self.link.ranks[target];
        if *peer_slot >= theirs.aux_rows {
            return Err(format!("decode named aux row {peer_slot}, but has {}", theirs.aux_rows));
        }
        // SAFETY: the scheduler gave this row to this transfer, and nothing is told of it before it is written.
        unsafe { self.links.aux().write(*own_slot as usize * AUX_ROW_BYTES, &row.encode()) };
        Ok(Some(Write {
            source_region: region,
            target_region: RegionId(theirs.aux_region),
            source_offset: u64::from(*own_slot) * AUX_ROW_BYTES as u64,
            target_offset: u64::from(*peer_slot) * AUX_ROW_BYTES as u64,
            length: AUX_ROW_BYTES as u32,
            target_generation: theirs.aux_generation,
        }))
    }
}

impl Share {
    /// The notice of fragment 0 of `fragments`.
    pub(super) fn notice(&self, write: &PageWrite, rank: usize, fragments: usize) -> LaneNotice {
        let byte = |rank: usize| u8::try_from(rank).unwrap_or(u8::MAX);
        LaneNotice {
            notice: write.notice,
            fragment: 0,
            fragments: u32::try_from(fragments).unwrap_or(u32::MAX),
            sum: self.sum,
            alone: write.source.is_empty(),
            source: byte(rank),
            target: byte(self.target),
        }
    }

    /// The direct writes, in fragments of at most `max_writes` writes. If there is nothing to write at all, it is one
    /// fragment without writes.
    pub(super) fn direct(&self, max_writes: usize) -> impl Iterator<Item = &[Write]> {
        let nothing = self.writes.is_empty() && self.staged.is_empty();
        self.writes.chunks(max_writes).chain(nothing.then_some(&[][..]))
    }

    /// The number of fragments: staged pieces, which are numbered first, and fragments of direct writes.
    pub(super) fn fragments(&self, max_writes: usize) -> usize {
        self.staged.len() + self.direct(max_writes).count()
    }
}
