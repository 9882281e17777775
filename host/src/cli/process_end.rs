//! The signals that stop a process, and its immediate end.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that ask a process to stop.
pub(super) struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    /// Starts to listen. No later signal is missed.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Resolves when a signal comes, and returns its name.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "Ctrl-C",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}

/// Ends this process without running destructors, also those of plugins' libraries, which may block.
pub(super) fn end_at_once() -> ! {
    // If the system refuses the signal, or before it arrives, the process aborts.
    let _refused = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    std::process::abort();
}
