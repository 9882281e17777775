//! A connection on which we are the sender, as the hot calls see it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use host_plugin_api::PeerId;

use super::queue::locked;
use super::regions::Card;
use super::wire::Random;

/// See the module.
pub struct Peer {
    pub id: PeerId,
    /// What the host called the peer.
    pub name: String,
    /// The name it was opened under.
    pub own_name: String,
    pub instance: Random,
    /// What lies behind its door.
    pub regions: Vec<Card>,
    gone: AtomicBool,
    inbox: Mutex<Inbox>,
    wake: Condvar,
}

struct Inbox {
    submissions: VecDeque<u32>,
    closed: bool,
}

impl Peer {
    /// A peer to whom no more than `submissions` can be on their way.
    pub fn new(
        id: PeerId,
        (name, own_name): (String, String),
        instance: Random,
        regions: Vec<Card>,
        submissions: u32,
    ) -> Self {
        let inbox = Inbox { submissions: VecDeque::with_capacity(submissions as usize), closed: false };
        let (gone, inbox) = (AtomicBool::new(false), Mutex::new(inbox));
        Self { id, name, own_name, instance, regions, gone, inbox, wake: Condvar::new() }
    }

    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// Says that nothing more is sent, and wakes the link to its end.
    pub fn set_gone(&self) {
        self.gone.store(true, Ordering::SeqCst);
        // Under the lock, so that a link that has just looked is asleep, or looks again.
        let _inbox = locked(&self.inbox);
        self.wake.notify_all();
    }

    /// Hands a submission to the link; false when the link takes none any more.
    pub fn hand_over(&self, index: u32) -> bool {
        let mut inbox = locked(&self.inbox);
        if inbox.closed {
            return false;
        }
        inbox.submissions.push_back(index);
        self.wake.notify_all();
        true
    }

    /// Link: moves what came to `to`.
    pub fn take(&self, to: &mut VecDeque<u32>) {
        to.append(&mut locked(&self.inbox).submissions);
    }

    /// Link: sleeps until something comes, or somebody wants it to look, or the time is over.
    pub fn rest(&self, wait: Duration) {
        let inbox = locked(&self.inbox);
        if inbox.submissions.is_empty() && !self.is_gone() {
            drop(self.wake.wait_timeout(inbox, wait).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Wakes the link, for what is not in the inbox.
    pub fn nudge(&self) {
        let _inbox = locked(&self.inbox);
        self.wake.notify_all();
    }

    /// Link: takes nothing from now on; what came until now is moved to `to`.
    pub fn close(&self, to: &mut VecDeque<u32>) {
        let mut inbox = locked(&self.inbox);
        inbox.closed = true;
        to.append(&mut inbox.submissions);
    }
}
