//! Prompts as lists of blocks. Equal blocks tell what prompts have in common.

use std::collections::BTreeMap;

use host_core::routing::BlockKey;

use crate::router::{chain_seed, names};

/// A prompt. Blocks are equal text if they and all blocks before them are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The number of each block. Equal numbers stand for equal text up to the end of the block.
    pub blocks: Vec<u64>,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Tokens in all. The last block may be cut short.
    pub tokens: u32,
}

impl Prompt {
    /// Its tokens. Each block has token ids of its own.
    #[must_use]
    pub fn text(&self) -> Vec<u32> {
        let tokens = self.blocks.iter().flat_map(|block| {
            // Traces have so few blocks that ids stay below the vocabulary. A generator's ids may wrap, and then equal
            // those of another block.
            let first = (*block as u32).wrapping_mul(self.block_tokens);
            (0..self.block_tokens).map(move |token| first.wrapping_add(token) % crate::cluster::VOCABULARY)
        });
        tokens.take(self.tokens as usize).collect()
    }
}

/// Names the pages of prompts for the router, as it would by hashing their tokens.
///
/// Pages of a block that was seen before are looked up: its number stands for everything before it, too.
#[derive(Debug)]
pub(super) struct Namer {
    page_tokens: u32,
    looks: bool,
    seen: BTreeMap<u64, (u64, Vec<BlockKey>)>,
}

impl Namer {
    pub(super) fn new(page_tokens: u32, looks: bool) -> Self {
        Self { page_tokens, looks, seen: BTreeMap::new() }
    }

    /// The keys of the whole pages of a text, or none if the router needs no keys.
    pub(super) fn keys_of(&self, text: &[u32]) -> Vec<BlockKey> {
        match self.looks {
            true => names::chain(chain_seed(), text, self.page_tokens as usize),
            false => Vec::new(),
        }
    }

    /// The keys of the whole pages of a prompt, or none if the router needs no keys.
    pub(super) fn keys(&mut self, prompt: &Prompt) -> Vec<BlockKey> {
        if !self.looks {
            return Vec::new();
        }
        if !prompt.block_tokens.is_multiple_of(self.page_tokens) {
            return self.keys_of(&prompt.text());
        }
        let mut keys = Vec::with_capacity((prompt.tokens / self.page_tokens) as usize);
        let mut name = chain_seed();
        let whole = (prompt.tokens / prompt.block_tokens) as usize;
        for (place, block) in prompt.blocks.iter().enumerate() {
            let text = |tokens: u32| {
                let only = Prompt { blocks: vec![*block], block_tokens: prompt.block_tokens, tokens };
                only.text()
            };
            if place >= whole {
                let rest = text(prompt.tokens % prompt.block_tokens);
                keys.extend(names::chain(name, &rest, self.page_tokens as usize));
                break;
            }
            let (last, named) = self.seen.entry(*block).or_insert_with(|| {
                let mut last = name;
                let pages = text(prompt.block_tokens);
                let named = pages.chunks_exact(self.page_tokens as usize).map(|page| {
                    last = names::next(last, page);
                    BlockKey(last)
                });
                let named = named.collect();
                (last, named)
            });
            keys.extend_from_slice(named);
            name = *last;
        }
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(blocks: &[u64], block_tokens: u32, tokens: u32) -> Prompt {
        Prompt { blocks: blocks.to_vec(), block_tokens, tokens }
    }

    #[test]
    fn names_of_blocks_are_those_of_their_tokens() {
        for (page_tokens, block_tokens) in [(16, 512), (64, 512), (48, 512)] {
            let mut namer = Namer::new(page_tokens, true);
            for (blocks, tokens) in [(&[1, 2, 3][..], 1536), (&[1, 2, 9], 1100), (&[1, 2, 3, 4], 2000)] {
                let prompt = prompt(blocks, block_tokens, tokens);
                let hashed = names::chain(chain_seed(), &prompt.text(), page_tokens as usize);
                assert_eq!(namer.keys(&prompt), hashed, "{prompt:?} in pages of {page_tokens}");
            }
        }
    }

    #[test]
    fn prompts_agree_up_to_the_block_in_which_they_differ() {
        let (one, other) = (prompt(&[5, 6, 7], 100, 250).text(), prompt(&[5, 6, 8], 100, 250).text());
        assert_eq!((one.len(), &one[..200]), (250, &other[..200]));
        assert!(one[200..].iter().zip(&other[200..]).all(|(one, other)| one != other));
    }
}
