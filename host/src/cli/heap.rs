//! Gives memory back to the system that requests have left behind.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use anyhow::Context as _;
use host_memory::heap::{self, Heap};

/// Runs a server, and gives back what its heap has freed when the process has grown by much.
///
/// # Errors
/// As the server does, and when there is no thread.
pub async fn beside(server: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    // Ends the thread when it is dropped.
    let (_running, runs) = channel();
    let thread = std::thread::Builder::new().name("heap".into());
    thread.spawn(move || watch(&runs)).context("no thread that gives memory back")?;
    server.await
}

fn watch(runs: &Receiver<()>) {
    let mut heap = Heap::default();
    while runs.recv_timeout(Heap::PAUSE) == Err(RecvTimeoutError::Timeout) {
        // A system that does not say how large the process is gets nothing back.
        let Some(resident) = heap::resident() else { return };
        if heap.has_grown(resident) {
            heap::give_back();
            let left = heap::resident().unwrap_or(resident);
            heap.gave_back(left);
            tracing::debug!(before = resident, after = left, "gave freed memory back to the system");
        }
    }
}
