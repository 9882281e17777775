//! Measures the boundary alone: a backend built into this program, called directly and through the ABI.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use host_plugin_api::abi::{RSlice, open_guarded};
use host_plugin_api::{
    Completion, ErrorCode, Memory, NOTIFICATION_BYTES, Notification, PeerId, RegionId, Result, Submission,
    Tag, TransferBackend, TransferLimits, Write,
};

use super::{Batch, best};

const SIZES: [usize; 5] = [1, 8, 64, 512, 4096];
const TURNS: usize = 40;

/// A backend that adds up the lengths of its writes and checks each. Every real backend does more.
#[derive(Default)]
struct Sum {
    bytes: AtomicU64,
}

impl TransferBackend for Sum {
    fn limits(&self) -> TransferLimits {
        TransferLimits::new(u32::MAX, u32::MAX)
    }
    fn register(&self, _memory: &Memory) -> Result<RegionId> {
        Ok(RegionId(1))
    }
    fn deregister(&self, _region: RegionId) -> Result<()> {
        Ok(())
    }
    fn endpoint(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }
    fn connect(&self, _name: &str, _endpoint: &[u8]) -> Result<PeerId> {
        Ok(PeerId(1))
    }
    fn disconnect(&self, _peer: PeerId) -> Result<()> {
        Ok(())
    }
    #[inline]
    fn submit(&self, _submission: &Submission, writes: &[Write]) -> i32 {
        let mut bytes = 0;
        // In groups of eight: the time of a loop of one cycle would depend on where the linker puts it.
        let (eights, rest) = writes.as_chunks::<8>();
        for eight in eights {
            if eight.iter().any(|write| write.length == 0 || write.target_region == RegionId(u32::MAX)) {
                return ErrorCode::INVALID_ARGUMENT.0;
            }
            bytes += eight.iter().map(|write| u64::from(write.length)).sum::<u64>();
        }
        for write in rest {
            if write.length == 0 || write.target_region == RegionId(u32::MAX) {
                return ErrorCode::INVALID_ARGUMENT.0;
            }
            bytes += u64::from(write.length);
        }
        self.bytes.store(bytes, Ordering::Relaxed);
        0
    }
    fn poll(&self, _completions: &mut [Completion]) -> i32 {
        0
    }
    fn notifications(&self, _notifications: &mut [Notification]) -> i32 {
        0
    }
    fn cancel(&self, _tag: Tag) -> i32 {
        ErrorCode::INVALID_ARGUMENT.0
    }
    fn settled(&self, _tag: Tag) -> i32 {
        1
    }
    fn event_fd(&self) -> i32 {
        -1
    }
    fn shutdown(&self, _deadline_ms: u64) -> Result<()> {
        Ok(())
    }
}

/// A direct call of the backend.
#[inline(never)]
fn direct(backend: &Sum, submission: &Submission, writes: &[Write]) -> i32 {
    backend.submit(submission, writes)
}

pub fn measure() -> std::result::Result<Vec<Batch>, String> {
    let linked = Sum::default();
    let crossing = open_guarded(|_opening| Ok(Sum::default()), "bench".into(), "".into());
    let crossing = crossing.into_result().map_err(|error| error.message.to_string())?;
    let submission = Submission {
        peer: PeerId(1),
        notification_length: 0,
        tag: Tag(1),
        notification: [0; NOTIFICATION_BYTES],
    };
    let batches = SIZES.map(|count| {
        let writes = vec![Write { length: 4096, ..Write::default() }; count];
        let calls = 1_000_000 / (count + 20);
        let mut batch = Batch { writes: count, static_ns: f64::MAX, abi_ns: f64::MAX };
        // In turns, so that a busy moment affects both.
        for _ in 0..TURNS {
            let ours = best(1, calls, || {
                black_box(direct(black_box(&linked), black_box(&submission), black_box(&writes)));
            });
            let theirs = best(1, calls, || {
                let writes = RSlice::from_slice(black_box(&writes));
                black_box(black_box(&crossing).submit(black_box(&submission), writes));
            });
            batch.static_ns = batch.static_ns.min(ours);
            batch.abi_ns = batch.abi_ns.min(theirs);
        }
        batch
    });
    Ok(batches.to_vec())
}
