//! Submissions on their way between the host's threads and the backend's: a fixed number of slots, allocated once.
//!
//! `tests/shuttle` compiles this file, and what it needs, with shuttle's locks.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use host_plugin_api::{Completion, NOTIFICATION_BYTES, PeerId, Submission, Tag, Write};

use crate::locked::locked;
use crate::peer::Peer;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// Content of a slot: one submission, and what is to be written.
#[derive(Debug)]
pub struct Content<P, X> {
    /// The submission as the host gave it.
    pub submission: Submission,
    /// The backend's own state. It is its type's default whenever a submission is taken in.
    pub progress: X,
    peer: Option<Arc<P>>,
    writes: Vec<Write>,
}

impl<P, X> Content<P, X> {
    /// The receiver. Always there until the submission is finished.
    pub fn peer(&self) -> Option<&Arc<P>> {
        self.peer.as_ref()
    }

    /// The valid bytes of the notification.
    pub fn notification(&self) -> &[u8] {
        &self.submission.notification[..self.submission.notification_length as usize]
    }

    /// How many writes there are.
    pub fn len(&self) -> usize {
        self.writes.len()
    }

    /// Whether the notification travels alone.
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    /// One of the writes.
    #[inline]
    pub fn write(&self, at: usize) -> Option<Write> {
        self.writes.get(at).copied()
    }

    /// The writes from number `from` on, which is at most the number of all.
    pub fn writes(&self, from: usize) -> impl Iterator<Item = Write> {
        self.writes[from..].iter().copied()
    }
}

#[derive(Clone, Copy, Debug)]
struct Meta {
    tag: Tag,
    peer: PeerId,
    in_flight: bool,
}

#[derive(Debug)]
struct State {
    meta: Box<[Meta]>,
    free: Vec<u32>,
    done: VecDeque<(u32, Completion)>,
    /// Submissions that completed with an error and may still be in flight, each with the connection whose end will
    /// settle it. No more than there are slots per connection, since a connection fails once.
    unsettled: Vec<(Tag, PeerId)>,
    /// Threads in `wait_idle`.
    waiting: usize,
}

/// The submissions of an instance, from the host's `submit` to its `poll`.
///
/// A slot is named by its index. It belongs to the thread that takes the submission in, then to the backend, until
/// [`finish`](Queue::finish) makes it a completion. It is free again when the host has fetched the completion. The queue's
/// lock is held for a few instructions at a time. The backend holds a slot's own lock while it works on the slot.
#[derive(Debug)]
pub struct Queue<P, X = ()> {
    contents: Box<[Mutex<Content<P, X>>]>,
    cancelled: Box<[AtomicBool]>,
    state: Mutex<State>,
    finished: Condvar,
}

impl<P: Peer, X: Default> Queue<P, X> {
    /// Makes slots for `submissions` submissions of `writes` writes.
    pub fn new(submissions: u32, writes: u32) -> Self {
        let submission = Submission {
            peer: PeerId(0),
            notification_length: 0,
            tag: Tag(0),
            notification: [0; NOTIFICATION_BYTES],
        };
        let content = |_| {
            let writes = Vec::with_capacity(writes as usize);
            Mutex::new(Content { submission, progress: X::default(), peer: None, writes })
        };
        let many = submissions as usize;
        Self {
            contents: (0..submissions).map(content).collect(),
            cancelled: (0..submissions).map(|_| AtomicBool::new(false)).collect(),
            state: Mutex::new(State {
                meta: vec![Meta { tag: Tag(0), peer: PeerId(0), in_flight: false }; many].into(),
                free: (0..submissions).rev().collect(),
                done: VecDeque::with_capacity(many),
                unsettled: Vec::with_capacity(many),
                waiting: 0,
            }),
            finished: Condvar::new(),
        }
    }

    /// **Hot.** Takes a submission in. Returns its slot, or `None` when all slots are taken. There must be no more
    /// writes than the queue was made for.
    pub fn take_in(&self, submission: &Submission, peer: &Arc<P>, writes: &[Write]) -> Option<u32> {
        let index = locked(&self.state).free.pop()?;
        let mut content = locked(&self.contents[index as usize]);
        content.submission = *submission;
        content.progress = X::default();
        content.peer = Some(peer.clone());
        content.writes.clear();
        content.writes.extend_from_slice(writes);
        drop(content);
        self.cancelled[index as usize].store(false, Ordering::SeqCst);
        let mut state = locked(&self.state);
        state.meta[index as usize] = Meta { tag: submission.tag, peer: submission.peer, in_flight: true };
        Some(index)
    }

    /// **Hot.** Gives back a slot that no thread took over, as if it had never been taken.
    pub fn give_back(&self, index: u32) {
        self.empty(index);
        let mut state = locked(&self.state);
        state.meta[index as usize].in_flight = false;
        state.free.push(index);
    }

    fn empty(&self, index: u32) {
        let mut content = locked(&self.contents[index as usize]);
        let freed = content.peer.take();
        drop(content);
        drop(freed);
    }

    /// Content of a slot, until the slot is finished. The guard must not be held when it is finished.
    pub fn content(&self, index: u32) -> MutexGuard<'_, Content<P, X>> {
        locked(&self.contents[index as usize])
    }

    /// Whether the host wants no more of a submission to be started.
    pub fn is_cancelled(&self, index: u32) -> bool {
        self.cancelled[index as usize].load(Ordering::SeqCst)
    }

    /// Ends a submission: with 0 and its bytes, or with an error code. `unsettled` names the connection whose end is
    /// needed to know that nothing of it is in flight.
    pub fn finish(&self, index: u32, status: i32, bytes: u64, unsettled: Option<PeerId>) {
        // Emptied here, and not in the hot call that fills the slot again, because a peer may be freed.
        self.empty(index);
        let mut state = locked(&self.state);
        let tag = state.meta[index as usize].tag;
        state.meta[index as usize].in_flight = false;
        state.unsettled.extend(unsettled.map(|peer| (tag, peer)));
        state.done.push_back((index, Completion { tag, bytes, status, reserved: 0 }));
        if state.waiting > 0 {
            self.finished.notify_all();
        }
    }

    /// Settles this connection's submissions: nothing of them is in flight any more.
    pub fn settle(&self, peer: PeerId) {
        locked(&self.state).unsettled.retain(|(_, other)| *other != peer);
    }

    /// **Hot.** Moves completions out and frees their slots. Returns how many.
    pub fn take(&self, completions: &mut [Completion]) -> usize {
        let mut state = locked(&self.state);
        let mut taken = 0;
        while taken < completions.len() {
            let Some((index, completion)) = state.done.pop_front() else { break };
            completions[taken] = completion;
            state.free.push(index);
            taken += 1;
        }
        taken
    }

    /// **Hot.** Whether a completion waits for the host.
    pub fn has_done(&self) -> bool {
        !locked(&self.state).done.is_empty()
    }

    /// Marks submissions of this tag that are in flight as cancelled. False when nothing of the tag is in flight.
    pub fn cancel(&self, tag: Tag) -> bool {
        let state = locked(&self.state);
        let mut any = false;
        for (meta, cancelled) in state.meta.iter().zip(&self.cancelled) {
            if meta.tag == tag && meta.in_flight {
                any = true;
                cancelled.store(true, Ordering::SeqCst);
            }
        }
        any
    }

    /// **Hot.** Whether nothing of this tag is in flight.
    pub fn is_settled(&self, tag: Tag) -> bool {
        let state = locked(&self.state);
        let running = state.meta.iter().any(|meta| meta.tag == tag && meta.in_flight);
        !running && !state.unsettled.iter().any(|(other, _)| *other == tag)
    }

    /// Waits until no submission to a peer is unfinished. False when the deadline passed first.
    pub fn wait_idle(&self, peer: PeerId, deadline: Instant) -> bool {
        let mut state = locked(&self.state);
        state.waiting += 1;
        let idle = loop {
            if !state.meta.iter().any(|meta| meta.in_flight && meta.peer == peer) {
                break true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break false;
            }
            state = self.finished.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        state.waiting -= 1;
        idle
    }
}

#[cfg(test)]
#[path = "queue/tests.rs"]
mod tests;
