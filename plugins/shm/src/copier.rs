//! A copy thread.

use host_plugin_api::ErrorCode;
use host_transfer_kit::Peer as _;

use crate::outbound::Outbound;
use crate::service::Core;

/// Most bytes copied between two looks at whether that is still allowed. Bounds how long a fence waits.
pub const PIECE: u32 = 1 << 20;

/// How far a submission is.
#[derive(Default)]
pub struct Progress {
    /// The write being copied, and how much of it is.
    next: usize,
    copied: u32,
    /// Of all writes.
    bytes: u64,
}

/// A submission to one of our peers.
type Content = host_transfer_kit::Content<Outbound, Progress>;

/// Works until there is nothing more to do. `thread` is this thread's number among the instance's copy threads.
pub fn run(core: &Core, thread: usize) {
    let instance = &core.instance;
    while let Some(index) = core.ready.next() {
        let mut content = instance.queue.content(index);
        let step = carry(core, thread, index, &mut content);
        let bytes = content.progress.bytes;
        drop(content);
        match step {
            Step::Parked => core.ready.park(index),
            Step::Ended(status) => {
                instance.bytes_written.add(bytes);
                instance.submissions_written.add(u64::from(status == 0));
                instance.queue.finish(index, status, bytes, None);
                instance.event.signal();
            }
        }
    }
}

enum Step {
    /// The data is there, the notification does not fit yet.
    Parked,
    /// With this status.
    Ended(i32),
}

/// Why a piece was not copied.
type Refusal = ErrorCode;

fn carry(core: &Core, thread: usize, index: u32, content: &mut Content) -> Step {
    let Some(peer) = content.peer().cloned() else { return Step::Ended(ErrorCode::INTERNAL.0) };
    while content.progress.next < content.len() {
        if let Err(code) = copy_piece(core, thread, index, content, &peer) {
            return Step::Ended(code.0);
        }
    }
    if core.instance.queue.is_cancelled(index) {
        return Step::Ended(ErrorCode::CANCELLED.0);
    }
    // The receiver may have fenced since the last piece, and no notification is pushed after that.
    let Some(busy) = peer.enter(thread).filter(|_| !peer.is_gone()) else {
        return Step::Ended(ErrorCode::PEER_LOST.0);
    };
    let told = content.submission.notification_length == 0 || peer.notify(&content.submission);
    drop(busy);
    if told { Step::Ended(0) } else { Step::Parked }
}

/// Copies up to [`PIECE`] bytes, of one write or several.
fn copy_piece(
    core: &Core,
    thread: usize,
    index: u32,
    content: &mut Content,
    peer: &Outbound,
) -> Result<(), Refusal> {
    // Two marks: ours keeps the host from unmapping the source, the receiver's keeps it from reusing the target.
    // Everything that could forbid the copy is looked at after both are set.
    let _ours = core.holds[thread].enter();
    let _theirs = peer.enter(thread).ok_or(ErrorCode::PEER_LOST)?;
    if core.instance.is_stopping() {
        return Err(ErrorCode::CLOSED);
    }
    if peer.is_gone() {
        return Err(ErrorCode::PEER_LOST);
    }
    if core.instance.queue.is_cancelled(index) {
        return Err(ErrorCode::CANCELLED);
    }
    let mut budget = PIECE;
    while budget > 0
        && let Some(write) = content.write(content.progress.next)
    {
        let source = core.regions.source(write.source_region.0, write.source_offset, write.length.into());
        let target = peer.target(&write).filter(|_| peer.lives(&write));
        let (Some(source), Some(target)) = (source, target) else {
            return Err(ErrorCode::INVALID_ARGUMENT);
        };
        let progress = &mut content.progress;
        let bytes = budget.min(write.length - progress.copied);
        let at = progress.copied as usize;
        // SAFETY: both ranges were checked against their regions just now. The source stays mapped while our mark is
        // set (a deregistration waits for it), the target's mapping is held by `peer`. They are different mappings.
        // The host's page accounting sees to it that no other write touches the same bytes meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(source.add(at), target.add(at), bytes as usize) };
        budget -= bytes;
        progress.copied += bytes;
        progress.bytes += u64::from(bytes);
        if progress.copied == write.length {
            progress.next += 1;
            progress.copied = 0;
        }
    }
    Ok(())
}
