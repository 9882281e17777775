//! Submissions on their way between the host's threads and those of the links: a fixed number of slots, allocated once.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use host_plugin_api::{Completion, NOTIFICATION_BYTES, PeerId, Submission, Tag, Write};

/// Locks, also after a thread panicked: what our locks guard is consistent between statements.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One submission's content.
pub struct Content {
    pub submission: Submission,
    pub writes: Vec<Write>,
}

impl Content {
    /// The notification, as far as it counts.
    pub fn message(&self) -> &[u8] {
        &self.submission.notification[..self.submission.notification_length as usize]
    }
}

#[derive(Clone, Copy)]
struct Meta {
    tag: Tag,
    in_flight: bool,
    /// The host wants no more of it to be started.
    cancelled: bool,
}

struct State {
    meta: Box<[Meta]>,
    free: Vec<u32>,
    done: VecDeque<(u32, Completion)>,
    /// Completed with an error, and perhaps still in flight; with the connection whose end will settle them. No more than
    /// there are slots per connection, since a connection fails once.
    unsettled: Vec<(Tag, PeerId)>,
}

/// See the module. Its lock is held for a few instructions at a time, never across a call into Mooncake.
pub struct Queue {
    contents: Box<[Mutex<Content>]>,
    state: Mutex<State>,
}

impl Queue {
    pub fn new(submissions: u32, writes: u32) -> Self {
        let submission = Submission {
            peer: PeerId(0),
            notification_length: 0,
            tag: Tag(0),
            notification: [0; NOTIFICATION_BYTES],
        };
        let content = |_| Mutex::new(Content { submission, writes: Vec::with_capacity(writes as usize) });
        let many = submissions as usize;
        Self {
            contents: (0..submissions).map(content).collect(),
            state: Mutex::new(State {
                meta: vec![Meta { tag: Tag(0), in_flight: false, cancelled: false }; many].into(),
                free: (0..submissions).rev().collect(),
                done: VecDeque::with_capacity(many),
                unsettled: Vec::with_capacity(many),
            }),
        }
    }

    /// Takes a submission in; nothing when all slots are taken. `writes` are no more than the queue was made for.
    pub fn take_in(&self, submission: &Submission, writes: impl Iterator<Item = Write>) -> Option<u32> {
        let index = locked(&self.state).free.pop()?;
        let mut content = locked(&self.contents[index as usize]);
        content.submission = *submission;
        content.writes.clear();
        content.writes.extend(writes);
        drop(content);
        let mut state = locked(&self.state);
        state.meta[index as usize] = Meta { tag: submission.tag, in_flight: true, cancelled: false };
        Some(index)
    }

    /// Gives a slot back that nobody took over, as if it had never been taken.
    pub fn give_back(&self, index: u32) {
        let mut state = locked(&self.state);
        state.meta[index as usize].in_flight = false;
        state.free.push(index);
    }

    /// Link: whether no more of a submission is wanted.
    pub fn is_cancelled(&self, index: u32) -> bool {
        locked(&self.state).meta[index as usize].cancelled
    }

    /// Link: what a slot holds, until it is finished.
    pub fn content(&self, index: u32) -> MutexGuard<'_, Content> {
        locked(&self.contents[index as usize])
    }

    /// Link: the submission ended; `unsettled` names the connection whose end is needed to know that nothing of it is in
    /// flight.
    pub fn finish(&self, index: u32, status: i32, bytes: u64, unsettled: Option<PeerId>) {
        let mut state = locked(&self.state);
        let tag = state.meta[index as usize].tag;
        state.meta[index as usize].in_flight = false;
        state.unsettled.extend(unsettled.map(|peer| (tag, peer)));
        state.done.push_back((index, Completion { tag, bytes, status, reserved: 0 }));
    }

    /// Nothing of this connection's submissions is in flight any more.
    pub fn settle(&self, peer: PeerId) {
        locked(&self.state).unsettled.retain(|(_, other)| *other != peer);
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

    /// Marks what has not started of this tag; false when nothing of it is in flight.
    pub fn cancel(&self, tag: Tag) -> bool {
        let mut state = locked(&self.state);
        let mut any = false;
        for meta in state.meta.iter_mut().filter(|meta| meta.tag == tag && meta.in_flight) {
            any = true;
            meta.cancelled = true;
        }
        any
    }

    /// Whether nothing of this tag is in flight.
    pub fn is_settled(&self, tag: Tag) -> bool {
        let state = locked(&self.state);
        let running = state.meta.iter().any(|meta| meta.tag == tag && meta.in_flight);
        !running && !state.unsettled.iter().any(|(other, _)| *other == tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn submission(tag: u64) -> Submission {
        let notification = [0; NOTIFICATION_BYTES];
        Submission { peer: PeerId(1), notification_length: 0, tag: Tag(tag), notification }
    }

    #[test]
    fn a_failed_submission_settles_when_its_connection_has_ended_and_not_when_it_completes() {
        let queue = Queue::new(2, 1);
        let index = queue.take_in(&submission(5), std::iter::empty()).unwrap();
        assert!(!queue.is_settled(Tag(5)));
        queue.finish(index, -11, 0, Some(PeerId(7)));
        let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 4];
        assert_eq!((queue.take(&mut done), done[0].status), (1, -11));
        queue.settle(PeerId(8));
        assert!(!queue.is_settled(Tag(5)), "another connection's end says nothing about this one");
        queue.settle(PeerId(7));
        assert!(queue.is_settled(Tag(5)));
    }

    #[test]
    fn slots_that_nobody_took_over_are_free_again_and_settled() {
        let queue = Queue::new(1, 1);
        let index = queue.take_in(&submission(1), std::iter::empty()).unwrap();
        assert!(queue.take_in(&submission(2), std::iter::empty()).is_none());
        assert!(queue.cancel(Tag(1)) && queue.is_cancelled(index));
        queue.give_back(index);
        assert!(queue.is_settled(Tag(1)) && !queue.cancel(Tag(1)));
        let index = queue.take_in(&submission(2), std::iter::empty()).unwrap();
        assert!(!queue.is_cancelled(index), "a slot's last submission was cancelled, not this one");
    }
}
