//! Prepares writes for NIXL: neighbours are joined, and long lists are cut into requests.

use std::sync::Arc;

use host_plugin_api::{RegionId, Write};
use host_transfer_kit::{RegionDescriptor, source, target};

use crate::capi::{Agent, Extent, Library, Ranges, Refusal, Segment};

/// Ranges in one request, so that a long submission does not keep the driver from everything else while it is posted.
/// Over TCP a range takes NIXL about 5 µs.
pub const RANGES: usize = 256;

/// The ranges of one request, on both sides, of either kind of memory. They are reused.
pub struct Scratch {
    local: [Ranges; 2],
    remote: [Ranges; 2],
}

/// The part of a submission that one request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestPiece {
    /// Whether the memory is a device's: on this side, on the peer's.
    kinds: (bool, bool),
    /// How many writes it takes, from the start of those that were offered.
    pub writes: usize,
    pub bytes: u64,
}

/// A run of bytes: where from, where to, how many.
struct Run {
    from: u64,
    to: u64,
    length: usize,
    devices: (u64, u64),
}

/// A region as NIXL takes it.
pub fn place(region: &RegionDescriptor) -> Extent {
    let RegionDescriptor { address, length, device, .. } = *region;
    let segment = if device.is_some() { Segment::Vram } else { Segment::Dram };
    Extent { segment, address, length, device: device.unwrap_or_default().into() }
}

impl Scratch {
    pub fn new(library: &Arc<Library>) -> Result<Self, Refusal> {
        let ranges = || Ok([Ranges::new(library, Segment::Dram)?, Ranges::new(library, Segment::Vram)?]);
        Ok(Self { local: ranges()?, remote: ranges()? })
    }

    /// The local ranges, and the peer's.
    pub fn of(&self, piece: &RequestPiece) -> (&Ranges, &Ranges) {
        (&self.local[usize::from(piece.kinds.0)], &self.remote[usize::from(piece.kinds.1)])
    }

    fn clear(&mut self) -> Result<(), Refusal> {
        self.local.iter_mut().chain(&mut self.remote).try_for_each(Ranges::clear)
    }

    fn add(&mut self, piece: &RequestPiece, run: &Run) -> Result<(), Refusal> {
        self.local[usize::from(piece.kinds.0)].add(run.from, run.length, run.devices.0)?;
        self.remote[usize::from(piece.kinds.1)].add(run.to, run.length, run.devices.1)
    }

    /// Takes writes until there are `most` ranges, or the next is of another kind of memory. Neighbours are one range.
    /// Returns `None` when a write leaves its region.
    ///
    /// # Errors
    /// When NIXL does not take one of this instance's regions.
    pub fn describe(
        &mut self,
        agent: &mut Agent,
        (ours, theirs): (&[RegionDescriptor], &[RegionDescriptor]),
        writes: impl Iterator<Item = Write>,
        most: usize,
    ) -> Result<Option<RequestPiece>, Refusal> {
        self.clear()?;
        let mut piece = RequestPiece { kinds: (false, false), writes: 0, bytes: 0 };
        let mut open: Option<Run> = None;
        let mut regions = (RegionId(0), RegionId(0));
        let mut ranges = 0;
        for write in writes {
            let (Some((our, from)), Some((their, to))) = (source(ours, &write), target(theirs, &write))
            else {
                return Ok(None);
            };
            let kinds = (our.device.is_some(), their.device.is_some());
            if piece.writes == 0 {
                piece.kinds = kinds;
            } else if piece.kinds != kinds {
                break;
            }
            if our.id != regions.0 && !agent.has_registered(our.id.0) {
                // An agent learns of a region when it first sends from it.
                agent.register(our.id.0, place(our))?;
            }
            let length = write.length as usize;
            // NIXL treats regions that touch by accident as two.
            let same = regions == (our.id, their.id);
            regions = (our.id, their.id);
            match &mut open {
                Some(run)
                    if same && run.from + run.length as u64 == from && run.to + run.length as u64 == to =>
                {
                    run.length += length;
                }
                _ if ranges == most => break,
                _ => {
                    let devices = (place(our).device, place(their).device);
                    if let Some(run) = open.replace(Run { from, to, length, devices }) {
                        self.add(&piece, &run)?;
                    }
                    ranges += 1;
                }
            }
            piece.writes += 1;
            piece.bytes += u64::from(write.length);
        }
        if let Some(run) = open {
            self.add(&piece, &run)?;
        }
        Ok(Some(piece))
    }
}
