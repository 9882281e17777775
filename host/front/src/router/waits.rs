use std::time::Duration;

/// Longest waits for messages of workers that come within moments when all is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waits {
    /// How long the head of a stream waits for the first token after workers were called. A failure before the head is an HTTP
    /// status, which clients and proxies act on. A later failure is an event.
    pub head: Duration,
    /// Wait for a worker to end its call by itself after the answer is complete. Afterwards the call is cancelled.
    pub end: Duration,
    /// Wait for a worker's reply to an operator: that it drains, or that its cache is empty.
    pub reply: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self { head: Duration::from_secs(1), end: Duration::from_secs(30), reply: Duration::from_secs(5) }
    }
}
