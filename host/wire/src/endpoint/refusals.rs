//! Warnings about refused connections. Their rate is limited, so that a stranger cannot fill a disk with them.

use std::fmt::Display;
use std::time::Duration;

use parking_lot::Mutex;

use crate::audit::AUDIT;
use crate::clock;
use crate::log_rate::LogRate;

/// Shortest time between two warnings of a listener.
const WARN_EVERY: Duration = Duration::from_secs(10);

/// Counts the connections that a listener refused, and warns about them.
#[derive(Debug)]
pub struct Refusals {
    what: &'static str,
    rate: Mutex<LogRate>,
}

impl Refusals {
    /// Counts refusals of connections that logs call by this name.
    #[must_use]
    pub fn of(what: &'static str) -> Self {
        Self { what, rate: Mutex::new(LogRate::one_in(WARN_EVERY)) }
    }

    /// Notes that a connection was refused.
    pub fn note(&self, from: &dyn Display, why: &dyn Display) {
        let line = self.rate.lock().line(clock::now());
        if let Some(more) = line {
            tracing::warn!(target: AUDIT, %from, %why, more, "{} connection was refused", self.what);
        }
    }
}
