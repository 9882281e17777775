//! The sliding layers of a model: their KV, its place in pages, and the words that draws depend on.
//!
//! The KV of such a layer for a position depends on the layer before, at all positions that the position sees, as in a
//! real model. One wrong word therefore makes W - 1 further positions wrong in each layer.

use std::ops::Range;

use host_core::window::WindowShape;
use host_core::{Batch, Sequence};

use super::{Kv, Memory, layer_value};
use crate::random::mix;

/// Added to a sliding layer's number, so that its KV differs from that of every other layer.
const SLIDES: u32 = 1_000;

/// Layers that see the newest tokens only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sliding {
    /// The number of sliding layers.
    pub layers: u32,
    /// Tokens that they see.
    pub window: usize,
}

impl Kv {
    /// The shape of the window that the sliding layers take of the pool.
    #[must_use]
    pub fn window(&self) -> Option<WindowShape> {
        self.sliding.map(|Sliding { layers, window }| WindowShape {
            tokens: u32::try_from(window).unwrap_or(u32::MAX),
            parts: layers.div_ceil(self.layers),
            layers,
        })
    }
}

impl Sliding {
    /// Positions that the one at `position` sees.
    fn seen(self, position: usize) -> Range<usize> {
        (position + 1).saturating_sub(self.window)..position + 1
    }

    /// KV of a position in the sliding layer `layer`, from the model's first layer and from the positions seen in the
    /// layer before.
    fn value(first: u64, layer: u32, seen: impl Iterator<Item = u64>) -> u64 {
        seen.fold(layer_value(first, SLIDES + layer), mix)
    }

    /// Adds one position, given its KV in the model's first layer. `words` has the words of each position in each
    /// sliding layer.
    pub(super) fn add(self, words: &mut Vec<Vec<u64>>, first: u64) {
        let mut position = Vec::new();
        let seen = self.seen(words.len());
        for layer in 0..self.layers {
            let before = layer.checked_sub(1).map(|before| {
                let earlier = words[seen.start..].iter().map(move |words| words[before as usize]);
                earlier.chain([position[before as usize]])
            });
            position.push(Self::value(first, layer, before.into_iter().flatten()));
        }
        words.push(position);
    }

    /// The words that the last position sees, given the words of each position.
    pub(super) fn words_seen(self, words: &[Vec<u64>]) -> impl Iterator<Item = u64> {
        words[self.seen(words.len() - 1)].iter().flatten().copied()
    }

    fn place(memory: &Memory, sequence: &Sequence, layer: u32, position: usize) -> usize {
        let Kv { page_tokens, layers, .. } = memory.kv;
        let parts = memory.kv.window().map_or(0, |shape| shape.parts as usize);
        let page = sequence.window.page(position / page_tokens, (layer / layers) as usize, parts);
        let Some(page) = page else {
            panic!("position {position} is not in the window of {sequence:?}");
        };
        memory.at(page, layer % layers, position % page_tokens)
    }

    fn word(memory: &Memory, sequence: &Sequence, layer: u32, position: usize) -> u64 {
        memory.words[Self::place(memory, sequence, layer, position)]
    }

    /// Computes the sliding layers of a batch whose first layer is computed. Checks all words that each position sees,
    /// unless the position is computed for its window alone.
    pub(super) fn compute(self, memory: &mut Memory, batch: &Batch) {
        for sequence in &batch.sequences {
            let new = sequence.start as usize..sequence.end();
            for (layer, position) in (0..self.layers).flat_map(|layer| new.clone().map(move |at| (layer, at)))
            {
                let seen = self.seen(position);
                let seen = seen.start.max(sequence.recompute.start as usize)..seen.end;
                let before = layer.checked_sub(1).map(|before| seen.map(move |seen| (before, seen)));
                let before = before
                    .into_iter()
                    .flatten()
                    .map(|(layer, seen)| Self::word(memory, sequence, layer, seen));
                let value = Self::value(memory.first(sequence, position), layer, before);
                let place = Self::place(memory, sequence, layer, position);
                memory.words[place] = value;
            }
            // As in executors, parts of a page that no layer uses are zero, so that pages of the same name are equal.
            let parts = memory.kv.window().map_or(0, |shape| shape.parts);
            let unused = self.layers..parts * memory.kv.layers;
            for (layer, position) in unused.flat_map(|layer| new.clone().map(move |at| (layer, at))) {
                let place = Self::place(memory, sequence, layer, position);
                memory.words[place] = 0;
            }
            self.check(memory, sequence);
        }
    }

    fn check(self, memory: &Memory, sequence: &Sequence) {
        let mut words = Vec::new();
        (0..sequence.end()).for_each(|position| self.add(&mut words, memory.first(sequence, position)));
        let kept = sequence.start.max(sequence.recompute.end) as usize..sequence.end();
        for (seen, layer) in
            kept.flat_map(|at| self.seen(at)).flat_map(|at| (0..self.layers).map(move |layer| (at, layer)))
        {
            assert_eq!(
                Self::word(memory, sequence, layer, seen),
                words[seen][layer as usize],
                "sliding layer {layer} of position {seen} is not what it was: {sequence:?}"
            );
        }
    }

    /// The words that a sequence's last position sees in its pages.
    pub(super) fn words_read<'a>(
        self,
        memory: &'a Memory,
        sequence: &'a Sequence,
    ) -> impl Iterator<Item = u64> + 'a {
        let seen = self.seen(sequence.end() - 1);
        seen.flat_map(move |at| (0..self.layers).map(move |layer| Self::word(memory, sequence, layer, at)))
    }
}
