//! Rotary position embedding: frequencies and angles.

/// How a model stretches its rotary frequencies to longer contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// All frequencies are divided by this factor.
    Linear(f64),
    /// Llama 3.1: wavelengths longer than `original_positions / low` are slowed down by `factor`. Wavelengths shorter than
    /// `original_positions / high` are kept, and those between are blended linearly.
    Llama3 {
        /// The factor by which slow frequencies are slowed down.
        factor: f64,
        /// Turns within the original context below which a frequency is slowed down fully.
        low: f64,
        /// Turns within the original context above which a frequency is kept.
        high: f64,
        /// Context length that the model was first trained for.
        original_positions: f64,
    },
}

/// Angle per position of each pair of a head's dimensions.
#[derive(Clone, Debug)]
pub struct RopeFrequencies(Vec<f64>);

impl RopeFrequencies {
    /// Frequencies `theta^(-2i / head_dim)` for i = 0 .. head_dim / 2, scaled.
    #[must_use]
    pub fn new(head_dim: usize, theta: f64, scaling: RopeScaling) -> Self {
        let plain = (0..head_dim / 2).map(|i| libm::pow(theta, -2.0 * i as f64 / head_dim as f64));
        Self(plain.map(|frequency| scale(frequency, scaling)).collect())
    }

    /// These frequencies, each divided by a number of its own.
    ///
    /// # Panics
    /// When there are not as many divisors as [`Self::pairs`].
    #[must_use]
    pub fn divided_by(mut self, divisors: &[f32]) -> Self {
        assert_eq!(divisors.len(), self.pairs(), "one divisor per pair");
        for (frequency, divisor) in self.0.iter_mut().zip(divisors) {
            *frequency /= f64::from(*divisor);
        }
        self
    }

    /// Pairs of dimensions: half the head dimension.
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.0.len()
    }

    /// Cosines and sines of `position`'s angles, computed in `f64` and rounded once.
    ///
    /// # Panics
    /// When a target is not [`Self::pairs`] long.
    pub fn angles(&self, position: usize, cosines: &mut [f32], sines: &mut [f32]) {
        assert!(cosines.len() == self.pairs() && sines.len() == self.pairs(), "one angle per pair");
        for ((frequency, cosine), sine) in self.0.iter().zip(cosines).zip(sines) {
            let (sin, cos) = libm::sincos(position as f64 * frequency);
            *cosine = cos as f32;
            *sine = sin as f32;
        }
    }
}

fn scale(frequency: f64, scaling: RopeScaling) -> f64 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear(factor) => frequency / factor,
        RopeScaling::Llama3 { factor, low, high, original_positions } => {
            let turns = original_positions * frequency / std::f64::consts::TAU;
            if turns < low {
                frequency / factor
            } else if turns > high {
                frequency
            } else {
                let kept = (turns - low) / (high - low);
                (1.0 - kept) * frequency / factor + kept * frequency
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_scaling_reaches_each_angle_at_as_many_times_the_position() {
        let plain = RopeFrequencies::new(32, 10_000.0, RopeScaling::None);
        let scaled = RopeFrequencies::new(32, 10_000.0, RopeScaling::Linear(8.0));
        let angles = |rope: &RopeFrequencies, position| {
            let (mut cosines, mut sines) = ([0.0; 16], [0.0; 16]);
            rope.angles(position, &mut cosines, &mut sines);
            (cosines, sines)
        };
        assert_eq!(angles(&scaled, 8 * 1234), angles(&plain, 1234));
    }

    #[test]
    fn divisors_slow_each_pair_by_its_own() {
        let plain = RopeFrequencies::new(8, 10_000.0, RopeScaling::None);
        let divided = plain.clone().divided_by(&[1.0, 2.0, 4.0, 8.0]);
        assert_eq!(divided.0, [plain.0[0], plain.0[1] / 2.0, plain.0[2] / 4.0, plain.0[3] / 8.0]);
    }

    #[test]
    fn llama3_scaling_keeps_fast_and_slows_slow_frequencies_without_a_step() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_positions: 8192.0 };
        let plain = RopeFrequencies::new(128, 500_000.0, RopeScaling::None);
        let scaled = RopeFrequencies::new(128, 500_000.0, scaling);
        assert_eq!(plain.0[0], scaled.0[0]);
        assert_eq!(plain.0[63] / 8.0, scaled.0[63]);
        let ratios: Vec<f64> = plain.0.iter().zip(&scaled.0).map(|(a, b)| a / b).collect();
        assert!(ratios.is_sorted(), "{ratios:?}");
        assert!(ratios.iter().any(|&ratio| ratio > 1.1 && ratio < 7.0), "{ratios:?}");
    }
}
