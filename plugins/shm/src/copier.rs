//! A copy thread.

use std::sync::atomic::Ordering;

use host_plugin_api::{Completion, ErrorCode};

use crate::outbound::Outbound;
use crate::queue::{Body, Slot, locked};
use crate::service::Core;

/// Most bytes copied between two looks at whether that is still allowed; bounds how long a fence waits.
pub const PIECE: u32 = 1 << 20;

/// Works until the queue is stopped. `thread` is this thread's number among the instance's copy threads.
pub fn run(core: &Core, thread: usize) {
    while let Some((index, slot)) = core.queue.next() {
        let mut body = locked(&slot.body);
        let Some(body) = body.as_mut() else { continue };
        let status = match carry(core, thread, slot, body) {
            Step::Parked => {
                core.queue.park(index);
                continue;
            }
            Step::Ended(status) => status,
        };
        body.peer = None;
        core.written.bytes.add(body.bytes);
        core.written.submissions.add(u64::from(status == 0));
        let tag = body.submission.tag;
        core.queue.finish(index, Completion { tag, bytes: body.bytes, status, reserved: 0 });
        core.signal();
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

fn carry(core: &Core, thread: usize, slot: &Slot, body: &mut Body) -> Step {
    let Some(peer) = body.peer.clone() else { return Step::Ended(ErrorCode::INTERNAL.0) };
    while body.next < body.writes.len() {
        if let Err(code) = copy_piece(core, thread, slot, body, &peer) {
            return Step::Ended(code.0);
        }
    }
    if slot.cancelled.load(Ordering::SeqCst) {
        return Step::Ended(ErrorCode::CANCELLED.0);
    }
    // The receiver may have fenced since the last piece, and pushes nobody's notification after that.
    let Some(busy) = peer.enter(thread).filter(|_| !peer.is_gone()) else {
        return Step::Ended(ErrorCode::PEER_LOST.0);
    };
    let told = body.submission.notification_length == 0 || peer.notify(&body.submission);
    drop(busy);
    if told { Step::Ended(0) } else { Step::Parked }
}

/// Copies up to [`PIECE`] bytes, of one write or several.
fn copy_piece(
    core: &Core,
    thread: usize,
    slot: &Slot,
    body: &mut Body,
    peer: &Outbound,
) -> Result<(), Refusal> {
    // Two marks: ours keeps the host from unmapping the source, the receiver's keeps it from reusing the target.
    // Everything that could forbid the copy is looked at after both are set.
    let _ours = core.holds[thread].enter();
    let _theirs = peer.enter(thread).ok_or(ErrorCode::PEER_LOST)?;
    if core.is_stopping() {
        return Err(ErrorCode::CLOSED);
    }
    if peer.is_gone() {
        return Err(ErrorCode::PEER_LOST);
    }
    if slot.cancelled.load(Ordering::SeqCst) {
        return Err(ErrorCode::CANCELLED);
    }
    let mut budget = PIECE;
    while budget > 0
        && let Some(write) = body.writes.get(body.next)
    {
        let source = core.regions.source(write.source_region, write.source_offset, write.length.into());
        let target = peer.target(write).filter(|_| peer.lives(write));
        let (Some(source), Some(target)) = (source, target) else {
            return Err(ErrorCode::INVALID_ARGUMENT);
        };
        let bytes = budget.min(write.length - body.copied);
        let at = body.copied as usize;
        // SAFETY: both ranges were checked against their regions just now. The source stays mapped while our mark is
        // set (a deregistration waits for it), the target's mapping is held by `peer`. They are different mappings;
        // that no other write touches the same bytes meanwhile is the host's page accounting.
        unsafe { std::ptr::copy_nonoverlapping(source.add(at), target.add(at), bytes as usize) };
        budget -= bytes;
        body.copied += bytes;
        body.bytes += u64::from(bytes);
        if body.copied == write.length {
            body.next += 1;
            body.copied = 0;
        }
    }
    Ok(())
}
