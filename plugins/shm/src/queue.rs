//! Submissions between the host's threads and the copy threads: a fixed number of slots, allocated once.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use host_plugin_api::{Completion, PeerId, Submission, Tag, Write};

use crate::outbound::Outbound;

/// How long a submission whose peer's ring is full waits before it is tried again.
const RETRY: Duration = Duration::from_micros(500);

/// Locks, also after a thread panicked: what our locks guard is consistent between statements.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One submission's content and progress. Owned by the submitting thread, then by one copy thread.
pub struct Body {
    pub submission: Submission,
    pub writes: Vec<Write>,
    pub peer: Option<Arc<Outbound>>,
    /// The write being copied, and how much of it is.
    pub next: usize,
    pub copied: u32,
    pub bytes: u64,
}

pub struct Slot {
    pub cancelled: AtomicBool,
    pub body: Mutex<Option<Body>>,
}

#[derive(Clone, Copy)]
struct Meta {
    tag: Tag,
    peer: PeerId,
    in_flight: bool,
}

struct State {
    meta: Box<[Meta]>,
    free: Vec<u32>,
    ready: VecDeque<u32>,
    parked: VecDeque<u32>,
    unparked: Instant,
    done: VecDeque<(u32, Completion)>,
    stopped: bool,
}

/// See the module. Its lock is held for a few instructions at a time, never across a copy or a system call.
pub struct Queue {
    slots: Box<[Slot]>,
    state: Mutex<State>,
    work: Condvar,
    finished: Condvar,
}

impl Queue {
    pub fn new(submissions: u32, writes: u32) -> Self {
        let nothing = Submission {
            peer: PeerId(0),
            notification_length: 0,
            tag: Tag(0),
            notification: [0; host_plugin_api::NOTIFICATION_BYTES],
        };
        let slot = |_| Slot {
            cancelled: AtomicBool::new(false),
            body: Mutex::new(Some(Body {
                submission: nothing,
                writes: Vec::with_capacity(writes as usize),
                peer: None,
                next: 0,
                copied: 0,
                bytes: 0,
            })),
        };
        let many = submissions as usize;
        let state = State {
            meta: vec![Meta { tag: Tag(0), peer: PeerId(0), in_flight: false }; many].into(),
            free: (0..submissions).rev().collect(),
            ready: VecDeque::with_capacity(many),
            parked: VecDeque::with_capacity(many),
            unparked: Instant::now(),
            done: VecDeque::with_capacity(many),
            stopped: false,
        };
        Self {
            slots: (0..submissions).map(slot).collect(),
            state: Mutex::new(state),
            work: Condvar::new(),
            finished: Condvar::new(),
        }
    }

    /// Takes a submission in; false when all slots are taken. `writes` are no more than the queue was made for.
    pub fn push(
        &self,
        submission: &Submission,
        peer: Arc<Outbound>,
        writes: impl Iterator<Item = Write>,
    ) -> bool {
        let Some(index) = locked(&self.state).free.pop() else { return false };
        let slot = &self.slots[index as usize];
        slot.cancelled.store(false, Ordering::Relaxed);
        if let Some(body) = locked(&slot.body).as_mut() {
            body.submission = *submission;
            body.writes.clear();
            body.writes.extend(writes);
            body.peer = Some(peer);
            (body.next, body.copied, body.bytes) = (0, 0, 0);
        }
        let mut state = locked(&self.state);
        state.meta[index as usize] = Meta { tag: submission.tag, peer: submission.peer, in_flight: true };
        state.ready.push_back(index);
        drop(state);
        self.work.notify_one();
        true
    }

    /// Copy thread: waits for a submission to work on; `None` when stopped.
    pub fn next(&self) -> Option<(u32, &Slot)> {
        let mut state = locked(&self.state);
        loop {
            if state.stopped {
                return None;
            }
            if !state.parked.is_empty() && state.unparked.elapsed() >= RETRY {
                let State { parked, ready, .. } = &mut *state;
                ready.append(parked);
                state.unparked = Instant::now();
            }
            if let Some(index) = state.ready.pop_front() {
                return Some((index, &self.slots[index as usize]));
            }
            state = if state.parked.is_empty() {
                self.work.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else {
                self.work.wait_timeout(state, RETRY).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }

    /// Copy thread: the peer's ring is full; try again later, and others meanwhile.
    pub fn park(&self, index: u32) {
        locked(&self.state).parked.push_back(index);
    }

    /// Copy thread: the submission ended. Its body holds no peer any more.
    pub fn finish(&self, index: u32, completion: Completion) {
        let mut state = locked(&self.state);
        state.meta[index as usize].in_flight = false;
        state.done.push_back((index, completion));
        drop(state);
        self.finished.notify_all();
    }

    /// Moves completions out and frees their slots.
    pub fn take(&self, completions: &mut [Completion]) -> usize {
        let mut state = locked(&self.state);
        let mut taken = 0;
        while taken < completions.len()
            && let Some((index, completion)) = state.done.pop_front()
        {
            completions[taken] = completion;
            state.free.push(index);
            taken += 1;
        }
        taken
    }

    pub fn has_done(&self) -> bool {
        !locked(&self.state).done.is_empty()
    }

    /// Marks all submissions in flight under this tag; false when there is none.
    pub fn cancel(&self, tag: Tag) -> bool {
        let state = locked(&self.state);
        let mut any = false;
        for (meta, slot) in state.meta.iter().zip(&self.slots) {
            if meta.in_flight && meta.tag == tag {
                slot.cancelled.store(true, Ordering::SeqCst);
                any = true;
            }
        }
        any
    }

    pub fn settled(&self, tag: Tag) -> bool {
        !locked(&self.state).meta.iter().any(|m| m.in_flight && m.tag == tag)
    }

    /// Waits until nothing is in flight to the peer; false when the deadline passed first.
    pub fn wait_idle(&self, peer: PeerId, deadline: Instant) -> bool {
        let mut state = locked(&self.state);
        while state.meta.iter().any(|m| m.in_flight && m.peer == peer) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.finished.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Ends the copy threads after the piece they are at.
    pub fn stop(&self) {
        locked(&self.state).stopped = true;
        self.work.notify_all();
        self.finished.notify_all();
    }
}
