//! The KV that the synthetic executor writes for each position, and the digests of the KV that it reads.

mod state;

use std::ops::Range;

use host_core::Sequence;
use host_core::window::WindowShape;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::digest::{self, BlockPlace};
use crate::window::{LayerPages, LayerPlace};
use crate::{ExecutorError, KvMemory, ModelShape, window};

/// The layers of the pretended model. The layers that see all positions come first.
#[derive(Debug)]
pub(super) struct Content {
    places: Vec<LayerPlace>,
    window: Option<WindowShape>,
    /// Whether the layers that do not see all positions keep a state.
    keeps_state: bool,
}

impl Content {
    pub fn new(shape: &ModelShape) -> Self {
        let full = shape.page_layers();
        let slides: Vec<bool> = (0..shape.layers).map(|layer| layer >= full).collect();
        Self { places: LayerPlace::of(&slides), window: shape.window(), keeps_state: shape.state_layers > 0 }
    }

    /// Refuses a sequence that does not name the pages that it needs.
    pub fn check(&self, kv: &KvMemory, sequence: &Sequence) -> Result<(), ExecutorError> {
        window::check(sequence, &kv.layout().shape, self.window)
            .map_err(|why| ExecutorError::Failed(format!("room {}: {why}", sequence.room)))
    }

    /// A hash of the tokens up to each new position, from which the position's KV is derived.
    pub fn prefixes(&self, kv: &KvMemory, sequence: &Sequence) -> Vec<u64> {
        let (page_tokens, start) = (kv.layout().shape.page_tokens, sequence.start as usize);
        let mut prefix = start.checked_sub(1).map_or(0, |last| {
            let row = kv.read_row(sequence.pages[last / page_tokens], 0, 0, 0, last % page_tokens);
            row[..8].try_into().map_or(0, u64::from_le_bytes)
        });
        let next = |token: &u32| {
            prefix = xxh3_64_with_seed(&token.to_le_bytes(), prefix);
            prefix
        };
        sequence.tokens.iter().map(next).collect()
    }

    /// Writes the KV of a sequence's new positions in one layer.
    pub fn write(&self, kv: &mut KvMemory, sequence: &Sequence, prefixes: &[u64], layer: usize) {
        if self.has_state(layer) {
            return state::write(kv, sequence, &self.pages(sequence, layer), layer);
        }
        let (shape, heads) = (kv.layout().shape, kv.heads());
        let pages = self.pages(sequence, layer);
        for (position, prefix) in (sequence.start as usize..).zip(prefixes) {
            if !window::writes(sequence, self.places[layer], position) {
                continue;
            }
            let (page, slot) = (pages.page(position / shape.page_tokens), position % shape.page_tokens);
            for (index, side) in (0..shape.heads).flat_map(|head| [(head, 0), (head, 1)]) {
                let head = heads.start + index;
                let which = ((head as u64) << 32 | (layer as u64) << 1 | side as u64).to_le_bytes();
                let seed = xxh3_64_with_seed(&which, *prefix);
                let row = kv.write_row(page, index, pages.layer, side, slot);
                for (word, bytes) in row.chunks_exact_mut(8).enumerate() {
                    let value = seed.wrapping_mul(2 * word as u64 + 1).rotate_left(word as u32 % 61);
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
                // The prefix is in every head, so that any rank can go on from the KV that it holds.
                if (layer, side) == (0, 0) {
                    row[..8].copy_from_slice(&prefix.to_le_bytes());
                }
            }
        }
    }

    /// Adds the digest of a sequence's KV in one layer, per head. It covers the positions that the position before `end` sees.
    pub fn read(&self, kv: &KvMemory, sequence: &Sequence, end: usize, layer: usize, digests: &mut [u64]) {
        let page_tokens = kv.layout().shape.page_tokens;
        let pages = self.pages(sequence, layer);
        // A state fills its whole page, for any position behind which it is.
        let seen = match (self.has_state(layer), end.saturating_sub(1) / page_tokens) {
            (true, last) => last * page_tokens..(last + 1) * page_tokens,
            (false, _) => self.seen(sequence, end, layer),
        };
        for index in seen.start / page_tokens..seen.end.div_ceil(page_tokens) {
            let first = index * page_tokens;
            let tokens = seen.start.saturating_sub(first)..page_tokens.min(seen.end - first);
            for (head, digest) in kv.heads().zip(&mut *digests) {
                let rows = digest::rows(kv, pages.page(index), head, pages.layer, tokens.clone());
                *digest = digest::sum([*digest, digest::term(BlockPlace { page: index, layer, head }, rows)]);
            }
        }
    }

    /// Whether a layer keeps a state.
    fn has_state(&self, layer: usize) -> bool {
        self.keeps_state && matches!(self.places[layer], LayerPlace::Sliding { .. })
    }

    /// The positions that the position before `end` sees in a layer.
    fn seen(&self, sequence: &Sequence, end: usize, layer: usize) -> Range<usize> {
        let window = match (self.places[layer], self.window) {
            (LayerPlace::Sliding { .. }, Some(window)) => window.tokens as usize,
            _ => end,
        };
        end.saturating_sub(window).max(window::first_seen(sequence, self.places[layer]))..end
    }

    fn pages<'a>(&self, sequence: &'a Sequence, layer: usize) -> LayerPages<'a> {
        LayerPages::new(sequence, self.places[layer], self.window.map_or(1, |window| window.parts as usize))
    }
}
