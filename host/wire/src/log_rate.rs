//! A limit on how often a log line is written, so that a stranger cannot fill a disk with lines.

use std::time::Duration;

use crate::clock::Instant;

/// Decides which events get a log line. The first one does, and then one for each period.
#[derive(Clone, Copy, Debug)]
pub struct LogRate {
    period: Duration,
    last: Option<Instant>,
    left_out: u64,
}

impl LogRate {
    /// At most one line in each period of this length.
    #[must_use]
    pub const fn one_in(period: Duration) -> Self {
        Self { period, last: None, left_out: 0 }
    }

    /// Counts an event. If it gets a line, returns the number of events since the last line that got none.
    pub fn line(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.duration_since(last) < self.period) {
            self.left_out += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    #[test]
    fn one_event_in_a_period_gets_a_line_and_the_others_are_counted() {
        let period = Duration::from_secs(10);
        let (mut rate, now) = (LogRate::one_in(period), clock::now());
        assert_eq!(rate.line(now), Some(0));
        assert_eq!((rate.line(now), rate.line(now + period / 2)), (None, None));
        assert_eq!(rate.line(now + period), Some(2));
        assert_eq!(rate.line(now + period * 2), Some(0));
    }
}
