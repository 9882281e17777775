//! A histogram of durations, with fixed buckets.

use std::time::Duration;

/// Upper bounds of the buckets, in microseconds. One more bucket takes the rest.
pub const BOUNDS_US: [u64; 20] = [
    500, 1_000, 2_000, 3_000, 5_000, 7_500, 10_000, 15_000, 20_000, 30_000, 40_000, 50_000, 75_000, 100_000,
    150_000, 250_000, 500_000, 1_000_000, 2_500_000, 10_000_000,
];

/// Numbers of durations by bucket, and their sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BOUNDS_US.len() + 1],
    sum: Duration,
}

impl Histogram {
    pub(crate) fn add(&mut self, duration: Duration) {
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| *bound < micros);
        self.counts[bucket] += 1;
        self.sum = self.sum.saturating_add(duration);
    }

    /// Number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of all durations.
    #[must_use]
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// Each bucket's upper bound in seconds (the last one's is infinite), and how many durations fell into it.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        let bounds = BOUNDS_US.iter().map(|micros| *micros as f64 / 1e6).chain([f64::INFINITY]);
        bounds.zip(self.counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_falls_into_the_first_bucket_that_holds_it() {
        let mut histogram = Histogram::default();
        for micros in [0, 500, 501, 1_000, 10_000_000, 10_000_001] {
            histogram.add(Duration::from_micros(micros));
        }
        let counts: Vec<u64> = histogram.buckets().map(|(_, count)| count).collect();
        assert_eq!((counts[0], counts[1], counts[19], counts[20]), (2, 2, 1, 1));
        assert_eq!((histogram.count(), histogram.sum()), (6, Duration::from_micros(20_002_002)));
    }
}
