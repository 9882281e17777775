//! The signals that end a command.

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Waits for Ctrl-C, which ends what goes on, and SIGTERM, which ends the program.
pub struct Stop {
    interrupt: Signal,
    terminate: Signal,
    /// Whether SIGTERM came.
    pub for_good: bool,
}

impl Stop {
    /// Listens from now on.
    ///
    /// # Errors
    /// When the system refuses to.
    pub fn listen() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("signals cannot be waited for");
        let (interrupt, terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
        Ok(Self { interrupt, terminate, for_good: false })
    }

    /// Resolves at the next signal.
    pub async fn requested(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => self.for_good = true,
        }
    }
}
