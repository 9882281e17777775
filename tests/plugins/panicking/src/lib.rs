//! A fake for tests: panics in the call that its configuration names.

use host_plugin_api::{
    Completion, ErrorCode, Memory, Notification, Opening, PeerId, RegionId, Result, Submission, Tag,
    TransferBackend, TransferLimits, Write,
};

/// A backend that panics in the call that `place` names.
pub struct PanickingBackend {
    place: String,
}

impl PanickingBackend {
    fn at(&self, place: &str) {
        if self.place.contains(place) {
            // The payload panics again when it is dropped: the worst case for the guard.
            std::panic::panic_any(Nasty);
        }
    }
}

struct Nasty;

impl Drop for Nasty {
    fn drop(&mut self) {
        panic!("the payload panicked when it was dropped");
    }
}

/// Opens an instance.
///
/// # Panics
/// When the configuration says `in = "open"`.
///
/// # Errors
/// Never.
pub fn open(opening: &Opening) -> Result<PanickingBackend> {
    assert!(!opening.config.contains("\"open\""), "told to panic while opening");
    // No guard can stop what follows, so its tests run in processes of their own.
    if opening.config.contains("\"abort\"") {
        std::process::abort();
    }
    while opening.config.contains("\"hang\"") {
        std::thread::park();
    }
    if opening.config.contains("\"exhaust\"") {
        // The memory is never touched: the test is about address space.
        drop(std::hint::black_box(Vec::<u8>::with_capacity(3 << 30)));
    }
    if opening.config.contains("\"daemon\"") {
        // Starts a process that outlives this one and keeps its output open.
        let text = "sleep 600 & echo $! >> \"$DAEMON\"";
        let told = std::process::Command::new("sh").args(["-c", text]).status();
        assert!(told.is_ok_and(|told| told.success()), "DAEMON says where to leave the process's number");
    }
    if opening.config.contains("\"spin\"") {
        let workers: Vec<_> =
            (0..4).map(|_| std::thread::spawn(|| while !std::thread::panicking() {})).collect();
        workers.into_iter().for_each(|worker| drop(worker.join()));
    }
    Ok(PanickingBackend { place: opening.config.clone() })
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
}

impl Drop for PanickingBackend {
    fn drop(&mut self) {
        self.at("drop");
    }
}

impl TransferBackend for PanickingBackend {
    fn limits(&self) -> TransferLimits {
        TransferLimits::new(1, 1)
    }
    fn register(&self, _memory: &Memory) -> Result<RegionId> {
        Ok(RegionId(1))
    }
    fn deregister(&self, _region: RegionId) -> Result<()> {
        Ok(())
    }
    fn endpoint(&self) -> Result<Vec<u8>> {
        assert!(!self.place.contains("endpoint"), "told to panic in endpoint");
        Ok(Vec::new())
    }
    fn connect(&self, _name: &str, _endpoint: &[u8]) -> Result<PeerId> {
        Ok(PeerId(1))
    }
    fn disconnect(&self, _peer: PeerId) -> Result<()> {
        Ok(())
    }
    fn submit(&self, _submission: &Submission, _writes: &[Write]) -> i32 {
        0
    }
    fn poll(&self, _completions: &mut [Completion]) -> i32 {
        self.at("poll");
        while self.place.contains("\"nowhere\"") {
            std::thread::park();
        }
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
