//! How long answers take, and when to ask again.

use std::time::Duration;

/// Wait for an answer before anything was measured.
const FIRST: Duration = Duration::from_millis(20);
/// Shortest wait: a busy machine answers late without having lost anything.
const SHORTEST: Duration = Duration::from_millis(10);
/// Longest wait between repeats.
pub(super) const LONGEST: Duration = Duration::from_secs(1);

/// Mean and spread of the time to an answer, as TCP keeps them (RFC 6298).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundTrip(Option<(Duration, Duration)>);

impl RoundTrip {
    /// Takes note of an answer to exactly the question that was asked so long ago.
    pub(super) fn measured(&mut self, took: Duration) {
        self.0 = Some(match self.0 {
            None => (took, took / 2),
            Some((mean, spread)) => ((mean * 7 + took) / 8, (spread * 3 + mean.abs_diff(took)) / 4),
        });
    }

    /// How long to wait for an answer before asking again.
    pub(super) fn patience(&self) -> Duration {
        self.0.map_or(FIRST, |(mean, spread)| (mean + spread * 4).clamp(SHORTEST, LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_follows_what_was_measured_within_its_bounds() {
        let mut round_trip = RoundTrip::default();
        assert_eq!(round_trip.patience(), FIRST);
        (0..50).for_each(|_| round_trip.measured(Duration::from_millis(80)));
        let steady = round_trip.patience();
        assert!((80..85).contains(&steady.as_millis()), "{steady:?}");
        round_trip.measured(Duration::from_millis(300));
        assert!(round_trip.patience() > steady * 2);
        (0..200).for_each(|_| round_trip.measured(Duration::from_micros(30)));
        assert_eq!(round_trip.patience(), SHORTEST);
        (0..200).for_each(|_| round_trip.measured(Duration::from_secs(30)));
        assert_eq!(round_trip.patience(), LONGEST);
    }
}
