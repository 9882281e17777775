//! Batches on their way between the host's calls and the threads: a fixed number of slots, allocated once.

use std::collections::VecDeque;

use host_plugin_api::{ErrorCode, Tag, TierCompletion, TierPage};

use crate::store::Limits;

/// Reads after which a write that waits gets its turn.
const READS_IN_A_ROW: u32 = 4;

/// What a batch asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Exists,
    Get,
    Put,
    Delete,
}

impl Kind {
    fn writes(self) -> bool {
        matches!(self, Self::Put | Self::Delete)
    }

    /// Whether its pages have a place in memory.
    pub(crate) fn has_bytes(self) -> bool {
        matches!(self, Self::Get | Self::Put)
    }
}

#[derive(Clone, Copy, Debug)]
struct Batch {
    tag: Tag,
    kind: Kind,
    count: u32,
    /// The first page that has not begun.
    next: u32,
    /// Pages that have not ended.
    unfinished: u32,
    /// Pages whose completion the host has not fetched.
    unpolled: u32,
}

/// One page that a thread takes over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    slot: u32,
    number: u32,
    pub(crate) kind: Kind,
    pub(crate) page: TierPage,
}

/// The batches of an instance, from the host's calls to its `poll`.
///
/// The pages of a slot lie in `pages`, from its own number times `max_pages` on.
#[derive(Debug)]
pub(crate) struct Queue {
    max_pages: usize,
    writers: u32,
    pages: Box<[TierPage]>,
    batches: Box<[Batch]>,
    free: Vec<u32>,
    /// Slots with pages that have not begun.
    reads: VecDeque<u32>,
    writes: VecDeque<u32>,
    done: VecDeque<(u32, TierCompletion)>,
    writing: u32,
    reads_in_a_row: u32,
    /// Whether the host was woken since its last poll.
    is_told: bool,
}

impl Queue {
    /// Makes a queue with all memory that it will need.
    pub(crate) fn new(limits: &Limits) -> Self {
        let (slots, max_pages) = (limits.max_batches as usize, limits.max_pages as usize);
        let batch = Batch { tag: Tag(0), kind: Kind::Exists, count: 0, next: 0, unfinished: 0, unpolled: 0 };
        Self {
            max_pages,
            writers: limits.writers,
            pages: vec![TierPage::default(); slots * max_pages].into(),
            batches: vec![batch; slots].into(),
            free: (0..limits.max_batches).rev().collect(),
            reads: VecDeque::with_capacity(slots),
            writes: VecDeque::with_capacity(slots),
            done: VecDeque::with_capacity(slots * max_pages),
            writing: 0,
            reads_in_a_row: 0,
            is_told: false,
        }
    }

    /// **Hot.** Accepts a batch, or answers with the code that refuses it.
    pub(crate) fn submit(
        &mut self,
        kind: Kind,
        tag: Tag,
        pages: impl ExactSizeIterator<Item = TierPage>,
    ) -> i32 {
        let count = match u32::try_from(pages.len()) {
            Ok(count) if count > 0 && pages.len() <= self.max_pages => count,
            _ => return ErrorCode::INVALID_ARGUMENT.0,
        };
        let Some(slot) = self.free.pop() else { return ErrorCode::WOULD_BLOCK.0 };
        let room = &mut self.pages[slot as usize * self.max_pages..];
        for (to, page) in room.iter_mut().zip(pages) {
            *to = page;
        }
        self.batches[slot as usize] = Batch { tag, kind, count, next: 0, unfinished: count, unpolled: count };
        if kind.writes() {
            self.writes.push_back(slot)
        } else {
            self.reads.push_back(slot)
        }
        0
    }

    /// Takes the next page, if one may begin now. Reads go before writes, which get their turn.
    pub(crate) fn take(&mut self) -> Option<Job> {
        let may_write = !self.writes.is_empty() && self.writing < self.writers;
        let writes = may_write && (self.reads.is_empty() || self.reads_in_a_row >= READS_IN_A_ROW);
        let line = if writes { &mut self.writes } else { &mut self.reads };
        let slot = *line.front()?;
        let batch = &mut self.batches[slot as usize];
        let number = batch.next;
        batch.next += 1;
        if batch.next == batch.count {
            line.pop_front();
        }
        self.reads_in_a_row = if writes { 0 } else { self.reads_in_a_row.saturating_add(1) };
        self.writing += u32::from(writes);
        let page = self.pages[slot as usize * self.max_pages + number as usize];
        Some(Job { slot, number, kind: batch.kind, page })
    }

    /// Ends a page that was taken. Returns whether the host must be woken.
    pub(crate) fn finish(&mut self, job: &Job, status: i32, bytes: u64) -> bool {
        self.writing -= u32::from(job.kind.writes());
        self.complete(job.slot, job.number, status, bytes)
    }

    fn complete(&mut self, slot: u32, page: u32, status: i32, bytes: u64) -> bool {
        let batch = &mut self.batches[slot as usize];
        batch.unfinished -= 1;
        self.done.push_back((slot, TierCompletion { tag: batch.tag, page, status, bytes }));
        !std::mem::replace(&mut self.is_told, true)
    }

    /// **Hot.** Moves completions out. Frees the slots of batches that were polled to their end.
    pub(crate) fn poll(&mut self, completions: &mut [TierCompletion]) -> i32 {
        let count = completions.len().min(self.done.len());
        for (to, (slot, completion)) in completions.iter_mut().zip(self.done.drain(..count)) {
            *to = completion;
            let batch = &mut self.batches[slot as usize];
            batch.unpolled -= 1;
            if batch.unpolled == 0 {
                self.free.push(slot);
            }
        }
        self.is_told = false;
        i32::try_from(count).unwrap_or(i32::MAX)
    }

    /// Ends the pages of a tag that have not begun. `None` when the tag is not in flight, else whether the host must be woken.
    pub(crate) fn cancel(&mut self, tag: Tag) -> Option<bool> {
        let mut answer = None;
        for slot in 0..u32::try_from(self.batches.len()).unwrap_or(u32::MAX) {
            let batch = self.batches[slot as usize];
            if batch.tag != tag || batch.unfinished == 0 {
                continue;
            }
            let line = if batch.kind.writes() { &mut self.writes } else { &mut self.reads };
            line.retain(|other| *other != slot);
            self.batches[slot as usize].next = batch.count;
            let mut wakes = answer.unwrap_or(false);
            for page in batch.next..batch.count {
                wakes |= self.complete(slot, page, ErrorCode::CANCELLED.0, 0);
            }
            answer = Some(wakes);
        }
        answer
    }

    /// **Hot.** Whether no page of a tag is unfinished.
    pub(crate) fn is_settled(&self, tag: Tag) -> bool {
        !self.batches.iter().any(|batch| batch.tag == tag && batch.unfinished > 0)
    }
}
