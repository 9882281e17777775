//! Warnings about refused connections. Their rate is limited, so that a stranger cannot fill a disk with them.

use std::fmt::Display;
use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::{self, Instant};

/// Shortest time between two warnings of a listener.
const WARN_EVERY: Duration = Duration::from_secs(10);

/// Counts the connections that a listener refused, and warns about them.
#[derive(Debug)]
pub struct Refusals {
    what: &'static str,
    counted: Mutex<Counted>,
}

#[derive(Debug, Default)]
struct Counted {
    last: Option<Instant>,
    since: u64,
}

impl Counted {
    /// Counts one refusal. If a warning is due, returns how many refusals had no warning since the last one.
    fn due(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.duration_since(last) < WARN_EVERY) {
            self.since += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.since))
    }
}

impl Refusals {
    /// Counts refusals of connections that logs call by this name.
    #[must_use]
    pub fn of(what: &'static str) -> Self {
        Self { what, counted: Mutex::default() }
    }

    /// Notes that a connection was refused.
    pub fn note(&self, from: &dyn Display, why: &dyn Display) {
        let due = self.counted.lock().due(clock::now());
        if let Some(more) = due {
            tracing::warn!(%from, %why, more, "{} connection was refused", self.what);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_told_and_others_are_counted() {
        let (mut counted, now) = (Counted::default(), clock::now());
        assert_eq!(counted.due(now), Some(0));
        assert_eq!(counted.due(now), None);
        assert_eq!(counted.due(now + WARN_EVERY / 2), None);
        assert_eq!(counted.due(now + WARN_EVERY), Some(2));
        assert_eq!(counted.due(now + WARN_EVERY * 2), Some(0));
    }
}
