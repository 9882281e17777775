//! Submissions that wait for a copy thread.
//!
//! `tests/shuttle` compiles this file with shuttle's locks.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use host_transfer_kit::locked;

use crate::sync::{Condvar, Mutex};

/// How long a submission whose peer's ring is full waits before it is tried again.
const RETRY: Duration = Duration::from_micros(500);

struct State {
    ready: VecDeque<u32>,
    parked: VecDeque<u32>,
    unparked: Instant,
    stopped: bool,
}

/// The queue from submitters to copy threads. Its lock is held for a few instructions at a time, never across a copy or a system call.
pub struct Ready {
    state: Mutex<State>,
    work: Condvar,
}

impl Ready {
    /// Makes room for `submissions` submissions.
    pub fn new(submissions: u32) -> Self {
        let list = || VecDeque::with_capacity(submissions as usize);
        let state = State { ready: list(), parked: list(), unparked: Instant::now(), stopped: false };
        Self { state: Mutex::new(state), work: Condvar::new() }
    }

    /// **Hot.** Hands a submission to the next copy thread.
    pub fn push(&self, index: u32) {
        locked(&self.state).ready.push_back(index);
        self.work.notify_one();
    }

    /// Copy thread: waits for a submission to work on. `None` when stopped.
    pub fn next(&self) -> Option<u32> {
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
                return Some(index);
            }
            state = if state.parked.is_empty() {
                self.work.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else {
                self.work.wait_timeout(state, RETRY).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }

    /// As [`next`](Self::next), but without a wait, for a thread that has other work.
    pub fn next_now(&self) -> Option<u32> {
        let mut state = locked(&self.state);
        if state.stopped { None } else { state.ready.pop_front() }
    }

    /// Copy thread: puts back a submission whose peer's ring is full. It is tried again later, and others meanwhile.
    pub fn park(&self, index: u32) {
        locked(&self.state).parked.push_back(index);
        // A thread that waits for work has to wait for the time as well.
        self.work.notify_one();
    }

    /// Ends the copy threads after their current piece.
    pub fn stop(&self) {
        locked(&self.state).stopped = true;
        self.work.notify_all();
    }
}
