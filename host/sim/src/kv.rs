//! KV from which a simulation can tell that it is wrong.
//!
//! The KV of a token in a layer is one word that depends on all tokens before it. A page that is stale, foreign or
//! damaged has wrong words, which show when a worker computes on top of them or draws a token from them. The right
//! answer to a prompt follows [without pages, batches or workers](Kv::answer_to).
//!
//! A world of thousands of workers keeps [no words](Kv::blank): its pages take no memory, and its tokens depend on room
//! and position alone.

mod sliding;

use std::ops::Range;

use host_core::{Batch, PageId, Sequence, SequenceOutput};

use crate::fixture::outputs;
use crate::random::mix;
pub use sliding::Sliding;

/// The shape of the model's KV, the same on all workers of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kv {
    /// Tokens in a page.
    pub page_tokens: usize,
    /// Layers of a page.
    pub layers: u32,
    /// The number of token ids. Ids are below it.
    pub vocabulary: u32,
    /// The sliding layers, if any.
    pub sliding: Option<Sliding>,
    /// Whether pages have contents.
    pub words: bool,
}

/// KV of a position in the first layer: one word that depends on all tokens up to it.
fn first_layer(before: u64, token: u32) -> u64 {
    mix(before, u64::from(token) + 1)
}

/// KV of a position in any layer, from its KV in the first layer.
fn layer_value(first: u64, layer: u32) -> u64 {
    if layer == 0 { first } else { mix(first, u64::from(layer)) }
}

impl Kv {
    /// Pages without contents.
    #[must_use]
    pub fn blank(page_tokens: usize, vocabulary: u32) -> Self {
        Self { page_tokens, layers: 1, vocabulary, sliding: None, words: false }
    }

    fn drawn(&self, words: impl Iterator<Item = u64>) -> u32 {
        let word = words.fold(7, mix) % u64::from(self.vocabulary);
        // The word is below the vocabulary, which is a u32.
        word as u32
    }

    /// The right answer.
    #[must_use]
    pub fn answer_to(&self, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut firsts = Vec::new();
        let mut sliding_words = Vec::new();
        let mut answer = Vec::new();
        let mut tokens = prompt.to_vec();
        let mut next = 0;
        while answer.len() < count {
            for token in &tokens[next..] {
                let first = first_layer(firsts.last().copied().unwrap_or(0), *token);
                self.sliding.iter().for_each(|sliding| sliding.add(&mut sliding_words, first));
                firsts.push(first);
            }
            next = tokens.len();
            let words =
                firsts.iter().flat_map(|first| (0..self.layers).map(|layer| layer_value(*first, layer)));
            let seen = self.sliding.map(|sliding| sliding.words_seen(&sliding_words));
            let token = self.drawn(words.chain(seen.into_iter().flatten()));
            answer.push(token);
            tokens.push(token);
        }
        answer
    }
}

/// The pages of one worker's pool, or the slots of its host memory.
#[derive(Debug)]
pub struct Memory {
    kv: Kv,
    words: Vec<u64>,
}

impl Memory {
    /// Memory of this many pages, all zero.
    #[must_use]
    pub fn new(kv: Kv, pages: u32) -> Self {
        let page = if kv.words { kv.page_tokens * kv.layers as usize } else { 0 };
        Self { kv, words: vec![0; pages as usize * page] }
    }

    /// Whether pages have contents.
    pub(crate) fn has_words(&self) -> bool {
        self.kv.words
    }

    fn at(&self, page: PageId, layer: u32, token: usize) -> usize {
        (page.0 as usize * self.kv.layers as usize + layer as usize) * self.kv.page_tokens + token
    }

    fn place(&self, pages: &[PageId], layer: u32, position: usize) -> usize {
        let tokens = self.kv.page_tokens;
        self.at(pages[position / tokens], layer, position % tokens)
    }

    /// KV of a position in the first layer.
    fn first(&self, sequence: &Sequence, position: usize) -> u64 {
        self.words[self.place(&sequence.pages, 0, position)]
    }

    /// A digest of some layers of pages, which begin at place `first_page`. Digests of parts can be added in any order.
    #[must_use]
    pub fn sum(&self, pages: &[PageId], first_page: u32, layers: Range<u32>) -> u64 {
        if !self.kv.words {
            return 0;
        }
        let blocks = (first_page..)
            .zip(pages)
            .flat_map(|(place, page)| layers.clone().map(move |layer| (place, *page, layer)));
        blocks.fold(0, |sum: u64, (place, page, layer)| {
            let block = self.words(page, layer..layer + 1).iter().fold(1, |digest, word| mix(digest, *word));
            sum.wrapping_add(mix(mix(u64::from(place) + 1, u64::from(layer) + 1), block))
        })
    }

    /// The words of some layers of a page, or none where pages have no contents.
    #[must_use]
    pub fn words(&self, page: PageId, layers: Range<u32>) -> &[u64] {
        match self.kv.words {
            true => &self.words[self.at(page, layers.start, 0)..self.at(page, layers.end, 0)],
            false => &[],
        }
    }

    /// The words of a page.
    #[must_use]
    pub fn page(&self, page: PageId) -> &[u64] {
        self.words(page, 0..self.kv.layers)
    }

    /// Writes words to where [`words`](Self::words) reads them, from a layer on.
    pub fn put(&mut self, page: PageId, first: u32, words: &[u64]) {
        let at = self.at(page, first, 0);
        if self.kv.words {
            self.words[at..at + words.len()].copy_from_slice(words);
        }
    }

    /// Flips one bit of the first token's KV in a layer, where pages have contents.
    pub fn flip(&mut self, page: PageId, layer: u32, bit: u64) {
        let at = self.at(page, layer, 0);
        if let Some(word) = self.words.get_mut(at) {
            *word ^= 1 << (bit % 64);
        }
    }

    /// Computes some layers of a batch.
    ///
    /// # Panics
    /// When a position that is computed for its window alone has other words in its page than it should.
    pub fn compute(&mut self, batch: &Batch, layers: Range<u32>) {
        if !self.kv.words {
            return;
        }
        let whole = layers == (0..self.kv.layers);
        for (layer, sequence) in layers.flat_map(|layer| batch.sequences.iter().map(move |s| (layer, s))) {
            for (position, token) in (sequence.start as usize..).zip(&sequence.tokens) {
                let word = match layer {
                    0 => {
                        let before = position.checked_sub(1).map_or(0, |before| self.first(sequence, before));
                        first_layer(before, *token)
                    }
                    _ => layer_value(self.first(sequence, position), layer),
                };
                let place = self.place(&sequence.pages, layer, position);
                if position < sequence.recompute.end as usize {
                    assert_eq!(
                        self.words[place], word,
                        "what is cached of position {position} is not what it was: {sequence:?}"
                    );
                    continue;
                }
                self.words[place] = word;
            }
        }
        if let Some(sliding) = self.kv.sliding.filter(|_| whole) {
            sliding.compute(self, batch);
        }
    }

    /// The draws of a computed batch's sequences, from all words that their pages hold.
    #[must_use]
    pub fn outputs(&self, batch: &Batch) -> Vec<SequenceOutput> {
        outputs(batch, |sequence| {
            if !self.kv.words {
                return self.kv.drawn([sequence.room.0, sequence.end() as u64].into_iter());
            }
            let words = (0..sequence.end()).flat_map(|position| {
                (0..self.kv.layers).map(move |layer| self.words[self.place(&sequence.pages, layer, position)])
            });
            let seen = self.kv.sliding.map(|sliding| sliding.words_read(self, sequence));
            self.kv.drawn(words.chain(seen.into_iter().flatten()))
        })
    }
}
