//! The layers of a model that slide: their KV, where it lies, and what is drawn from it.
//!
//! What such a layer writes for a position depends on all that the layer before it has of what the position sees, as in
//! a real model: one word that is not what it was blurs W - 1 positions more in each layer.

use std::ops::Range;

use host_core::pool::PoolLimits;
use host_core::window::WindowShape;
use host_core::{Batch, Sequence};

use super::memory::{LAYERS, Memory, PAGE_TOKENS, layer_value, mix};

/// Added to a sliding layer's number, so that none has the KV of another layer.
const SLIDES: u32 = 1_000;

/// Layers that see the newest tokens only.
#[derive(Clone, Copy, Debug)]
pub struct Sliding {
    pub layers: u32,
    pub window: usize,
}

impl Sliding {
    /// One of some: windows shorter than a page, of some pages, and longer than most prompts.
    pub fn some(seed: u64) -> Self {
        let windows = [1, 2, 4, 5, 9, 12, 30];
        Self { layers: 1 + (seed / 7 % 7) as u32, window: windows[(seed % 7) as usize] }
    }

    /// Some that look a page or two back, in as few layers.
    pub fn few(seed: u64) -> Self {
        Self { layers: 1 + (seed / 3 % 3) as u32, window: [4, 6, 9][(seed % 3) as usize] }
    }

    pub fn shape(self) -> WindowShape {
        let Self { layers, window } = self;
        WindowShape { tokens: window as u32, parts: layers.div_ceil(LAYERS), layers }
    }

    /// Pages of the pool that the longest request takes beside its own.
    pub fn most_pages(self) -> u32 {
        (self.shape().least_pages(64, PAGE_TOKENS) - 64 / PAGE_TOKENS) as u32
    }

    /// Limits under which the longest request just fits, and few at once.
    pub fn limits(self, pages: u32) -> PoolLimits {
        let shape = self.shape();
        let window = shape.parts * (shape.most_kept(1, PAGE_TOKENS) as u32 + 1);
        PoolLimits { total: pages, full: pages.min(19), window }
    }

    /// Positions that the one at `position` sees.
    fn seen(self, position: usize) -> Range<usize> {
        (position + 1).saturating_sub(self.window)..position + 1
    }

    /// KV of a position in the n-th of these layers, from that in the model's first one and what it sees in the layer before.
    fn value(first: u64, layer: u32, seen: impl Iterator<Item = u64>) -> u64 {
        seen.fold(layer_value(first, SLIDES + layer), mix)
    }

    /// One position more, given its KV in the model's first layer: `words` are those of each position in each of these layers.
    pub fn add(self, words: &mut Vec<Vec<u64>>, first: u64) {
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

    /// What the last of some positions sees, given the words of each.
    pub fn words_seen(self, words: &[Vec<u64>]) -> impl Iterator<Item = u64> {
        words[self.seen(words.len() - 1)].iter().flatten().copied()
    }

    fn place(self, sequence: &Sequence, layer: u32, position: usize) -> usize {
        let parts = self.shape().parts as usize;
        let page = sequence.window.page(position / PAGE_TOKENS, (layer / LAYERS) as usize, parts);
        let Some(page) = page else {
            panic!("position {position} is not in the window of {sequence:?}");
        };
        Memory::at(page, layer % LAYERS, position % PAGE_TOKENS)
    }

    /// Computes these layers of a batch whose first layer is computed, and looks whether all is there that each position
    /// sees which is not computed for its window alone.
    pub fn compute(self, memory: &mut Memory, batch: &Batch) {
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
                    .map(|(layer, seen)| memory.word_at(self.place(sequence, layer, seen)));
                let value = Self::value(memory.first(sequence, position), layer, before);
                *memory.word(self.place(sequence, layer, position)) = value;
            }
            // What no layer uses is the same under one name, too, as executors leave it.
            for (layer, position) in (self.layers..self.shape().parts * LAYERS)
                .flat_map(|layer| new.clone().map(move |at| (layer, at)))
            {
                *memory.word(self.place(sequence, layer, position)) = 0;
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
            let found = memory.word_at(self.place(sequence, layer, seen));
            assert_eq!(
                found, words[seen][layer as usize],
                "sliding layer {layer} of position {seen} is not what it was: {sequence:?}"
            );
        }
    }

    /// What lies where a sequence's last position looks.
    pub fn words_read<'a>(
        self,
        memory: &'a Memory,
        sequence: &'a Sequence,
    ) -> impl Iterator<Item = u64> + 'a {
        let seen = self.seen(sequence.end() - 1);
        seen.flat_map(move |position| {
            (0..self.layers).map(move |layer| memory.word_at(self.place(sequence, layer, position)))
        })
    }
}
