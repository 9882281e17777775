//! A model of the time of some work: a fixed part and a part per unit, learned from earlier times.
//!
//! Least squares over past samples, where each later sample reduces the weight of earlier ones. Times that were assumed
//! at the start count like a few samples, so that the first deviating sample does not change everything. A given fit
//! does not learn.

use std::time::Duration;

/// Factor by which a new sample reduces the weight of earlier ones.
const FADES: f64 = 0.95;

/// Samples are clamped at `CLAMP` times the expected time, or at `CLAMP_SECONDS` if that is more.
const CLAMP: f64 = 4.0;
const CLAMP_SECONDS: f64 = 0.001;

/// Seconds as a straight line over units (bytes, tokens, pages).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LinearFit {
    count: f64,
    units: f64,
    seconds: f64,
    units_squared: f64,
    units_seconds: f64,
    /// Seconds of the fixed part and per unit, of a fit that does not learn.
    given: Option<[f64; 2]>,
}

impl LinearFit {
    /// A fit that does not learn.
    pub(crate) fn given(fixed: Duration, per_unit: f64) -> Self {
        Self { given: Some([fixed.as_secs_f64(), per_unit]), ..Self::default() }
    }

    /// A fit that begins with assumed times, and learns. `sizes` are two sizes between which it will be used.
    pub(crate) fn assumed(fixed: Duration, per_unit: f64, sizes: [f64; 2]) -> Self {
        let mut fit = Self::default();
        for units in sizes {
            fit.learn(units, fixed.as_secs_f64() + per_unit * units);
        }
        fit
    }

    /// Learns that so many units took so many seconds, clamped at [`CLAMP`] times the expected time. A single slow
    /// sample then changes the fit little. Many still change it.
    pub(crate) fn learn_clamped(&mut self, units: f64, seconds: f64) {
        let clamp =
            self.predict(units).map_or(f64::INFINITY, |expected| (CLAMP * expected).max(CLAMP_SECONDS));
        self.learn(units, seconds.min(clamp));
    }

    /// Learns that so many units took so many seconds.
    pub(crate) fn learn(&mut self, units: f64, seconds: f64) {
        if self.given.is_some() {
            return;
        }
        for sum in [
            &mut self.count,
            &mut self.units,
            &mut self.seconds,
            &mut self.units_squared,
            &mut self.units_seconds,
        ] {
            *sum *= FADES;
        }
        self.count += 1.0;
        self.units += units;
        self.seconds += seconds;
        self.units_squared += units * units;
        self.units_seconds += units * seconds;
    }

    /// Whether so many units took so much less than expected that the expectation is out of date.
    pub(crate) fn expected_more(&self, units: f64, seconds: f64) -> bool {
        self.given.is_none() && self.predict(units).is_some_and(|expected| 2.0 * seconds < expected)
    }

    /// How long so many units will take, or `None` before anything was learned.
    pub(crate) fn predict(&self, units: f64) -> Option<f64> {
        if let Some([fixed, per_unit]) = self.given {
            return Some(fixed + per_unit * units);
        }
        if self.count == 0.0 {
            return None;
        }
        let spread = self.count * self.units_squared - self.units * self.units;
        let (mean_units, mean_seconds) = (self.units / self.count, self.seconds / self.count);
        // Samples of one size only give no slope. The line then goes through zero and the mean.
        if spread <= 1e-6 * self.count * self.units_squared {
            return Some(if mean_units > 0.0 { mean_seconds * units / mean_units } else { mean_seconds });
        }
        let slope = (self.count * self.units_seconds - self.units * self.seconds) / spread;
        let fixed = mean_seconds - slope * mean_units;
        Some(match (slope < 0.0, fixed < 0.0) {
            (true, _) => mean_seconds,
            (_, true) => units * self.units_seconds / self.units_squared,
            _ => fixed + slope * units,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fit_finds_a_line_from_its_points_and_follows_when_it_changes() {
        let mut fit = LinearFit::assumed(Duration::from_secs(1), 0.0, [0.0, 100.0]);
        assert!((fit.predict(50.0).unwrap() - 1.0).abs() < 1e-9);
        for round in 0..200 {
            let units = f64::from(round % 7 * 10);
            fit.learn(units, 0.5 + 0.01 * units);
        }
        assert!((fit.predict(100.0).unwrap() - 1.5).abs() < 0.01);
    }

    #[test]
    fn a_given_fit_stays_as_it_is() {
        let mut fit = LinearFit::given(Duration::from_secs(1), 0.5);
        (0..50).for_each(|_| fit.learn_clamped(4.0, 1000.0));
        assert!((fit.predict(4.0).unwrap() - 3.0).abs() < 1e-9);
        assert!(!fit.expected_more(4.0, 0.0), "nothing is a reason to look again");
    }

    #[test]
    fn one_slow_moment_changes_little_and_many_change_much() {
        let mut fit = LinearFit::default();
        (0..50).for_each(|_| fit.learn_clamped(50.0, 0.002));
        let mut slow = 0;
        while fit.predict(50.0).unwrap() < 0.01 {
            fit.learn_clamped(50.0, 10.0);
            slow += 1;
        }
        assert!((8..30).contains(&slow), "{slow} slow ones until it is five times as slow");
        let mut new = LinearFit::default();
        new.learn_clamped(1.0, 7.0);
        assert!((new.predict(1.0).unwrap() - 7.0).abs() < 1e-9, "nothing was expected");
    }

    #[test]
    fn sizes_that_are_all_alike_are_scaled_and_nothing_is_ever_negative() {
        assert_eq!(LinearFit::default().predict(5.0), None);
        let mut fit = LinearFit::default();
        fit.learn(10.0, 2.0);
        assert!((fit.predict(20.0).unwrap() - 4.0).abs() < 1e-9);
        fit.learn(20.0, 1.0);
        assert!(fit.predict(1e6).unwrap() > 0.0);
        let mut steep = LinearFit::default();
        steep.learn(10.0, 0.1);
        steep.learn(20.0, 10.0);
        assert!(steep.predict(1.0).unwrap() > 0.0);
    }
}
