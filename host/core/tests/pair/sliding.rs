//! The layers of a model that slide: their KV, where it lies, and what is drawn from it.

use host_core::pool::PoolLimits;
use host_core::window::WindowShape;
use host_core::{Batch, Sequence};

use super::memory::{LAYERS, Memory, PAGE_TOKENS, layer_value};

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

    pub fn shape(self) -> WindowShape {
        WindowShape { tokens: self.window as u32, parts: self.layers.div_ceil(LAYERS) }
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
    fn seen(self, position: usize) -> std::ops::RangeInclusive<usize> {
        (position + 1).saturating_sub(self.window)..=position
    }

    /// KV of a position in the n-th of these layers.
    fn value(first: u64, layer: u32) -> u64 {
        layer_value(first, SLIDES + layer)
    }

    /// What the last of some positions sees, given their KV in the first layer.
    pub fn words_seen(self, firsts: &[u64]) -> impl Iterator<Item = u64> {
        let seen = self.seen(firsts.len() - 1);
        firsts[seen].iter().flat_map(move |first| (0..self.layers).map(|layer| Self::value(*first, layer)))
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
    /// sees.
    pub fn compute(self, memory: &mut Memory, batch: &Batch) {
        for sequence in &batch.sequences {
            let start = sequence.start as usize;
            for position in start..sequence.end() {
                let first = memory.first(sequence, position);
                for layer in 0..self.layers {
                    *memory.word(self.place(sequence, layer, position)) = Self::value(first, layer);
                }
                // What no layer uses is the same under one name, too.
                for layer in self.layers..self.shape().parts * LAYERS {
                    *memory.word(self.place(sequence, layer, position)) = 0;
                }
            }
            for seen in (start..sequence.end()).flat_map(|position| self.seen(position)) {
                let first = memory.first(sequence, seen);
                for layer in 0..self.layers {
                    let found = *memory.word(self.place(sequence, layer, seen));
                    assert_eq!(
                        found,
                        Self::value(first, layer),
                        "sliding layer {layer} of position {seen} is not what it was: {sequence:?}"
                    );
                }
            }
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
