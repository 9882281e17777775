//! A copy thread.

use host_plugin_api::{ErrorCode, Write};
use host_transfer_kit::Peer as _;

use crate::outbound::Outbound;
use crate::progress::Progress;
use crate::regions::Spot;
use crate::shared::Core;

/// Most bytes copied between two checks whether copying is still allowed. Bounds how long a fence waits.
pub const PIECE: u32 = 1 << 20;

/// A submission to a peer of this instance.
pub type Content = host_transfer_kit::Content<Outbound, Progress>;

/// Works until there is nothing more to do. `thread` is this thread's number among the instance's copy threads.
pub fn run(core: &Core, thread: usize) {
    while let Some(index) = core.ready.next() {
        let mut content = core.instance.queue.content(index);
        // The peer is there until the submission is finished.
        let Some(peer) = content.peer().cloned() else { continue };
        let step = carry(core, thread, index, &mut content, &peer);
        let bytes = content.progress.bytes;
        drop(content);
        step.take(core, index, &peer, bytes);
    }
}

/// The next step of a submission.
#[derive(Clone, Copy)]
pub enum Step {
    /// The data is there, the notification does not fit yet.
    Parked,
    /// The next write is one between places in host memory.
    ByThread,
    /// The next write is one that a device copies.
    ByDevice,
    /// It has ended with this status.
    Ended(i32),
    /// It has ended with an error of a device, which may go on copying.
    Unproven,
}

impl Step {
    /// Hands the submission on. `bytes`: how many were written.
    pub fn take(self, core: &Core, index: u32, peer: &Outbound, bytes: u64) {
        let instance = &core.instance;
        match self {
            Self::Parked => core.ready.park(index),
            Self::ByThread => core.ready.push(index),
            Self::ByDevice => core.device_ready.push(index),
            Self::Ended(status) => {
                instance.bytes_written.add(bytes);
                instance.submissions_written.add(u64::from(status == 0));
                instance.queue.finish(index, status, bytes, None);
                instance.event.signal();
            }
            Self::Unproven => {
                instance.queue.finish(index, ErrorCode::IO.0, bytes, Some(peer.id));
                instance.event.signal();
            }
        }
    }
}

/// Why a piece was not copied.
pub type Refusal = ErrorCode;

fn carry(core: &Core, thread: usize, index: u32, content: &mut Content, peer: &Outbound) -> Step {
    while content.progress.next < content.len() {
        match copy_piece(core, thread, index, content, peer) {
            Ok(PieceResult::Copied) => {}
            Ok(PieceResult::ByDevice) => return Step::ByDevice,
            Err(code) => return Step::Ended(code.0),
        }
    }
    conclude(core, thread, index, content, peer)
}

/// Tells the receiver that all data is there. `line` is marked busy meanwhile.
pub fn conclude(core: &Core, line: usize, index: u32, content: &Content, peer: &Outbound) -> Step {
    if core.instance.queue.is_cancelled(index) {
        return Step::Ended(ErrorCode::CANCELLED.0);
    }
    // The receiver may have fenced since the last piece, and no notification is pushed after that.
    let busy = match peer.enter(line) {
        Ok(busy) if !peer.is_gone() => busy,
        Ok(_) => return Step::Ended(ErrorCode::PEER_LOST.0),
        Err(code) => return Step::Ended(code.0),
    };
    let told = content.submission.notification_length == 0 || peer.notify(&content.submission);
    drop(busy);
    if told { Step::Ended(0) } else { Step::Parked }
}

/// Checks all that could forbid to copy more of a submission, except for the marks, which are set already.
pub fn may_copy(core: &Core, index: u32, peer: &Outbound) -> Result<(), Refusal> {
    if core.instance.is_stopping() {
        return Err(ErrorCode::CLOSED);
    }
    if peer.is_gone() {
        return Err(ErrorCode::PEER_LOST);
    }
    if core.instance.queue.is_cancelled(index) {
        return Err(ErrorCode::CANCELLED);
    }
    Ok(())
}

/// Where a write begins on both sides, source and target. To be called while busy.
fn places(core: &Core, peer: &Outbound, write: &Write) -> Result<(Spot, Spot), Refusal> {
    let source = core.regions.source(write.source_region.0, write.source_offset, write.length.into());
    let target = peer.target(write).filter(|_| peer.lives(write));
    source.zip(target).ok_or(ErrorCode::INVALID_ARGUMENT)
}

/// Two regions, looked up once for many writes between them.
pub struct Between {
    of: Write,
    source: (Spot, u64),
    target: (Spot, u64),
}

impl Between {
    /// **Hot.** The regions of a write. Whether the target's region lives is checked later, while busy.
    pub fn regions_of(core: &Core, peer: &Outbound, write: &Write) -> Option<Self> {
        let (source, target) = (core.regions.whole(write.source_region.0)?, peer.whole(write)?);
        Some(Self { of: *write, source, target })
    }

    /// Whether another write is between them.
    pub fn is_of(&self, write: &Write) -> bool {
        let regions = |write: &Write| (write.source_region, write.target_region, write.target_generation);
        regions(&self.of) == regions(write)
    }

    /// **Hot.** Where a write between them begins on both sides, source and target, if it lies inside.
    pub fn places(&self, write: &Write) -> Option<(Spot, Spot)> {
        let place = |(spot, length): (Spot, u64), offset: u64| {
            let end = offset.checked_add(write.length.into())?;
            (end <= length).then(|| spot.after(offset))
        };
        place(self.source, write.source_offset).zip(place(self.target, write.target_offset))
    }
}

impl Core {
    /// **Hot.** Whether a device copies a write.
    pub fn is_by_device(&self, peer: &Outbound, write: &Write) -> bool {
        let source = self.regions.source(write.source_region.0, write.source_offset, write.length.into());
        [source, peer.target(write)].into_iter().flatten().any(|spot| spot.device.is_some())
    }
}

enum PieceResult {
    Copied,
    /// Nothing was copied: a device has to copy it.
    ByDevice,
}

/// Copies up to [`PIECE`] bytes, of one write or several.
fn copy_piece(
    core: &Core,
    thread: usize,
    index: u32,
    content: &mut Content,
    peer: &Outbound,
) -> Result<PieceResult, Refusal> {
    // Two marks: the one of this instance keeps the host from unmapping the source, the receiver's keeps it from
    // reusing the target. Everything that could forbid the copy is checked after both are set.
    let _ours = core.holds[thread].enter();
    let _theirs = peer.enter(thread)?;
    may_copy(core, index, peer)?;
    let mut budget = PIECE;
    while budget > 0
        && let Some(write) = content.write(content.progress.next)
    {
        let (source, target) = places(core, peer, &write)?;
        if source.device.is_some() || target.device.is_some() {
            return Ok(if budget == PIECE { PieceResult::ByDevice } else { PieceResult::Copied });
        }
        let (source, target) = (source.address as *const u8, target.address as *mut u8);
        let bytes = budget.min(write.length - content.progress.copied);
        let at = content.progress.copied as usize;
        // SAFETY: both ranges were checked against their regions just now. The source stays mapped while our mark is
        // set (a deregistration waits for it), the target's mapping is held by `peer`. They are different mappings.
        // The host's page accounting sees to it that no other write touches the same bytes meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(source.add(at), target.add(at), bytes as usize) };
        budget -= bytes;
        content.progress.advance(&write, bytes);
    }
    Ok(PieceResult::Copied)
}
