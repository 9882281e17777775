//! The rotary angles of a batch. Sliding layers may have frequencies of their own.

use host_kernels::math::RopeFrequencies;

use super::config::{ModelConfig, Rope};
use crate::window::LayerPlace;

/// A model's frequencies.
pub(crate) struct Rotation {
    full: RopeFrequencies,
    /// Absent in models without sliding layers.
    sliding: Option<RopeFrequencies>,
}

/// Cosines and sines of a batch's rows, `[row][pair of dimensions]`. Kept between calls.
#[derive(Default)]
pub(crate) struct Angles {
    full: [Vec<f32>; 2],
    sliding: [Vec<f32>; 2],
}

impl Rotation {
    pub fn new(config: &ModelConfig) -> Self {
        let frequencies = |rope: Rope| RopeFrequencies::new(config.head_dim, rope.theta, rope.scaling);
        let full = frequencies(config.rope);
        Self {
            full: match &config.rope_divisors {
                Some(divisors) => full.divided_by(divisors),
                None => full,
            },
            sliding: config.sliding.as_ref().map(|sliding| frequencies(sliding.rope)),
        }
    }

    /// The angles of rows at these positions.
    pub fn angles(&self, positions: impl Iterator<Item = usize> + Clone, rows: usize, angles: &mut Angles) {
        let kinds = [(Some(&self.full), &mut angles.full), (self.sliding.as_ref(), &mut angles.sliding)];
        for (frequencies, [cosines, sines]) in kinds {
            let Some(frequencies) = frequencies else { continue };
            let pairs = frequencies.pairs();
            cosines.resize(rows * pairs, 0.0);
            sines.resize(rows * pairs, 0.0);
            let targets = cosines.chunks_exact_mut(pairs).zip(sines.chunks_exact_mut(pairs));
            for (position, (cosines, sines)) in positions.clone().zip(targets) {
                frequencies.angles(position, cosines, sines);
            }
        }
    }
}

impl Angles {
    /// Cosines and sines for a layer.
    pub fn of(&self, place: LayerPlace) -> (&[f32], &[f32]) {
        let [cosines, sines] = match place {
            LayerPlace::Full { .. } => &self.full,
            LayerPlace::Sliding { .. } => &self.sliding,
        };
        (cosines, sines)
    }
}
