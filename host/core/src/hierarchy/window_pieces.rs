//! The pieces of a fetch that are pages of [window parts](super::windows).

use std::collections::BTreeSet;

use crate::radix::PageHash;
use crate::window::WindowShape;

/// What a fetch knows of window parts.
#[derive(Debug)]
pub(super) struct Windows {
    pub(super) shape: WindowShape,
    /// Of the pages that were in L1 when the request arrived: which had their parts there.
    pub(super) in_l1: Vec<bool>,
    /// Names of the first pages of all parts.
    names: Vec<PageHash>,
    /// The first tier that has each, as far as was asked.
    stored: Vec<Option<usize>>,
    /// Pieces that turned out not to be there.
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

    /// The name of a piece behind the pages.
    pub(super) fn name(&self, pages: &[PageHash], place: usize) -> PageHash {
        let (page, part) = (place / self.parts(), place % self.parts());
        match u32::try_from(part) {
            Ok(0) => self.names[page],
            part => pages[page].window_part(part.unwrap_or(u32::MAX)),
        }
    }

    /// Where the tier is kept that has a piece behind the pages.
    pub(super) fn stored(&mut self, place: usize) -> Option<&mut Option<usize>> {
        let page = place / self.parts();
        self.stored.get_mut(page)
    }

    pub(super) fn tier(&self, place: usize) -> Option<usize> {
        self.stored[place / self.parts()]
    }
}
