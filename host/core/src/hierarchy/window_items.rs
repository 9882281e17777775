//! The items of a fetch that are pages of [window parts](super::windows).

use std::collections::BTreeSet;

use crate::radix::PageHash;
use crate::window::WindowShape;

/// The window parts of a fetch.
#[derive(Debug)]
pub(super) struct Windows {
    pub(super) shape: WindowShape,
    /// For each page that was in L1 when the request arrived: whether its window parts were there, too.
    pub(super) in_l1: Vec<bool>,
    /// For each token page the name of the first page of its window part.
    names: Vec<PageHash>,
    /// For each token page the first tier that has its window part, as far as tiers were asked.
    stored: Vec<Option<usize>>,
    /// Items that could not be had.
    pub(super) gone: BTreeSet<usize>,
}

impl Windows {
    pub(super) fn new(shape: WindowShape, in_l1: Vec<bool>, names: &[PageHash]) -> Self {
        Self {
            shape,
            in_l1,
            names: names.iter().map(|name| name.window_part(0)).collect(),
            stored: vec![None; names.len()],
            gone: BTreeSet::new(),
        }
    }

    pub(super) fn parts(&self) -> usize {
        self.shape.parts as usize
    }

    /// The name of an item behind the pages. `place` counts from there.
    pub(super) fn name(&self, pages: &[PageHash], place: usize) -> PageHash {
        let (page, part) = (place / self.parts(), place % self.parts());
        match u32::try_from(part) {
            Ok(0) => self.names[page],
            part => pages[page].window_part(part.unwrap_or(u32::MAX)),
        }
    }

    /// The entry for the first tier that has an item behind the pages.
    pub(super) fn stored(&mut self, place: usize) -> Option<&mut Option<usize>> {
        let page = place / self.parts();
        self.stored.get_mut(page)
    }

    pub(super) fn tier(&self, place: usize) -> Option<usize> {
        self.stored[place / self.parts()]
    }
}
