//! The only clock of the control plane.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use tokio::time::Instant;
pub use tokio::time::{sleep, sleep_until, timeout};

/// The time now, on a clock that never goes back (and that tests can stop).
#[must_use]
pub fn now() -> Instant {
    Instant::now()
}

/// Seconds since 1970.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "this is the control plane's clock")]
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}
