//! KV that proves itself, in words: one for each token and layer of a page.

use std::ops::Range;

use host_core::{Batch, PageId, Sampled, SequenceOutput};

use super::sliding::Sliding;

pub const PAGE_TOKENS: usize = 4;
pub const LAYERS: u32 = 5;
pub const VOCABULARY: u32 = 50;

/// Words of one page.
const PAGE: usize = PAGE_TOKENS * LAYERS as usize;

pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a ^ b.rotate_left(32).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// KV of a position in the first layer: everything up to it in one word.
fn first_layer(before: u64, token: u32) -> u64 {
    mix(before, u64::from(token) + 1)
}

/// KV of a position in another layer.
pub fn layer_value(first: u64, layer: u32) -> u64 {
    if layer == 0 { first } else { mix(first, u64::from(layer)) }
}

fn drawn(words: impl Iterator<Item = u64>) -> u32 {
    (words.fold(7, mix) % u64::from(VOCABULARY)) as u32
}

/// The right answer, computed without pages, batches or workers.
pub fn answer_to(prompt: &[u32], count: usize, sliding: Option<Sliding>) -> Vec<u32> {
    let mut firsts = Vec::new();
    let mut sliding_words = Vec::new();
    let mut answer = Vec::new();
    let mut tokens = prompt.to_vec();
    let mut next = 0;
    while answer.len() < count {
        for token in &tokens[next..] {
            let first = first_layer(firsts.last().copied().unwrap_or(0), *token);
            sliding.iter().for_each(|sliding| sliding.add(&mut sliding_words, first));
            firsts.push(first);
        }
        next = tokens.len();
        let words = firsts.iter().flat_map(|first| (0..LAYERS).map(|layer| layer_value(*first, layer)));
        let seen = sliding.map(|sliding| sliding.words_seen(&sliding_words));
        let token = drawn(words.chain(seen.into_iter().flatten()));
        answer.push(token);
        tokens.push(token);
    }
    answer
}

/// The pages of one worker.
pub struct Memory {
    words: Vec<u64>,
    sliding: Option<Sliding>,
}

impl Memory {
    pub fn new(pages: u32, sliding: Option<Sliding>) -> Self {
        Self { words: vec![0; pages as usize * PAGE], sliding }
    }

    /// KV of a position in the first layer.
    pub fn first(&self, sequence: &host_core::Sequence, position: usize) -> u64 {
        self.words[Self::place(&sequence.pages, 0, position)]
    }

    /// The word at a place that [`at`](Self::at) gave.
    pub fn word(&mut self, place: usize) -> &mut u64 {
        &mut self.words[place]
    }

    /// The same, to read.
    pub fn word_at(&self, place: usize) -> u64 {
        self.words[place]
    }

    pub fn at(page: PageId, layer: u32, slot: usize) -> usize {
        page.0 as usize * PAGE + layer as usize * PAGE_TOKENS + slot
    }

    fn place(pages: &[PageId], layer: u32, position: usize) -> usize {
        Self::at(pages[position / PAGE_TOKENS], layer, position % PAGE_TOKENS)
    }

    /// A digest of some layers of pages, from the place of the first on, that can be added up in any order.
    pub fn sum(&self, pages: &[PageId], first_page: u32, layers: Range<u32>) -> u64 {
        let blocks = (first_page..)
            .zip(pages)
            .flat_map(|(place, page)| layers.clone().map(move |layer| (place, *page, layer)));
        blocks.fold(0, |sum: u64, (place, page, layer)| {
            let block = self.words(page, layer, layer + 1).iter().fold(1, |digest, word| mix(digest, *word));
            sum.wrapping_add(mix(mix(u64::from(place) + 1, u64::from(layer) + 1), block))
        })
    }

    /// The words of some layers of a page.
    pub fn words(&self, page: PageId, first: u32, end: u32) -> &[u64] {
        &self.words[Self::at(page, first, 0)..Self::at(page, end, 0)]
    }

    /// Puts words where [`words`](Self::words) finds them.
    pub fn put(&mut self, page: PageId, first: u32, words: &[u64]) {
        let at = Self::at(page, first, 0);
        self.words[at..at + words.len()].copy_from_slice(words);
    }

    /// Flips one bit of the first token's KV in a layer.
    pub fn flip(&mut self, page: PageId, layer: u32, bit: u64) {
        self.words[Self::at(page, layer, 0)] ^= 1 << bit;
    }

    /// Computes layers `from..to` of a batch.
    pub fn compute(&mut self, batch: &Batch, from: u32, to: u32) {
        for (layer, sequence) in (from..to).flat_map(|layer| batch.sequences.iter().map(move |s| (layer, s)))
        {
            let start = sequence.start as usize;
            for (position, token) in (start..).zip(&sequence.tokens) {
                let first = |position| self.words[Self::place(&sequence.pages, 0, position)];
                let word = match layer {
                    0 => first_layer(position.checked_sub(1).map_or(0, first), *token),
                    _ => layer_value(first(position), layer),
                };
                let place = &mut self.words[Self::place(&sequence.pages, layer, position)];
                if position < sequence.recompute.end as usize {
                    assert_eq!(
                        *place, word,
                        "what is cached of position {position} is not what it was: {sequence:?}"
                    );
                    continue;
                }
                *place = word;
            }
        }
        if let Some(sliding) = self.sliding.filter(|_| from == 0 && to == LAYERS) {
            sliding.compute(self, batch);
        }
    }

    /// What the sequences of a computed batch draw, from everything that their pages hold.
    pub fn outputs(&self, batch: &Batch) -> Vec<SequenceOutput> {
        let draw = |sequence: &host_core::Sequence| {
            let words = (0..sequence.end()).flat_map(|position| {
                (0..LAYERS).map(move |layer| self.words[Self::place(&sequence.pages, layer, position)])
            });
            let seen = self.sliding.map(|sliding| sliding.words_read(self, sequence));
            let words = words.chain(seen.into_iter().flatten());
            let sampled =
                sequence.sample.map(|_| Sampled { token: drawn(words), logprob: None, top: Vec::new() });
            SequenceOutput { room: sequence.room, sampled }
        };
        batch.sequences.iter().map(draw).collect()
    }
}
