//! Names and units that the whole system shares.

use std::fmt;
use std::ops::Add;
use std::time::Duration;

/// A page of KV cache, the same number on every rank of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

/// One try at one request, on all workers that take part in it. A retry gets a new room.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Room(pub u64);

/// One run of a worker process. The number is random at start, so a restarted worker is another instance.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance(pub u64);

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Room({:016x})", self.0)
    }
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Instance({:016x})", self.0)
    }
}

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Time since the worker (or the simulation) started. The core never asks for the time. The caller tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Time(pub Duration);

impl Add<Duration> for Time {
    type Output = Time;

    fn add(self, wait: Duration) -> Time {
        self.after(wait)
    }
}

impl Time {
    /// The time `wait` after `self`.
    #[must_use]
    pub fn after(self, wait: Duration) -> Time {
        Time(self.0.saturating_add(wait))
    }

    /// How long ago `earlier` was, or zero if it lies ahead.
    #[must_use]
    pub fn since(self, earlier: Time) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}
