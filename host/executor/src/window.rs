//! Where the KV of a sequence lies when some of a model's layers slide.
//!
//! The layout is that of [`host_core::window`]: a page of the pool has the layers that see all positions. The sliding layers of a
//! token page lie in pages of the same pool that the sequence names separately and for its newest positions only.

use host_core::layout::KvShape;
use host_core::window::{WindowShape, first_live};
use host_core::{PageId, Sequence};

use super::KvMemory;

/// Where one layer lies in the pages of a token page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerPlace {
    /// In the page of the full part.
    Full {
        /// The layer within the page.
        layer: usize,
    },
    /// In the window part.
    Sliding {
        /// The page within the window part.
        part: usize,
        /// The layer within that page.
        layer: usize,
    },
}

impl LayerPlace {
    /// The places of a model's layers. `slides` says for each layer whether it slides.
    pub fn of(slides: &[bool]) -> Vec<LayerPlace> {
        let full = slides.iter().filter(|slides| !**slides).count();
        let (mut next_full, mut next_sliding) = (0, 0);
        let mut place = |slides: &bool| {
            if *slides {
                next_sliding += 1;
                LayerPlace::sliding(next_sliding - 1, full)
            } else {
                next_full += 1;
                LayerPlace::Full { layer: next_full - 1 }
            }
        };
        slides.iter().map(&mut place).collect()
    }

    /// The place of the sliding layer of this number, beside `full` layers that do not slide.
    #[must_use]
    pub const fn sliding(number: usize, full: usize) -> Self {
        LayerPlace::Sliding { part: number / full, layer: number % full }
    }
}

/// The pages in which one layer of a sequence lies.
#[derive(Clone, Copy, Debug)]
pub struct LayerPages<'a> {
    ids: &'a [PageId],
    /// The token page of the first id.
    first: usize,
    /// Number of ids of one token page. `part` is the index of this layer's id among them.
    parts: usize,
    part: usize,
    /// The layer of each of these pages.
    pub layer: usize,
}

impl<'a> LayerPages<'a> {
    /// The pages of the layer at `place`. The window part of a token page has `parts` pages.
    #[must_use]
    pub fn new(sequence: &'a Sequence, place: LayerPlace, parts: usize) -> Self {
        match place {
            LayerPlace::Full { layer } => Self { ids: &sequence.pages, first: 0, parts: 1, part: 0, layer },
            LayerPlace::Sliding { part, layer } => {
                let window = &sequence.window;
                Self { ids: &window.pages, first: window.first as usize, parts, part, layer }
            }
        }
    }

    /// The page of a token page.
    ///
    /// # Panics
    /// When the sequence does not name the page. [`check`] rules that out for all positions that the sequence's new positions see.
    #[must_use]
    #[inline]
    pub fn page(&self, token_page: usize) -> PageId {
        self.ids[(token_page - self.first) * self.parts + self.part]
    }
}

/// Whether the KV of a position is written in a layer. A layer that sees all positions does not write a position that is
/// computed again for sliding layers alone, because the sequence's pages already have that KV.
#[must_use]
#[inline]
pub fn writes(sequence: &Sequence, place: LayerPlace, position: usize) -> bool {
    matches!(place, LayerPlace::Sliding { .. }) || position >= sequence.recompute.end as usize
}

/// The first position that can be seen in a layer, before its window is applied.
#[must_use]
pub fn first_seen(sequence: &Sequence, place: LayerPlace) -> usize {
    match place {
        LayerPlace::Full { .. } => 0,
        LayerPlace::Sliding { .. } => sequence.recompute.start as usize,
    }
}

/// Clears the unused layers of the window parts at a sequence's new positions: the rest of a part's last page, if the
/// `layers` sliding layers do not fill it. So the bytes under a page name are the same on every worker that computes them, and
/// none of them belongs to another request.
pub fn empty_unused(kv: &mut KvMemory, sequence: &Sequence, window: WindowShape, layers: usize) {
    let shape = kv.layout().shape;
    let (parts, used) = (window.parts as usize, layers % shape.layers);
    if used == 0 {
        return;
    }
    let last = LayerPages::new(sequence, LayerPlace::Sliding { part: parts - 1, layer: used }, parts);
    for position in sequence.start as usize..sequence.end() {
        let (page, slot) = (last.page(position / shape.page_tokens), position % shape.page_tokens);
        for (layer, head) in
            (used..shape.layers).flat_map(|layer| (0..shape.heads).map(move |head| (layer, head)))
        {
            (0..2).for_each(|side| kv.write_row(page, head, layer, side, slot).fill(0));
        }
    }
}

/// Checks that a sequence has tokens to compute, with ids below `vocabulary`, at positions below `max_positions`.
///
/// # Errors
/// A text that says what is wrong.
pub fn check_tokens(sequence: &Sequence, max_positions: usize, vocabulary: usize) -> Result<(), String> {
    let end = sequence.end();
    if sequence.tokens.len() <= sequence.drafted as usize {
        return Err("no tokens to compute".to_owned());
    }
    if end > max_positions {
        return Err(format!("{end} positions, the model has {max_positions}"));
    }
    match sequence.tokens.iter().find(|token| **token as usize >= vocabulary) {
        Some(token) => Err(format!("token {token} of a vocabulary of {vocabulary}")),
        None => Ok(()),
    }
}

/// Checks that a sequence names every page of the pool `shape` that its new positions write or see. `window` is that of the
/// model's sliding layers.
///
/// # Errors
/// A text that says what is missing.
pub fn check(sequence: &Sequence, shape: &KvShape, window: Option<WindowShape>) -> Result<(), String> {
    let (start, end) = (sequence.start as usize, sequence.end());
    let wanted = shape.pages_for(end);
    if sequence.pages.len() < wanted {
        let (pages, page_tokens) = (sequence.pages.len(), shape.page_tokens);
        return Err(format!("{pages} pages of {page_tokens} tokens for {end} positions"));
    }
    let recompute = &sequence.recompute;
    if !recompute.is_empty()
        && (window.is_none() || !(recompute.start..recompute.end).contains(&sequence.start))
    {
        let why = if window.is_none() { "no layer slides" } else { "the batch begins elsewhere" };
        return Err(format!("{recompute:?} are to be computed again, positions {start} to {end} now: {why}"));
    }
    if let Some(window) = window {
        let parts = window.parts as usize;
        let first = sequence.window.first as usize;
        let live = first_live(start, window.tokens as usize, shape.page_tokens)
            .max(recompute.start as usize / shape.page_tokens);
        let named = first..first + sequence.window.pages.len() / parts;
        if !sequence.window.pages.len().is_multiple_of(parts) || named.start > live || named.end < wanted {
            return Err(format!(
                "{} window pages, {parts} for each token page from {first} on; the positions {start} to {} see token pages \
                 {live} to {} in a window of {} tokens",
                sequence.window.pages.len(),
                end.saturating_sub(1),
                wanted.saturating_sub(1),
                window.tokens
            ));
        }
    }
    let mut pages = sequence.pages.iter().chain(&sequence.window.pages);
    match pages.find(|page| page.0 as usize >= shape.pages) {
        Some(page) => Err(format!("page {} of a pool of {}", page.0, shape.pages)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_has_a_place_of_its_own_and_parts_are_no_more_than_needed() {
        for (full, sliding) in (1..6usize).flat_map(|full| (0..20usize).map(move |sliding| (full, sliding))) {
            let slides: Vec<bool> = (0..full + sliding).map(|layer| layer < sliding).collect();
            let places = LayerPlace::of(&slides);
            let mut seen = std::collections::BTreeSet::new();
            let parts = sliding.div_ceil(full);
            for (place, slides) in places.iter().zip(&slides) {
                let (part, layer) = match *place {
                    LayerPlace::Full { layer } => (None, layer),
                    LayerPlace::Sliding { part, layer } => (Some(part), layer),
                };
                assert_eq!(part.is_some(), *slides);
                assert!(layer < full && part.is_none_or(|part| part < parts) && seen.insert((part, layer)));
            }
            assert!(parts == 0 || seen.contains(&(Some(parts - 1), 0)));
        }
    }
}
