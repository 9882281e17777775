//! Something that moves bytes, one request after the other.

use std::time::Duration;

use host_core::Time;

/// Serves in order of arrival at a fixed bandwidth.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    bytes_per_second: f64,
    free: Time,
}

impl Queue {
    /// An idle one.
    pub(super) fn new(bytes_per_second: f64) -> Self {
        Self { bytes_per_second, free: Time::default() }
    }

    /// When everything that was asked of it so far is done.
    pub(super) fn free(&self) -> Time {
        self.free
    }

    /// Adds so many bytes, and a time that does not depend on them. Returns when they are moved.
    pub(super) fn take(&mut self, now: Time, bytes: f64, fixed: Duration) -> Time {
        let moving = Duration::from_secs_f64(bytes / self.bytes_per_second);
        self.free = self.free.max(now).after(moving + fixed);
        self.free
    }
}
