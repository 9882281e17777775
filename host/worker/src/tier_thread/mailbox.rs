//! What the thread of one storage tier is told, and what wakes it up.

use std::collections::VecDeque;
use std::time::Duration;

use host_core::hierarchy::TierAction;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

/// Actions on their way. Holds at most what the core's limits let be under way.
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
    /// An empty one.
    ///
    /// # Errors
    /// When the system has no descriptor.
    pub(super) fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { letters: Mutex::default(), wake })
    }

    pub(super) fn push(&self, action: TierAction) {
        self.change(|letters| letters.actions.push_back(action));
    }

    /// Nothing comes any more.
    pub(super) fn close(&self) {
        self.change(|letters| letters.closed = true);
    }

    fn change(&self, change: impl FnOnce(&mut Letters)) {
        change(&mut self.letters.lock());
        // A full counter is a wake-up that is already there.
        let _full = rustix::io::write(&self.wake, &1u64.to_ne_bytes()).is_err();
    }

    /// What came since the last call, or `None` once it is closed.
    pub(super) fn take(&self) -> Option<VecDeque<TierAction>> {
        let mut letters = self.letters.lock();
        (!letters.closed).then(|| std::mem::take(&mut letters.actions))
    }

    /// Sleeps until something comes, `also` is readable, or the time is over.
    pub(super) fn sleep(&self, also: Option<BorrowedFd<'_>>, most: Duration) {
        let waits = std::iter::once(self.wake.as_fd()).chain(also);
        let mut waits: Vec<PollFd<'_>> =
            waits.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let timeout = rustix::fs::Timespec { tv_sec: 0, tv_nsec: most.subsec_nanos().into() };
        // Whatever woke it up: the next turn looks at everything.
        let _interrupted = poll(&mut waits, Some(&timeout)).is_err();
        let mut count = [0; 8];
        let _empty = rustix::io::read(&self.wake, &mut count).is_err();
    }
}
