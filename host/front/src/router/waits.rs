use std::time::Duration;

/// Longest waits for what workers say within moments when all is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waits {
    /// The head of a stream waits so long for the first token, from the moment at which workers were called. What fails before is
    /// a status, which clients and proxies act on. Later it is an event.
    pub head: Duration,
    /// For a worker to end its call by itself, once the answer is complete. Afterwards the call is cancelled.
    pub end: Duration,
    /// For a worker's reply to an operator: that it drains, or that its cache is empty.
    pub reply: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self { head: Duration::from_secs(1), end: Duration::from_secs(30), reply: Duration::from_secs(5) }
    }
}
