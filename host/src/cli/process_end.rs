//! How a process hears that it has to end, and how it ends at once.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that ask a process to stop.
pub(super) struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    /// From now on none is missed.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Resolves when one comes, and names it.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "Ctrl-C",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}

/// Ends this process without another call of a plugin, also of its libraries' destructors, which may wait for something.
pub(super) fn end_at_once() -> ! {
    // Where the system refuses the signal, or before it comes, the process aborts.
    let _refused = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    std::process::abort();
}
