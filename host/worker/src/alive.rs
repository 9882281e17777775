//! Reports a thread of a worker that ends before it was told to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

/// Held by each thread of a worker. A thread that ends before it was asked to (a panic, a plugin that failed) leaves a
/// worker that answers no request, so its end is reported to the program.
pub(crate) struct Alive {
    pub(super) thread: &'static str,
    pub(super) stopping: Arc<AtomicBool>,
    pub(super) died: watch::Sender<Option<&'static str>>,
}

impl Drop for Alive {
    fn drop(&mut self) {
        if !self.stopping.load(Ordering::Acquire) {
            // The others end because the first one did, so the first one is reported.
            self.died.send_if_modified(|died| {
                let first = died.is_none();
                *died = died.or(Some(self.thread));
                first
            });
        }
    }
}
