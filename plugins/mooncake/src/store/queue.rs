//! Batches on their way between the host's threads and the tier's own: a fixed number of slots, allocated once, and a
//! line for each group.
//!
//! Calls into Mooncake may take any time, so nothing here waits for a call. Work that stands in a line for too long, or
//! before threads that all hang, ends without being started.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use host_plugin_api::{ErrorCode, Key, Tag, TierCompletion, TierPage};
use host_transfer_kit::locked;

/// What a batch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Exists,
    Delete,
    Get,
    Put,
}

/// The group that does it. Work that moves no bytes does not wait for work that does, and reads do not wait for writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    Ask,
    Read,
    Write,
}

pub const GROUPS: [Group; 3] = [Group::Ask, Group::Read, Group::Write];

impl Work {
    pub fn group(self) -> Group {
        match self {
            Work::Exists | Work::Delete => Group::Ask,
            Work::Get => Group::Read,
            Work::Put => Group::Write,
        }
    }
}

#[derive(Clone, Copy)]
struct Slot {
    tag: Tag,
    work: Work,
    /// Pages not completed, and not polled. The slot is free when both are 0.
    left: u32,
    unpolled: u32,
    cancelled: bool,
    accepted: Instant,
}

struct Line {
    ready: VecDeque<u32>,
    /// Since when each thread of the group is in a call.
    calls: Box<[Option<Instant>]>,
}

struct State {
    slots: Box<[Slot]>,
    free: Vec<u32>,
    lines: [Line; 3],
    done: VecDeque<(u32, TierCompletion)>,
    stopping: bool,
}

/// The slots of batches, and a line for each group. No lock is held for longer than a copy of a batch.
pub struct Queue {
    pages: Box<[Mutex<Vec<TierPage>>]>,
    state: Mutex<State>,
    news: [Condvar; 3],
}

impl Queue {
    /// A queue with `threads` threads in each group.
    pub fn new(batches: u32, pages: u32, threads: [usize; 3]) -> Self {
        let slot = Slot {
            tag: Tag(0),
            work: Work::Exists,
            left: 0,
            unpolled: 0,
            cancelled: false,
            accepted: Instant::now(),
        };
        let many = batches as usize;
        let line = |threads| Line { ready: VecDeque::with_capacity(many), calls: vec![None; threads].into() };
        Self {
            pages: (0..batches).map(|_| Mutex::new(Vec::with_capacity(pages as usize))).collect(),
            state: Mutex::new(State {
                slots: vec![slot; many].into(),
                free: (0..batches).rev().collect(),
                lines: threads.map(line),
                done: VecDeque::with_capacity(many * pages as usize),
                stopping: false,
            }),
            news: Default::default(),
        }
    }

    /// Accepts a batch. False when all slots are taken.
    pub fn push(&self, tag: Tag, work: Work, pages: impl ExactSizeIterator<Item = TierPage>) -> bool {
        let count = pages.len() as u32;
        let accepted = Instant::now();
        let mut state = locked(&self.state);
        let Some(index) = state.free.pop() else { return false };
        let slot = Slot { tag, work, left: count, unpolled: count, cancelled: false, accepted };
        state.slots[index as usize] = slot;
        drop(state);
        let mut to = locked(&self.pages[index as usize]);
        to.clear();
        to.extend(pages);
        drop(to);
        let group = work.group() as usize;
        locked(&self.state).lines[group].ready.push_back(index);
        self.news[group].notify_one();
        true
    }

    /// For a group's thread: waits for the next batch. `None` when the thread should end.
    pub fn next(&self, group: Group) -> Option<(u32, Work)> {
        let mut state = locked(&self.state);
        loop {
            if state.stopping {
                return None;
            }
            if let Some(index) = state.lines[group as usize].ready.pop_front() {
                return Some((index, state.slots[index as usize].work));
            }
            state = self.news[group as usize].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// For a group's thread: the pages of a batch that it took.
    pub fn pages(&self, index: u32) -> Vec<TierPage> {
        locked(&self.pages[index as usize]).clone()
    }

    /// Whether work of a batch that has not started should not start.
    pub fn is_cancelled(&self, index: u32) -> bool {
        let state = locked(&self.state);
        state.slots[index as usize].cancelled || state.stopping
    }

    /// For a group's thread: notes since when it is in a call, or that it came back from one.
    pub fn in_call(&self, group: Group, thread: usize, since: Option<Instant>) {
        locked(&self.state).lines[group as usize].calls[thread] = since;
    }

    /// Ends a page.
    pub fn finish(&self, index: u32, page: u32, (status, bytes): (i32, u64)) {
        locked(&self.state).finish(index, page, status, bytes);
    }

    /// Ends work that has stood in a line for `patience`, or that stands before threads that have all been in a call
    /// for that long. Returns how many pages that were, and whether the threads that ask hang.
    pub fn expire(&self, now: Instant, patience: Duration) -> (u32, bool) {
        let mut state = locked(&self.state);
        let (mut pages, mut asking) = (0, false);
        for group in GROUPS {
            let line = &state.lines[group as usize];
            let long = |since: Instant| now.saturating_duration_since(since) >= patience;
            let hangs = line.calls.iter().all(|call| call.is_some_and(long));
            asking |= hangs && group == Group::Ask;
            while let Some(index) = state.lines[group as usize].ready.front().copied() {
                if !hangs && !long(state.slots[index as usize].accepted) {
                    break;
                }
                state.lines[group as usize].ready.pop_front();
                pages += state.end_unstarted(index, ErrorCode::TIMEOUT.0);
            }
        }
        (pages, asking)
    }

    /// Moves completions out, and frees slots whose last completion was among them.
    pub fn take(&self, completions: &mut [TierCompletion]) -> usize {
        let mut state = locked(&self.state);
        let mut taken = 0;
        while taken < completions.len()
            && let Some((index, completion)) = state.done.pop_front()
        {
            completions[taken] = completion;
            taken += 1;
            let slot = &mut state.slots[index as usize];
            slot.unpolled -= 1;
            if slot.unpolled == 0 {
                state.free.push(index);
            }
        }
        taken
    }

    pub fn has_done(&self) -> bool {
        !locked(&self.state).done.is_empty()
    }

    /// Ends batches of this tag that have not begun, and marks the rest. False when nothing of this tag is in flight.
    pub fn cancel(&self, tag: Tag) -> bool {
        let mut state = locked(&self.state);
        let mut any = false;
        for index in 0..state.slots.len() {
            let slot = &mut state.slots[index];
            if slot.left == 0 || slot.tag != tag {
                continue;
            }
            (slot.cancelled, any) = (true, true);
            let group = slot.work.group() as usize;
            let at = state.lines[group].ready.iter().position(|ready| *ready as usize == index);
            if let Some(index) = at.and_then(|at| state.lines[group].ready.remove(at)) {
                state.end_unstarted(index, ErrorCode::CANCELLED.0);
            }
        }
        any
    }

    pub fn is_settled(&self, tag: Tag) -> bool {
        !locked(&self.state).slots.iter().any(|slot| slot.left > 0 && slot.tag == tag)
    }

    pub fn stop(&self) {
        locked(&self.state).stopping = true;
        self.news.iter().for_each(Condvar::notify_all);
    }
}

impl State {
    fn finish(&mut self, index: u32, page: u32, status: i32, bytes: u64) {
        let slot = &mut self.slots[index as usize];
        slot.left -= 1;
        self.done.push_back((index, TierCompletion { tag: slot.tag, page, status, bytes }));
    }

    fn end_unstarted(&mut self, index: u32, status: i32) -> u32 {
        let pages = self.slots[index as usize].left;
        (0..pages).for_each(|page| self.finish(index, page, status, 0));
        pages
    }
}

/// A page that only has a key.
pub fn named(key: &Key) -> TierPage {
    TierPage { key: *key, ..TierPage::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> Queue {
        Queue::new(4, 8, [1, 2, 1])
    }

    fn push(queue: &Queue, tag: u64, work: Work, pages: usize) {
        assert!(queue.push(Tag(tag), work, vec![TierPage::default(); pages].into_iter()));
    }

    fn ended(queue: &Queue) -> Vec<(u64, u32, i32)> {
        let mut done = [TierCompletion::default(); 32];
        let count = queue.take(&mut done);
        done[..count].iter().map(|end| (end.tag.0, end.page, end.status)).collect()
    }

    const PATIENCE: Duration = Duration::from_secs(5);
    const TIMEOUT: i32 = ErrorCode::TIMEOUT.0;

    #[test]
    fn what_waits_too_long_ends_and_what_came_later_waits_on() {
        let queue = queue();
        let before = Instant::now() + PATIENCE;
        push(&queue, 1, Work::Put, 2);
        assert_eq!(queue.expire(before - Duration::from_nanos(1), PATIENCE), (0, false));
        let later = Instant::now() + PATIENCE;
        // Waits, so that the next batch is accepted too late to expire at `later`.
        while Instant::now() + PATIENCE <= later {
            std::hint::spin_loop();
        }
        push(&queue, 2, Work::Get, 1);
        assert_eq!(queue.expire(later, PATIENCE), (2, false));
        assert_eq!(ended(&queue), [(1, 0, TIMEOUT), (1, 1, TIMEOUT)]);
        assert!(queue.is_settled(Tag(1)) && !queue.is_settled(Tag(2)));
        assert_eq!(queue.next(Group::Read).map(|(_, work)| work), Some(Work::Get));
    }

    #[test]
    fn nothing_waits_before_threads_that_all_hang() {
        let queue = queue();
        let now = Instant::now();
        queue.in_call(Group::Read, 0, Some(now));
        push(&queue, 1, Work::Get, 1);
        let soon = Instant::now();
        assert_eq!(
            queue.expire(soon, Duration::from_secs(0)).0,
            1,
            "one of two hangs, but patience is at its end"
        );
        push(&queue, 2, Work::Get, 1);
        queue.in_call(Group::Read, 1, now.checked_sub(PATIENCE));
        assert_eq!(queue.expire(soon, PATIENCE), (0, false), "the first has only begun");
        queue.in_call(Group::Read, 0, now.checked_sub(PATIENCE));
        assert_eq!(queue.expire(soon, PATIENCE), (1, false));
        queue.in_call(Group::Ask, 0, now.checked_sub(PATIENCE));
        assert_eq!(
            queue.expire(soon, PATIENCE),
            (0, true),
            "a call for a question hangs, also when none waits"
        );
    }

    #[test]
    fn a_cancelled_batch_ends_at_once_unless_it_has_begun() {
        let queue = queue();
        push(&queue, 1, Work::Get, 2);
        push(&queue, 2, Work::Get, 1);
        let (begun, _) = queue.next(Group::Read).unwrap();
        assert!(queue.cancel(Tag(2)) && queue.cancel(Tag(1)) && !queue.cancel(Tag(3)));
        assert_eq!(ended(&queue), [(2, 0, ErrorCode::CANCELLED.0)]);
        assert!(queue.is_cancelled(begun) && !queue.is_settled(Tag(1)));
        queue.finish(begun, 1, (1, 7));
        queue.finish(begun, 0, (ErrorCode::CANCELLED.0, 0));
        assert!(queue.is_settled(Tag(1)) && !queue.cancel(Tag(1)));
        assert_eq!(ended(&queue), [(1, 1, 1), (1, 0, ErrorCode::CANCELLED.0)]);
    }

    #[test]
    fn slots_come_back_when_all_of_a_batch_was_polled() {
        let queue = queue();
        (1..=4).for_each(|tag| push(&queue, tag, Work::Put, 1));
        assert!(!queue.push(Tag(5), Work::Put, vec![TierPage::default()].into_iter()));
        assert!(queue.cancel(Tag(3)));
        assert!(!queue.push(Tag(5), Work::Put, vec![TierPage::default()].into_iter()));
        assert_eq!(ended(&queue).len(), 1);
        push(&queue, 5, Work::Put, 1);
    }
}
