//! Batches on their way between the host's threads and the tier's thread: a fixed number of slots, allocated once.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use host_plugin_api::{Key, Tag, TierCompletion, TierPage};
use host_transfer_kit::locked;

/// What a batch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Exists,
    Get,
    Put,
    Delete,
}

#[derive(Clone, Copy)]
struct Slot {
    tag: Tag,
    work: Work,
    /// Pages not completed, and not polled. The slot is free when both are 0.
    left: u32,
    unpolled: u32,
    cancelled: bool,
}

struct State {
    slots: Box<[Slot]>,
    free: Vec<u32>,
    ready: VecDeque<u32>,
    done: VecDeque<(u32, TierCompletion)>,
    stopping: bool,
}

impl State {
    /// Takes the next batch. Questions come before work that moves bytes.
    fn take_ready(&mut self) -> Option<(u32, Work)> {
        let question = |index: &u32| self.slots[*index as usize].work == Work::Exists;
        let at = self.ready.iter().position(question).unwrap_or(0);
        let index = self.ready.remove(at)?;
        Some((index, self.slots[index as usize].work))
    }
}

/// The result of a wait that is bounded in time.
pub enum Next {
    Batch(u32, Work),
    Nothing,
    /// The thread should end.
    Stop,
}

/// The slots of batches. No lock is held for longer than a copy of a batch.
pub struct Queue {
    pages: Box<[Mutex<Vec<TierPage>>]>,
    state: Mutex<State>,
    news: Condvar,
}

impl Queue {
    pub fn new(batches: u32, pages: u32) -> Self {
        let slot = Slot { tag: Tag(0), work: Work::Exists, left: 0, unpolled: 0, cancelled: false };
        let many = batches as usize;
        Self {
            pages: (0..batches).map(|_| Mutex::new(Vec::with_capacity(pages as usize))).collect(),
            state: Mutex::new(State {
                slots: vec![slot; many].into(),
                free: (0..batches).rev().collect(),
                ready: VecDeque::with_capacity(many),
                done: VecDeque::with_capacity(many * pages as usize),
                stopping: false,
            }),
            news: Condvar::new(),
        }
    }

    /// Accepts a batch. False when all slots are taken.
    pub fn push(&self, tag: Tag, work: Work, pages: impl ExactSizeIterator<Item = TierPage>) -> bool {
        let count = pages.len() as u32;
        let mut state = locked(&self.state);
        let Some(index) = state.free.pop() else { return false };
        state.slots[index as usize] = Slot { tag, work, left: count, unpolled: count, cancelled: false };
        drop(state);
        let mut to = locked(&self.pages[index as usize]);
        to.clear();
        to.extend(pages);
        drop(to);
        locked(&self.state).ready.push_back(index);
        self.news.notify_one();
        true
    }

    /// For the tier's thread: waits for the next batch. Questions come before work that moves bytes. `None` when the
    /// thread should end.
    pub fn next(&self) -> Option<(u32, Work)> {
        let mut state = locked(&self.state);
        loop {
            if state.stopping {
                return None;
            }
            if let Some(taken) = state.take_ready() {
                return Some(taken);
            }
            state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// As [`next`](Self::next), but waits no longer than this.
    pub fn next_within(&self, wait: Duration) -> Next {
        let state = locked(&self.state);
        let nothing = |state: &mut State| state.ready.is_empty() && !state.stopping;
        let (mut state, _late) =
            self.news.wait_timeout_while(state, wait, nothing).unwrap_or_else(PoisonError::into_inner);
        if state.stopping {
            return Next::Stop;
        }
        state.take_ready().map_or(Next::Nothing, |(index, work)| Next::Batch(index, work))
    }

    /// Takes a question that came in while other work goes on.
    pub fn next_question(&self) -> Option<u32> {
        let mut state = locked(&self.state);
        let question = |index: &u32| state.slots[*index as usize].work == Work::Exists;
        let at = state.ready.iter().position(question)?;
        state.ready.remove(at)
    }

    /// For the tier's thread: a batch's pages.
    pub fn pages(&self, index: u32) -> MutexGuard<'_, Vec<TierPage>> {
        locked(&self.pages[index as usize])
    }

    pub fn is_cancelled(&self, index: u32) -> bool {
        let state = locked(&self.state);
        state.slots[index as usize].cancelled || state.stopping
    }

    /// For the tier's thread: ends a page.
    pub fn finish(&self, index: u32, page: u32, (status, bytes): (i32, u64)) {
        let mut state = locked(&self.state);
        let slot = &mut state.slots[index as usize];
        slot.left -= 1;
        let completion = TierCompletion { tag: slot.tag, page, status, bytes };
        state.done.push_back((index, completion));
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

    /// Marks batches of this tag as cancelled. False when nothing of this tag is in flight.
    pub fn cancel(&self, tag: Tag) -> bool {
        let mut state = locked(&self.state);
        let mut any = false;
        for slot in state.slots.iter_mut().filter(|slot| slot.left > 0 && slot.tag == tag) {
            (slot.cancelled, any) = (true, true);
        }
        any
    }

    pub fn is_settled(&self, tag: Tag) -> bool {
        !locked(&self.state).slots.iter().any(|slot| slot.left > 0 && slot.tag == tag)
    }

    pub fn stop(&self) {
        locked(&self.state).stopping = true;
        self.news.notify_all();
    }
}

/// A page that only has a key.
pub fn named(key: &Key) -> TierPage {
    TierPage { key: *key, ..TierPage::default() }
}
