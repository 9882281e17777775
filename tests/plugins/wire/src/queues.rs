//! Queues: submissions to be sent, completions and notifications to be fetched.
//!
//! All of it is allocated when the instance opens, because the host's hot calls must not allocate, and its lock is never
//! held while something waits for the network.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use host_plugin_api::{
    Completion, ErrorCode, NOTIFICATION_BYTES, Notification, PeerId, Submission, Tag, Write, host,
};

use crate::{MAX_SUBMISSIONS, MAX_WRITES};

/// Notifications that wait for the host, at most. When the inbox is full, receiving threads wait, and so do the senders.
const MAX_INBOX: usize = 1024;

pub struct Queues {
    state: Mutex<State>,
    /// Signals a change that a thread may wait for: a submission, room in the inbox, the end.
    changed: Condvar,
}

struct State {
    closed: bool,
    jobs: Vec<Job>,
    accepted: u64,
    completions: VecDeque<Completion>,
    inbox: VecDeque<Notification>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Free,
    Queued,
    Running,
}

/// A place for one submission.
struct Job {
    step: Step,
    /// Its number in the order of acceptance.
    number: u64,
    submission: Submission,
    writes: Vec<Write>,
}

/// Moves as much as fits into the caller's slice.
fn drain<T>(queue: &mut VecDeque<T>, room: &mut [T]) -> i32 {
    let count = room.len().min(queue.len());
    for (slot, item) in room.iter_mut().zip(queue.drain(..count)) {
        *slot = item;
    }
    count as i32
}

impl State {
    /// Frees a slot and queues its completion. Every caller wakes the host afterwards, which may sleep: see `event_fd`.
    fn complete(&mut self, slot: usize, status: i32, bytes: u64) {
        let job = &mut self.jobs[slot];
        job.step = Step::Free;
        let tag = job.submission.tag;
        self.completions.push_back(Completion { tag, bytes, status, reserved: 0 });
    }
}

impl Queues {
    pub fn new() -> Self {
        let nothing = Submission {
            peer: PeerId(0),
            notification_length: 0,
            tag: Tag(0),
            notification: [0; NOTIFICATION_BYTES],
        };
        let job = || Job {
            step: Step::Free,
            number: 0,
            submission: nothing,
            writes: Vec::with_capacity(MAX_WRITES),
        };
        let state = State {
            closed: false,
            jobs: (0..MAX_SUBMISSIONS).map(|_| job()).collect(),
            accepted: 0,
            completions: VecDeque::with_capacity(MAX_SUBMISSIONS),
            inbox: VecDeque::with_capacity(MAX_INBOX),
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        crate::lock(&self.state)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a submission of the host, or refuses it.
    pub fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        let mut state = self.state();
        if state.closed {
            return ErrorCode::CLOSED.0;
        }
        // A completion that was not fetched counts as a taken place, so that there is always room for one more.
        let fetched = state.completions.len();
        let taken = state.jobs.iter().filter(|job| job.step != Step::Free).count();
        let free = state.jobs.iter().position(|job| job.step == Step::Free);
        let (Some(free), true) = (free, taken + fetched < MAX_SUBMISSIONS) else {
            return ErrorCode::WOULD_BLOCK.0;
        };
        state.accepted += 1;
        let number = state.accepted;
        let job = &mut state.jobs[free];
        (job.step, job.number, job.submission) = (Step::Queued, number, *submission);
        job.writes.clear();
        job.writes.extend_from_slice(writes);
        drop(state);
        self.changed.notify_all();
        0
    }

    pub fn poll(&self, completions: &mut [Completion]) -> i32 {
        let mut state = self.state();
        if state.closed { ErrorCode::CLOSED.0 } else { drain(&mut state.completions, completions) }
    }

    pub fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        let mut state = self.state();
        if state.closed {
            return ErrorCode::CLOSED.0;
        }
        let count = drain(&mut state.inbox, notifications);
        drop(state);
        if count > 0 {
            self.changed.notify_all();
        }
        count
    }

    pub fn cancel(&self, tag: Tag) -> i32 {
        let mut state = self.state();
        let queued = |job: &Job| job.step == Step::Queued && job.submission.tag == tag;
        match state.jobs.iter().position(queued) {
            _ if state.closed => ErrorCode::CLOSED.0,
            Some(slot) => {
                state.complete(slot, ErrorCode::CANCELLED.0, 0);
                drop(state);
                host().wake();
                0
            }
            // A running submission is not stopped: it ends soon.
            None if state.jobs.iter().any(|j| j.step == Step::Running && j.submission.tag == tag) => 0,
            None => ErrorCode::INVALID_ARGUMENT.0,
        }
    }

    pub fn settled(&self, tag: Tag) -> i32 {
        let state = self.state();
        let in_flight = |job: &Job| job.step != Step::Free && job.submission.tag == tag;
        match state.jobs.iter().any(in_flight) {
            _ if state.closed => ErrorCode::CLOSED.0,
            true => 0,
            false => 1,
        }
    }

    pub fn closed(&self) -> bool {
        self.state().closed
    }

    /// Refuses everything from now on. Returns false when the queues were closed before.
    pub fn close(&self) -> bool {
        let first = !std::mem::replace(&mut self.state().closed, true);
        self.changed.notify_all();
        first
    }

    /// Wakes the threads, so that they see changes outside of the queues.
    pub fn wake(&self) {
        // Taking the lock waits until a thread that has checked its condition does wait.
        drop(self.state());
        self.changed.notify_all();
    }

    /// Waits for the peer's next submission. `None` when `ended`. The submission's writes are swapped into `writes`.
    pub fn next(
        &self,
        peer: u32,
        writes: &mut Vec<Write>,
        ended: impl Fn() -> bool,
    ) -> Option<(usize, Submission)> {
        let mut state = self.state();
        loop {
            if ended() || state.closed {
                return None;
            }
            let of_peer =
                |(_, job): &(usize, &mut Job)| job.step == Step::Queued && job.submission.peer.0 == peer;
            let first = state.jobs.iter_mut().enumerate().filter(of_peer).min_by_key(|(_, job)| job.number);
            if let Some((slot, job)) = first {
                job.step = Step::Running;
                std::mem::swap(&mut job.writes, writes);
                return Some((slot, job.submission));
            }
            state = self.wait(state);
        }
    }

    pub fn complete(&self, slot: usize, status: i32, bytes: u64) {
        self.state().complete(slot, status, bytes);
        host().wake();
    }

    /// Fails everything that is left for a peer. Called when nothing of the peer is in flight any more.
    pub fn fail_all(&self, peer: u32) {
        let mut state = self.state();
        for slot in 0..state.jobs.len() {
            let job = &state.jobs[slot];
            if job.step != Step::Free && job.submission.peer.0 == peer {
                state.complete(slot, ErrorCode::PEER_LOST.0, 0);
            }
        }
        drop(state);
        host().wake();
    }

    /// Puts a notification into the inbox, as soon as there is room.
    pub fn notify(&self, notification: Notification) {
        let mut state = self.state();
        while state.inbox.len() >= MAX_INBOX && !state.closed {
            state = self.wait(state);
        }
        if !state.closed {
            state.inbox.push_back(notification);
        }
        drop(state);
        host().wake();
    }
}
