//! Wake-ups for instances that have no descriptor of their own.
//!
//! `tests/loom` compiles this file with loom's atomics and with its own event.

use super::event::Event;
use crate::sync::atomic::{AtomicBool, Ordering};

/// A descriptor of the host's that a plugin makes readable, and that is clear again before each poll.
///
/// The thread that waits on it polls until nothing is left, as with a plugin's own descriptor.
pub struct Waker {
    event: Event,
    /// Set from a wake to the next clear, so that many wakes cost one write.
    woken: AtomicBool,
}

impl Waker {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self::of(Event::new()?))
    }

    pub(super) fn of(event: Event) -> Self {
        Self { event, woken: AtomicBool::new(false) }
    }

    /// The descriptor to wait on.
    #[must_use]
    pub fn fd(&self) -> i32 {
        self.event.fd()
    }

    /// Makes the descriptor readable. The poll after the next [`clear`](Self::clear) sees all that was done before this call.
    pub fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            self.event.set();
        }
    }

    /// Clears the descriptor. Must be called before a poll, never after it: work that ends between the two wakes again.
    #[inline]
    pub fn clear(&self) {
        if self.woken.load(Ordering::Relaxed) {
            self.clear_woken();
        }
    }

    #[cold]
    fn clear_woken(&self) {
        // A wake sets the mark before the event. Between the two the event is not set: the mark stays, and the next clear takes
        // both.
        if self.event.take() {
            self.woken.swap(false, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_tests::wait::PATIENCE;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::sync::atomic::AtomicU64;

    fn readable(waker: &Waker) -> bool {
        let mut fds = [PollFd::new(waker.event.descriptor(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    #[test]
    fn many_wakes_are_one_and_a_clear_takes_them_back() {
        let waker = Waker::new().unwrap();
        assert!(!readable(&waker));
        waker.wake();
        waker.wake();
        assert!(readable(&waker));
        waker.clear();
        assert!(!readable(&waker));
        waker.wake();
        assert!(readable(&waker));
    }

    #[test]
    fn no_wake_is_lost_however_it_meets_a_clear() {
        const ITEMS: u64 = 100_000;
        let (waker, made) = (Waker::new().unwrap(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..ITEMS {
                    made.fetch_add(1, Ordering::Relaxed);
                    waker.wake();
                }
            });
            let mut seen = 0;
            while seen < ITEMS {
                let mut fds = [PollFd::new(waker.event.descriptor(), PollFlags::IN)];
                let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
                assert_eq!(poll(&mut fds, Some(&patience)), Ok(1), "stuck at {seen} of {ITEMS}");
                waker.clear();
                seen = made.load(Ordering::Relaxed);
            }
        });
        waker.clear();
        assert!(!readable(&waker), "still readable when nothing is left");
    }
}
