//! A fake for tests: the backend over TCP without `settled`. It cannot tell what of a failed submission is still in flight.

use host_plugin_api::{
    Completion, ErrorCode, Memory, Notification, Opening, PeerId, RegionId, Result, Submission, Tag,
    TransferBackend, TransferLimits, Write,
};
use host_plugin_wire::Backend;

/// The backend over TCP without `settled`.
pub struct Unsettled(Backend);

/// Opens an instance.
///
/// # Errors
/// Those of the backend over TCP.
pub fn open(opening: &Opening) -> Result<Unsettled> {
    host_plugin_wire::open(opening).map(Unsettled)
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
}

impl TransferBackend for Unsettled {
    fn limits(&self) -> TransferLimits {
        self.0.limits()
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        self.0.register(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.0.deregister(region)
    }

    fn endpoint(&self) -> Result<Vec<u8>> {
        self.0.endpoint()
    }

    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        self.0.connect(name, endpoint)
    }

    fn disconnect(&self, peer: PeerId) -> Result<()> {
        self.0.disconnect(peer)
    }

    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        self.0.submit(submission, writes)
    }

    fn poll(&self, completions: &mut [Completion]) -> i32 {
        self.0.poll(completions)
    }

    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        self.0.notifications(notifications)
    }

    fn cancel(&self, tag: Tag) -> i32 {
        self.0.cancel(tag)
    }

    fn settled(&self, tag: Tag) -> i32 {
        // The code of an instance that was shut down is lower, so it passes.
        self.0.settled(tag).min(ErrorCode::UNSUPPORTED.0)
    }

    fn event_fd(&self) -> i32 {
        self.0.event_fd()
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.0.shutdown(deadline_ms)
    }
}
