//! The one place where a worker learns the time.

use std::time::Instant;

use host_core::Time;

/// Time since the worker started.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts at zero.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this is the worker's clock")]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Now.
    #[must_use]
    pub fn now(self) -> Time {
        Time(self.0.elapsed())
    }
}
