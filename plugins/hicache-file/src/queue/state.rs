//! The state of the queue: what it knows of each batch, and which page comes next.

use std::collections::VecDeque;

use host_plugin_api::{Tag, TierCompletion, TierPage};

use super::batch::Kind;
use crate::memory::Regions;

/// A batch, or room for one.
pub struct Slot {
    pub kind: Kind,
    pub tag: Tag,
    pub pages: Vec<TierPage>,
    /// The first page that no thread has claimed.
    pub next: u32,
    /// Pages without a completion.
    pub unfinished: u32,
    /// Pages whose completion the host has not fetched.
    pub unpolled: u32,
    pub cancelled: bool,
}

/// Pages in one line: batches not fully claimed, and pages that were given back.
pub struct Line {
    pub batches: VecDeque<u32>,
    pub again: VecDeque<(u32, u32)>,
}

/// What the queue's lock guards.
pub struct State {
    pub slots: Box<[Slot]>,
    pub free: Vec<u32>,
    pub lines: [Line; 3],
    pub parked: VecDeque<(u32, u32)>,
    pub done: VecDeque<(u32, TierCompletion)>,
    pub regions: Regions,
    /// Counts gets since the last put was claimed, so that neither starves.
    pub gets: u32,
    pub closed: bool,
}

impl State {
    /// Makes room for `max_batches` batches of `max_pages` pages.
    pub fn new(max_batches: u32, max_pages: u32) -> Self {
        let (batches, pages) = (max_batches as usize, max_batches as usize * max_pages as usize);
        let slot = |_| Slot {
            kind: Kind::Exists,
            tag: Tag(0),
            pages: Vec::with_capacity(max_pages as usize),
            next: 0,
            unfinished: 0,
            unpolled: 0,
            cancelled: false,
        };
        let line =
            || Line { batches: VecDeque::with_capacity(batches), again: VecDeque::with_capacity(pages) };
        Self {
            slots: (0..max_batches).map(slot).collect(),
            free: (0..max_batches).rev().collect(),
            lines: [line(), line(), line()],
            parked: VecDeque::with_capacity(pages),
            done: VecDeque::with_capacity(pages),
            regions: Regions::default(),
            gets: 0,
            closed: false,
        }
    }

    /// Ends a page: its completion waits for the host.
    pub fn finish(&mut self, slot: u32, page: u32, status: i32, bytes: u64) {
        let of = &mut self.slots[slot as usize];
        of.unfinished -= 1;
        let tag = of.tag.0;
        self.done.push_back((slot, TierCompletion { tag: Tag(tag), page, status, bytes }));
    }

    /// The next page of a line, if its bytes fit or it is the first of a claim.
    pub fn next_page(&mut self, line: usize, first: bool, room: u64) -> Option<(u32, u32)> {
        let fits = |page: &TierPage| first || line == 0 || u64::from(page.length) <= room;
        if let Some((slot, page)) = self.lines[line].again.front().copied() {
            // Only the first line has several kinds, and its claims may mix them: each page has its own kind.
            return fits(&self.slots[slot as usize].pages[page as usize]).then(|| {
                self.lines[line].again.pop_front();
                (slot, page)
            });
        }
        let slot = *self.lines[line].batches.front()?;
        let of = &mut self.slots[slot as usize];
        let page = of.next;
        if !fits(&of.pages[page as usize]) {
            return None;
        }
        of.next += 1;
        if of.next as usize == of.pages.len() {
            self.lines[line].batches.pop_front();
        }
        Some((slot, page))
    }
}
