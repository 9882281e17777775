//! The queue of actions for the thread of one storage tier, and its wake-up.

use std::collections::VecDeque;
use std::time::Duration;

use host_core::hierarchy::TierAction;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

/// Actions that wait for the thread. The core's limits bound their number.
pub(super) struct Mailbox {
    letters: Mutex<Letters>,
    wake: OwnedFd,
}

#[derive(Default)]
struct Letters {
    actions: VecDeque<TierAction>,
    closed: bool,
}

impl Mailbox {
    /// An empty mailbox.
    ///
    /// # Errors
    /// When the system has no free descriptor.
    pub(super) fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { letters: Mutex::default(), wake })
    }

    pub(super) fn push(&self, action: TierAction) {
        self.change(|letters| letters.actions.push_back(action));
    }

    /// Closes the mailbox: no more actions come.
    pub(super) fn close(&self) {
        self.change(|letters| letters.closed = true);
    }

    fn change(&self, change: impl FnOnce(&mut Letters)) {
        change(&mut self.letters.lock());
        // A write fails when the counter is full, and then the thread wakes up anyway.
        let _full = rustix::io::write(&self.wake, &1u64.to_ne_bytes()).is_err();
    }

    /// The actions since the last call, or `None` once the mailbox is closed.
    pub(super) fn take(&self) -> Option<VecDeque<TierAction>> {
        let mut letters = self.letters.lock();
        (!letters.closed).then(|| std::mem::take(&mut letters.actions))
    }

    /// Sleeps until an action comes, `also` is readable, or the time is over.
    pub(super) fn sleep(&self, also: Option<BorrowedFd<'_>>, most: Duration) {
        let waits = std::iter::once(self.wake.as_fd()).chain(also);
        let mut waits: Vec<PollFd<'_>> =
            waits.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let timeout = rustix::fs::Timespec { tv_sec: 0, tv_nsec: most.subsec_nanos().into() };
        // The cause of the wake-up does not matter, because the next turn looks at everything.
        let _interrupted = poll(&mut waits, Some(&timeout)).is_err();
        let mut count = [0; 8];
        let _empty = rustix::io::read(&self.wake, &mut count).is_err();
    }
}
