//! The control page of one connection, written by both sides.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use host_plugin_api::NOTIFICATION_BYTES;

use crate::mapping::Shared;

/// Most copy threads of one instance.
pub const MAX_COPY_THREADS: usize = 16;
/// Notifications that wait for the receiver, per connection.
pub const RING: u64 = 1024;
const WORDS: usize = NOTIFICATION_BYTES / 8;

/// On a cache line of its own.
#[repr(C, align(64))]
#[derive(Default)]
pub struct Line(AtomicU64);

/// Says whether one copy thread is copying: odd while it is, and another number each time.
///
/// The number is what lets a fence end although the thread goes on to further pieces: those began after the fence
/// closed its gate, and look at it.
impl Line {
    /// Until the returned value is dropped, the thread is busy. Only one thread enters a line.
    pub fn enter(&self) -> Busy<'_> {
        let even = self.0.load(Ordering::Relaxed) & !1;
        // Sequentially consistent, with the loads of the gate after it and the fence's store and load: either the
        // thread sees the gate closed, or the fence sees the thread busy.
        self.0.store(even | 1, Ordering::SeqCst);
        Busy { line: self, even }
    }

    /// Waits until all threads that were busy have moved on; false when `deadline` passed first.
    ///
    /// True at once when `dead` says so.
    pub fn wait(&self, deadline: Instant, dead: impl Fn() -> bool) -> bool {
        let seen = self.0.load(Ordering::SeqCst);
        if seen.is_multiple_of(2) {
            return true;
        }
        // A piece takes some tens of microseconds; a descheduled process takes longer.
        for turn in 0u64.. {
            if self.0.load(Ordering::SeqCst) != seen || dead() {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            match turn {
                0..200 => std::hint::spin_loop(),
                _ => std::thread::sleep(std::time::Duration::from_micros(50)),
            }
        }
        false
    }
}

/// See [`Line::enter`].
pub struct Busy<'a> {
    line: &'a Line,
    even: u64,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.line.0.store(self.even.wrapping_add(2), Ordering::SeqCst);
    }
}

#[repr(C, align(64))]
struct Entry {
    length: AtomicU32,
    words: [AtomicU64; WORDS],
}

/// See the module.
#[repr(C)]
pub struct ControlPage {
    /// Written by the receiver: not 0 once nothing more may be written.
    closed: Line,
    /// Written by the sender: notifications pushed, ever.
    pushed: Line,
    /// Written by the receiver: notifications taken, ever.
    taken: Line,
    /// Written by the sender, one line per copy thread.
    busy: [Line; MAX_COPY_THREADS],
    ring: [Entry; RING as usize],
}

// SAFETY: atomics only, aligned to a cache line.
unsafe impl Shared for ControlPage {}

impl ControlPage {
    /// Receiver: nothing more may be written.
    pub fn close(&self) {
        self.closed.0.store(1, Ordering::SeqCst);
    }

    /// Sender, while busy: whether the receiver still takes writes.
    pub fn is_open(&self) -> bool {
        self.closed.0.load(Ordering::SeqCst) == 0
    }

    /// Sender: marks a copy thread busy.
    pub fn enter(&self, thread: usize) -> Busy<'_> {
        self.busy[thread % MAX_COPY_THREADS].enter()
    }

    /// Receiver: waits for all copy threads, see [`Line::wait`].
    pub fn wait(&self, deadline: Instant, dead: impl Fn() -> bool) -> bool {
        self.busy.iter().all(|line| line.wait(deadline, &dead))
    }

    /// Sender, one thread at a time: false when the ring is full.
    pub fn push(&self, bytes: &[u8; NOTIFICATION_BYTES], length: u32) -> bool {
        let pushed = self.pushed.0.load(Ordering::Relaxed);
        if pushed.wrapping_sub(self.taken.0.load(Ordering::Acquire)) >= RING {
            return false;
        }
        let entry = &self.ring[(pushed % RING) as usize];
        entry.length.store(length, Ordering::Relaxed);
        for (word, bytes) in entry.words.iter().zip(bytes.as_chunks::<8>().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        // Release: a reader that sees the count sees the entry, and the data that was copied before it.
        self.pushed.0.store(pushed.wrapping_add(1), Ordering::Release);
        true
    }

    /// Receiver, one thread at a time: the next notification.
    pub fn take(&self) -> Option<([u8; NOTIFICATION_BYTES], u32)> {
        let taken = self.taken.0.load(Ordering::Relaxed);
        let waiting = self.pushed.0.load(Ordering::Acquire).wrapping_sub(taken);
        // More than the ring holds is a sender gone wrong; it gets no ear.
        if waiting == 0 || waiting > RING {
            return None;
        }
        let entry = &self.ring[(taken % RING) as usize];
        let length = entry.length.load(Ordering::Relaxed).min(NOTIFICATION_BYTES as u32);
        let mut bytes = [0; NOTIFICATION_BYTES];
        for (word, bytes) in entry.words.iter().zip(bytes.as_chunks_mut::<8>().0) {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        self.taken.0.store(taken.wrapping_add(1), Ordering::Release);
        Some((bytes, length))
    }

    /// Receiver: whether [`take`](Self::take) would find one.
    pub fn has_waiting(&self) -> bool {
        let waiting =
            self.pushed.0.load(Ordering::Acquire).wrapping_sub(self.taken.0.load(Ordering::Relaxed));
        waiting != 0 && waiting <= RING
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::{SharedPage, Writers};

    #[test]
    fn a_fence_waits_for_threads_that_were_busy_and_for_no_others() {
        let line = Line::default();
        let soon = Instant::now();
        assert!(line.wait(soon, || false), "no thread is busy");
        let busy = line.enter();
        assert!(!line.wait(soon, || false), "busy, and the deadline has passed");
        assert!(line.wait(soon, || true), "busy, and dead");
        drop(busy);
        assert!(line.wait(soon, || false));
        // Busy again while a thread waits: the second piece began after the gate, so it is no reason to wait.
        let first = line.enter();
        std::thread::scope(|scope| {
            let waiting =
                scope.spawn(|| line.wait(Instant::now() + std::time::Duration::from_secs(60), || false));
            drop(first);
            let _second = line.enter();
            // Whether it looked before or after, it need not wait for more than one end.
            let first_look = waiting.is_finished();
            drop(_second);
            assert!(waiting.join().unwrap(), "looked early: {first_look}");
        });
    }

    #[test]
    fn the_ring_keeps_order_refuses_when_full_and_ignores_an_impossible_count() {
        let (page, _fd) = SharedPage::<ControlPage>::create("test", Writers::All).unwrap();
        assert!(page.take().is_none());
        for n in 0..RING {
            assert!(page.push(&[n as u8; NOTIFICATION_BYTES], 8));
        }
        assert!(!page.push(&[0; NOTIFICATION_BYTES], 8), "full");
        for n in 0..RING {
            assert_eq!(page.take(), Some(([n as u8; NOTIFICATION_BYTES], 8)));
        }
        assert!(page.push(&[1; NOTIFICATION_BYTES], 4000));
        assert_eq!(page.take().unwrap().1, NOTIFICATION_BYTES as u32, "a length beyond the payload is cut");
        page.pushed.0.store(u64::MAX / 2, Ordering::SeqCst);
        assert!(page.take().is_none() && !page.has_waiting());
    }
}
