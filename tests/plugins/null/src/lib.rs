//! A fake for tests and benchmarks: accepts submissions and moves nothing, so that a benchmark measures the call.

use std::sync::atomic::{AtomicU64, Ordering};

use host_plugin_api::{
    Completion, ErrorCode, Memory, Notification, Opening, PeerId, RegionId, Result, Submission, Tag,
    TransferBackend, TransferLimits, Write,
};

/// Sums the bytes of submissions, so that the compiler does not drop the work.
#[derive(Default)]
pub struct NullBackend {
    bytes: AtomicU64,
}

/// Opens an instance.
///
/// # Errors
/// Never.
pub fn open(_opening: &Opening) -> Result<NullBackend> {
    Ok(NullBackend::default())
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
}

impl TransferBackend for NullBackend {
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
    // Inlined into the exported function, as an author's code would be. The benchmark compares that with a direct call.
    #[inline]
    fn submit(&self, _submission: &Submission, writes: &[Write]) -> i32 {
        let mut bytes = 0;
        // Eight at a time: the time of a loop of a single cycle would depend on where the linker puts it.
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
