//! Submissions on their way between the host's threads and the driver: a fixed number of slots, allocated once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use host_plugin_api::{Completion, NOTIFICATION_BYTES, PeerId, Submission, Tag, Write};

use crate::lists::List;

/// Locks, also after a thread panicked: what our locks guard is consistent between statements.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One submission's content: writes, or places in a prepared list.
pub struct Content {
    pub submission: Submission,
    writes: Vec<Write>,
    pub list: Option<Arc<List>>,
    pub places: Vec<i32>,
}

/// What is to be written.
#[derive(Clone, Copy)]
pub enum Work<'a> {
    Writes(&'a [Write]),
    /// Places in a list, which has them.
    Prepared(&'a Arc<List>, &'a [u32]),
}

impl Content {
    pub fn message(&self) -> &[u8] {
        &self.submission.notification[..self.submission.notification_length as usize]
    }

    pub fn len(&self) -> usize {
        if self.list.is_some() { self.places.len() } else { self.writes.len() }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The writes, from one on.
    pub fn writes(&self, from: usize) -> impl Iterator<Item = Write> {
        let of_list = self.list.as_ref().map(|list| (&list.writes, &self.places[from..]));
        let listed =
            of_list.into_iter().flat_map(|(writes, places)| places.iter().map(|p| writes[*p as usize]));
        let own = if self.list.is_some() { &[] } else { &self.writes[from..] };
        own.iter().copied().chain(listed)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Free, or completed and not yet taken by the host.
    Idle,
    /// Not started. `true` when the host wants it not to be.
    Queued(bool),
    /// Perhaps not wholly. `true` when the host wants no more of it to be.
    Started(bool),
}

#[derive(Clone, Copy)]
struct Meta {
    tag: Tag,
    stage: Stage,
}

struct State {
    meta: Box<[Meta]>,
    free: Vec<u32>,
    ready: VecDeque<u32>,
    done: VecDeque<(u32, Completion)>,
    /// Completed with an error, and perhaps still in flight; with the connection whose end will settle them. No more than
    /// there are slots per connection, since a connection fails once.
    unsettled: Vec<(Tag, PeerId)>,
}

/// See the module. Its lock is held for a few instructions at a time, never across a call into NIXL.
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
        let many = writes as usize;
        let content = |_| {
            let (writes, places) = (Vec::with_capacity(many), Vec::with_capacity(many));
            Mutex::new(Content { submission, writes, list: None, places })
        };
        let many = submissions as usize;
        Self {
            contents: (0..submissions).map(content).collect(),
            state: Mutex::new(State {
                meta: vec![Meta { tag: Tag(0), stage: Stage::Idle }; many].into(),
                free: (0..submissions).rev().collect(),
                ready: VecDeque::with_capacity(many),
                done: VecDeque::with_capacity(many),
                unsettled: Vec::with_capacity(many),
            }),
        }
    }

    /// Takes a submission in; false when all slots are taken. `writes` are no more than the queue was made for.
    pub fn push(&self, submission: &Submission, work: Work) -> bool {
        let mut state = locked(&self.state);
        let Some(index) = state.free.pop() else { return false };
        drop(state);
        let mut content = locked(&self.contents[index as usize]);
        content.submission = *submission;
        content.writes.clear();
        content.places.clear();
        match work {
            Work::Writes(writes) => content.writes.extend_from_slice(writes),
            Work::Prepared(list, places) => {
                content.list = Some(list.clone());
                // A list has no more than a million.
                content.places.extend(places.iter().map(|place| *place as i32));
            }
        }
        drop(content);
        let mut state = locked(&self.state);
        state.meta[index as usize] = Meta { tag: submission.tag, stage: Stage::Queued(false) };
        state.ready.push_back(index);
        true
    }

    /// Driver: the next submission, and whether it was cancelled. It counts as started.
    pub fn next(&self) -> Option<(u32, bool)> {
        let mut state = locked(&self.state);
        let index = state.ready.pop_front()?;
        let cancelled = state.meta[index as usize].stage == Stage::Queued(true);
        state.meta[index as usize].stage = Stage::Started(false);
        Some((index, cancelled))
    }

    /// Driver: whether no more of a submission that counts as started is wanted.
    pub fn is_cancelled(&self, index: u32) -> bool {
        locked(&self.state).meta[index as usize].stage == Stage::Started(true)
    }

    pub fn has_ready(&self) -> bool {
        !locked(&self.state).ready.is_empty()
    }

    /// Driver: what a slot holds, until it is finished.
    pub fn content(&self, index: u32) -> MutexGuard<'_, Content> {
        locked(&self.contents[index as usize])
    }

    /// Driver: the submission ended; `unsettled` names the connection whose end is needed to know that nothing of it is
    /// in flight.
    pub fn finish(&self, index: u32, status: i32, bytes: u64, unsettled: Option<PeerId>) {
        // Here, and not in the hot call that fills the slot again: a list may be freed.
        drop(locked(&self.contents[index as usize]).list.take());
        let mut state = locked(&self.state);
        let tag = state.meta[index as usize].tag;
        state.meta[index as usize].stage = Stage::Idle;
        state.unsettled.extend(unsettled.map(|peer| (tag, peer)));
        state.done.push_back((index, Completion { tag, bytes, status, reserved: 0 }));
    }

    /// Driver: nothing of this connection's submissions is in flight any more.
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
        for meta in state.meta.iter_mut().filter(|meta| meta.tag == tag && meta.stage != Stage::Idle) {
            any = true;
            if let Stage::Queued(cancelled) | Stage::Started(cancelled) = &mut meta.stage {
                *cancelled = true;
            }
        }
        any
    }

    /// Whether nothing of this tag is in flight.
    pub fn is_settled(&self, tag: Tag) -> bool {
        let state = locked(&self.state);
        let running = state.meta.iter().any(|meta| meta.tag == tag && meta.stage != Stage::Idle);
        !running && !state.unsettled.iter().any(|(other, _)| *other == tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Work = Work::Writes(&[]);

    fn submission(tag: u64) -> Submission {
        let notification = [0; NOTIFICATION_BYTES];
        Submission { peer: PeerId(1), notification_length: 0, tag: Tag(tag), notification }
    }

    #[test]
    fn a_failed_submission_settles_when_its_connection_has_ended_and_not_when_it_completes() {
        let queue = Queue::new(2, 1);
        assert!(queue.push(&submission(5), NOTHING));
        assert!(!queue.is_settled(Tag(5)));
        let (index, cancelled) = queue.next().unwrap();
        assert!(!cancelled);
        queue.finish(index, -11, 0, Some(PeerId(7)));
        let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 4];
        assert_eq!((queue.take(&mut done), done[0].status), (1, -11));
        queue.settle(PeerId(8));
        assert!(!queue.is_settled(Tag(5)), "another connection's end says nothing about this one");
        queue.settle(PeerId(7));
        assert!(queue.is_settled(Tag(5)));
    }

    #[test]
    fn cancelling_reaches_what_has_not_started_and_nothing_else() {
        let queue = Queue::new(3, 1);
        assert!(!queue.cancel(Tag(1)));
        assert!(queue.push(&submission(1), NOTHING));
        assert!(queue.push(&submission(2), NOTHING));
        assert!(queue.cancel(Tag(1)));
        let (first, cancelled) = queue.next().unwrap();
        assert!(cancelled);
        let (second, cancelled) = queue.next().unwrap();
        assert!(!cancelled && !queue.is_cancelled(second));
        queue.finish(first, -12, 0, None);
        assert!(!queue.cancel(Tag(1)) && queue.is_settled(Tag(1)));
        assert!(queue.cancel(Tag(2)) && queue.is_cancelled(second), "what it has not posted is not wanted");
    }
}
