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
    known_full: Known,
    known_sliding: Known,
}

/// Positions whose angles are computed together, when one of them is needed for the first time.
const BLOCK: usize = 64;
/// From this position on, angles are not kept but computed each time. So at most 64 MiB are kept, for heads of 128.
const MOST_KNOWN: usize = 1 << 17;

/// Angles of positions that were needed before. Computing the angles of one position takes as long as copying those of a hundred.
#[derive(Default)]
struct Known {
    /// `[block][position][cosines, sines]`.
    blocks: Vec<Option<Box<[f32]>>>,
}

impl Known {
    /// Cosines and sines of a position.
    fn copy(
        &mut self,
        frequencies: &RopeFrequencies,
        position: usize,
        cosines: &mut [f32],
        sines: &mut [f32],
    ) {
        if position >= MOST_KNOWN {
            return frequencies.angles(position, cosines, sines);
        }
        let (index, width) = (position / BLOCK, 2 * frequencies.pairs());
        if self.blocks.len() <= index {
            self.blocks.resize_with(index + 1, || None);
        }
        let block = self.blocks[index].get_or_insert_with(|| {
            let mut block = vec![0.0; BLOCK * width].into_boxed_slice();
            for (position, angles) in (index * BLOCK..).zip(block.chunks_exact_mut(width)) {
                let (cosines, sines) = angles.split_at_mut(width / 2);
                frequencies.angles(position, cosines, sines);
            }
            block
        });
        let (known_cosines, known_sines) = block[position % BLOCK * width..][..width].split_at(width / 2);
        cosines.copy_from_slice(known_cosines);
        sines.copy_from_slice(known_sines);
    }
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

    /// Fills `angles` for rows at these positions.
    pub fn angles(&self, positions: impl Iterator<Item = usize> + Clone, rows: usize, angles: &mut Angles) {
        let Angles { full, sliding, known_full, known_sliding } = angles;
        let kinds = [(Some(&self.full), full, known_full), (self.sliding.as_ref(), sliding, known_sliding)];
        for (frequencies, [cosines, sines], known) in kinds {
            let Some(frequencies) = frequencies else { continue };
            let pairs = frequencies.pairs();
            cosines.resize(rows * pairs, 0.0);
            sines.resize(rows * pairs, 0.0);
            let targets = cosines.chunks_exact_mut(pairs).zip(sines.chunks_exact_mut(pairs));
            for (position, (cosines, sines)) in positions.clone().zip(targets) {
                known.copy(frequencies, position, cosines, sines);
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
