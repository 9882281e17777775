//! Names of pages for the router. A live router hashes with SHA-256, whose cost is not simulated. Here a name is a quick
//! 64-bit hash over the name before it and the page's tokens.

use host_core::radix::{After, CacheEvent, PageHash};
use host_core::routing::{BlockKey, KvEvent};

/// An odd number without a pattern: the fraction of the golden ratio.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// The name of a page, from the name of the page before it and its own tokens.
pub(crate) fn next(before: u64, tokens: &[u32]) -> u64 {
    // Four lanes, so that multiplications need not wait for each other.
    let mut lanes = [before, before.rotate_left(17), before.rotate_left(31), before.rotate_left(47)];
    for eight in tokens.chunks(8) {
        for (lane, two) in lanes.iter_mut().zip(eight.chunks(2)) {
            let word = two.iter().fold(two.len() as u64, |word, token| (word << 32) ^ u64::from(*token));
            *lane = (*lane ^ word).wrapping_mul(FACTOR).rotate_left(29);
        }
    }
    lanes.into_iter().fold(tokens.len() as u64, host_sim::mix)
}

/// The name from which the names of a namespace begin.
pub(crate) fn seed(namespace: &PageHash) -> u64 {
    BlockKey::of(namespace).0
}

/// The names of a text's whole pages behind the page of this name.
pub(crate) fn chain(before: u64, tokens: &[u32], page_tokens: usize) -> Vec<BlockKey> {
    let mut name = before;
    let pages = tokens.chunks_exact(page_tokens.max(1));
    pages
        .map(|page| {
            name = next(name, page);
            BlockKey(name)
        })
        .collect()
}

/// The names of a worker's cached pages.
#[derive(Debug)]
pub(super) struct Names {
    page_tokens: usize,
    names: Vec<Option<u64>>,
}

impl Names {
    pub(super) fn new(pages: u32, page_tokens: u32) -> Self {
        Self { page_tokens: page_tokens as usize, names: vec![None; pages as usize] }
    }

    /// The event by which a router is told of a change of the cache. `None` if the change refers to an unknown page.
    pub(super) fn told(&mut self, change: &CacheEvent) -> Option<KvEvent> {
        match change {
            CacheEvent::Stored { after, pages, tokens } => {
                let mut name = match after {
                    After::Nothing(namespace) => seed(namespace),
                    After::Page(page) => self.names.get(page.0 as usize).copied().flatten()?,
                };
                let mut keys = Vec::with_capacity(pages.len());
                for (page, tokens) in pages.iter().zip(tokens.chunks_exact(self.page_tokens)) {
                    name = next(name, tokens);
                    *self.names.get_mut(page.0 as usize)? = Some(name);
                    keys.push(BlockKey(name));
                }
                Some(KvEvent::Stored(keys))
            }
            CacheEvent::Removed(pages) => {
                let named = pages.iter().filter_map(|page| self.names.get_mut(page.0 as usize)?.take());
                Some(KvEvent::Removed(named.map(BlockKey).collect()))
            }
            CacheEvent::Cleared => {
                self.names.fill(None);
                Some(KvEvent::Cleared)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use host_core::PageId;

    use super::*;

    #[test]
    fn each_token_each_place_and_what_came_before_change_a_name() {
        let page: Vec<u32> = (0..64).collect();
        let mut names = BTreeSet::from([next(1, &page), next(2, &page), next(1, &page[..63])]);
        for place in 0..64 {
            let mut other = page.clone();
            other[place] ^= 1;
            names.insert(next(1, &other));
            if place > 0 {
                other = page.clone();
                other.swap(place, place - 1);
                names.insert(next(1, &other));
            }
        }
        assert_eq!(names.len(), 3 + 64 + 63);
    }

    #[test]
    fn a_cache_tells_the_names_of_its_prompts() {
        let namespace = PageHash([7; 32]);
        let tokens: Vec<u32> = (0..12).collect();
        let mut names = Names::new(8, 4);
        let stored = |after, pages: &[u32], tokens: &[u32]| CacheEvent::Stored {
            after,
            pages: pages.iter().map(|page| PageId(*page)).collect(),
            tokens: tokens.to_vec(),
        };
        let first = names.told(&stored(After::Nothing(namespace), &[5, 2], &tokens[..8]));
        let second = names.told(&stored(After::Page(PageId(2)), &[0], &tokens[8..]));
        let keys = chain(seed(&namespace), &tokens, 4);
        assert_eq!(first, Some(KvEvent::Stored(keys[..2].to_vec())));
        assert_eq!(second, Some(KvEvent::Stored(keys[2..].to_vec())));
        let removed = names.told(&CacheEvent::Removed(vec![PageId(0), PageId(7)]));
        assert_eq!(removed, Some(KvEvent::Removed(vec![keys[2]])));
        assert_eq!(names.told(&stored(After::Page(PageId(0)), &[1], &tokens[..4])), None);
    }
}
