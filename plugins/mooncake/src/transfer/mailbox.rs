//! Submissions on their way to the thread of a link.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use host_transfer_kit::{LinkedPeer, Mailbox, Peer as _, locked};

/// A connection on which this instance is the sender, as the hot calls see it.
pub type Peer = LinkedPeer<Inbox>;

struct State {
    submissions: VecDeque<u32>,
    closed: bool,
}

/// The submissions that a link has yet to take.
pub struct Inbox {
    state: Mutex<State>,
    wake: Condvar,
}

impl Mailbox for Inbox {
    fn wake(&self) {
        // Under the lock: a link that has just looked is then asleep already, or looks again.
        let _state = locked(&self.state);
        self.wake.notify_all();
    }
}

impl Inbox {
    /// Makes room for `submissions` submissions.
    pub fn new(submissions: u32) -> Self {
        let submissions = VecDeque::with_capacity(submissions as usize);
        Self { state: Mutex::new(State { submissions, closed: false }), wake: Condvar::new() }
    }

    /// **Hot.** Hands a submission to the link. False when the link takes none any more.
    pub fn hand_over(&self, index: u32) -> bool {
        let mut state = locked(&self.state);
        if state.closed {
            return false;
        }
        state.submissions.push_back(index);
        self.wake.notify_all();
        true
    }

    /// For the link: moves new submissions to `to`.
    pub fn take(&self, to: &mut VecDeque<u32>) {
        to.append(&mut locked(&self.state).submissions);
    }

    /// For the link: takes no submissions from now on. Those that came until now are moved to `to`.
    pub fn close(&self, to: &mut VecDeque<u32>) {
        let mut state = locked(&self.state);
        state.closed = true;
        to.append(&mut state.submissions);
    }
}

/// For the link: sleeps until a submission comes for its peer, or it is woken, or the time is over.
pub fn rest(peer: &Peer, wait: Duration) {
    let Inbox { state, wake } = &peer.mailbox;
    let state = locked(state);
    if state.submissions.is_empty() && !peer.is_gone() {
        drop(wake.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner));
    }
}
