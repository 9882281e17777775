//! A queue of transfers that are served one after the other.

use std::time::Duration;

use host_core::Time;

use super::seconds;

/// A queue that serves in order of arrival at a fixed bandwidth.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    bytes_per_second: f64,
    free: Time,
}

impl Queue {
    /// An idle queue.
    pub(super) fn new(bytes_per_second: f64) -> Self {
        Self { bytes_per_second, free: Time::default() }
    }

    /// The time at which all requests so far are done.
    pub(super) fn free(&self) -> Time {
        self.free
    }

    /// The time in which so many bytes move.
    pub(super) fn moves(&self, bytes: f64) -> Duration {
        seconds(bytes / self.bytes_per_second)
    }

    /// Adds a request that moves so many bytes and takes a fixed time beside. Returns when it is done.
    pub(super) fn take(&mut self, now: Time, bytes: f64, fixed: Duration) -> Time {
        self.free = self.free.max(now).after(self.moves(bytes) + fixed);
        self.free
    }
}
