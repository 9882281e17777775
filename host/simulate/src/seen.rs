//! One request, as its client saw it.

use std::time::Duration;

/// One request, as its client saw it. Times are since the beginning of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// When it was sent.
    pub sent: Duration,
    /// When its first token came, and its last one.
    pub tokens: Option<(Duration, Duration)>,
    /// When it ended.
    pub ended: Option<Duration>,
    /// Whether it was answered to its end.
    pub complete: bool,
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Tokens of its answer so far.
    pub received: u32,
}
