//! The pages of one connection that both sides write: the control page, and the device page, which peers of version 1 of the
//! handshake do not have.
//!
//! `tests/loom` compiles this file with loom's atomics, and tries every order in which its threads may run.

use std::time::Instant;

use host_plugin_api::NOTIFICATION_BYTES;

use crate::mapping::Shared;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::hint;

/// Most copy threads of one instance.
pub const MAX_COPY_THREADS: usize = 16;
/// Batches of copies that devices of one instance have under way at once.
pub const DEVICE_BATCHES: usize = 2;
/// One line for each batch of the devices, and one for the notifications of the thread that begins the batches.
pub const DEVICE_LINES: usize = DEVICE_BATCHES + 1;
/// Lines of an instance: those of the copy threads, and then those of the devices.
pub const LINES: usize = MAX_COPY_THREADS + DEVICE_LINES;
/// Notifications that wait for the receiver, per connection.
pub const RING: usize = 1024;
const WORDS: usize = NOTIFICATION_BYTES / 8;

/// A word on a cache line of its own.
#[repr(C, align(64))]
#[derive(Default)]
pub struct Line(AtomicU64);

/// Says whether one copy thread is copying: the number is odd while the thread copies, and differs each time.
///
/// Because the number differs, a fence can end although the thread goes on to further pieces. These began after the
/// fence closed its gate, and look at the gate.
impl Line {
    /// Until the returned value is dropped, the thread is busy. Only one thread enters a line.
    pub fn enter(&self) -> Busy<'_> {
        let even = self.0.load(Ordering::Relaxed) & !1;
        // Release: a fence that finds this number has to see the pieces before it.
        self.0.store(even | 1, Ordering::Release);
        // Together with the fence in `wait`: either the thread sees the gate closed, or the fence sees the thread busy.
        fence(Ordering::SeqCst);
        Busy { line: self, even }
    }

    /// Ends the busy time that [`enter`](Self::enter) began, when the returned value was forgotten.
    pub fn leave(&self) {
        let odd = self.0.load(Ordering::Relaxed) | 1;
        self.0.store(odd.wrapping_add(1), Ordering::Release);
    }

    /// Whether no thread is busy. Meaningful only when no thread enters any more.
    pub fn is_left(&self) -> bool {
        self.0.load(Ordering::Acquire).is_multiple_of(2)
    }

    /// Waits until the thread has moved on, if it was busy. False when `deadline` passed first. To be called after the gate was
    /// closed.
    ///
    /// Returns true at once when `dead` says so.
    pub fn wait(&self, deadline: Instant, dead: impl Fn() -> bool) -> bool {
        // Orders the store that closed the gate before the look at the line. See `enter`.
        fence(Ordering::SeqCst);
        let seen = self.0.load(Ordering::Acquire);
        if seen.is_multiple_of(2) {
            return true;
        }
        // A piece takes some tens of microseconds. A descheduled process takes longer.
        for turn in 0u64.. {
            if self.0.load(Ordering::Acquire) != seen || dead() {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            match turn {
                0..200 => hint::spin_loop(),
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
        self.line.0.store(self.even.wrapping_add(2), Ordering::Release);
    }
}

#[repr(C, align(64))]
struct Entry {
    length: AtomicU32,
    words: [AtomicU64; WORDS],
}

/// The control page. Its size is that of the protocol, except in models of it. Version 1 has the same page with the same layout.
#[repr(C)]
pub struct ControlPage<const THREADS: usize = MAX_COPY_THREADS, const PLACES: usize = RING> {
    /// Written by the receiver: not 0 once nothing more may be written.
    closed: Line,
    /// Written by the sender: how many notifications were pushed so far.
    pushed: Line,
    /// Written by the receiver: how many notifications were taken so far.
    taken: Line,
    /// Written by the sender, one line per copy thread.
    busy: [Line; THREADS],
    ring: [Entry; PLACES],
}

// SAFETY: atomics only, aligned to a cache line.
unsafe impl<const THREADS: usize, const PLACES: usize> Shared for ControlPage<THREADS, PLACES> {}

/// Zeros, as in a fresh mapping.
impl<const THREADS: usize, const PLACES: usize> Default for ControlPage<THREADS, PLACES> {
    fn default() -> Self {
        let word = |_| AtomicU64::new(0);
        let entry = |_| Entry { length: AtomicU32::new(0), words: std::array::from_fn(word) };
        Self {
            closed: Line::default(),
            pushed: Line::default(),
            taken: Line::default(),
            busy: std::array::from_fn(|_| Line::default()),
            ring: std::array::from_fn(entry),
        }
    }
}

impl<const THREADS: usize, const PLACES: usize> ControlPage<THREADS, PLACES> {
    /// Receiver: closes the gate. Nothing more may be written once a [`wait`](Self::wait) after this has ended.
    pub fn close(&self) {
        self.closed.0.store(1, Ordering::Relaxed);
    }

    /// Sender, while busy: whether the receiver still takes writes.
    pub fn is_open(&self) -> bool {
        self.closed.0.load(Ordering::Relaxed) == 0
    }

    /// Sender: marks a copy thread busy.
    pub fn enter(&self, thread: usize) -> Busy<'_> {
        self.busy[thread % THREADS].enter()
    }

    /// Receiver: waits for all copy threads, see [`Line::wait`].
    pub fn wait(&self, deadline: Instant, dead: impl Fn() -> bool) -> bool {
        self.busy.iter().all(|line| line.wait(deadline, &dead))
    }

    /// Sender, one thread at a time: adds a notification. False when the ring is full.
    pub fn push(&self, bytes: &[u8; NOTIFICATION_BYTES], length: u32) -> bool {
        let pushed = self.pushed.0.load(Ordering::Relaxed);
        if pushed.wrapping_sub(self.taken.0.load(Ordering::Acquire)) >= PLACES as u64 {
            return false;
        }
        let entry = &self.ring[(pushed % PLACES as u64) as usize];
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
        // When more waits than the ring holds, the sender is faulty, and its ring is ignored.
        if waiting == 0 || waiting > PLACES as u64 {
            return None;
        }
        let entry = &self.ring[(taken % PLACES as u64) as usize];
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
        waiting != 0 && waiting <= PLACES as u64
    }
}

/// The device page: the lines of a connection for copies by devices. Its size is that of the protocol, except in models of it.
#[repr(C)]
pub struct DevicePage<const LINES: usize = DEVICE_LINES> {
    /// Written by the sender: how many regions on devices it has closed on request so far.
    let_go: Line,
    /// Written by the sender, see [`DEVICE_LINES`].
    busy: [Line; LINES],
}

// SAFETY: atomics only, aligned to a cache line.
unsafe impl<const LINES: usize> Shared for DevicePage<LINES> {}

/// Zeros, as in a fresh mapping.
impl<const LINES: usize> Default for DevicePage<LINES> {
    fn default() -> Self {
        Self { let_go: Line::default(), busy: std::array::from_fn(|_| Line::default()) }
    }
}

impl<const LINES: usize> DevicePage<LINES> {
    /// Sender: marks a line busy.
    pub fn enter(&self, line: usize) -> Busy<'_> {
        self.busy[line % LINES].enter()
    }

    /// Sender: ends the busy time that `enter` of this line began, when the returned value was forgotten.
    pub fn leave(&self, line: usize) {
        self.busy[line % LINES].leave();
    }

    /// Receiver: whether no copy of a device is under way. Meaningful only when the sender begins none any more.
    pub fn is_left(&self) -> bool {
        self.busy.iter().all(Line::is_left)
    }

    /// Receiver: waits for all lines, see [`Line::wait`].
    pub fn wait(&self, deadline: Instant, dead: impl Fn() -> bool) -> bool {
        self.busy.iter().all(|line| line.wait(deadline, &dead))
    }

    /// Sender, one thread at a time: counts a region on a device that it has closed.
    pub fn let_go(&self) {
        let before = self.let_go.0.load(Ordering::Relaxed);
        self.let_go.0.store(before.wrapping_add(1), Ordering::Release);
    }

    /// Receiver: how many regions the sender has closed.
    pub fn count_let_go(&self) -> u64 {
        self.let_go.0.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::sync::atomic::AtomicBool;

    use host_tests::wait::{PATIENCE, until};

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
        // Busy again while a thread waits: the second piece began after the gate was closed, so the thread need not wait for it.
        let first = line.enter();
        let looked = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // The thread asks whether the sender is dead once it has seen the first piece.
            let waiting = scope.spawn(|| {
                line.wait(Instant::now() + PATIENCE, || {
                    looked.store(true, Ordering::SeqCst);
                    false
                })
            });
            until("the thread to see the first piece", || {
                if looked.load(Ordering::SeqCst) { Ok(()) } else { Err("it has not seen it") }
            });
            drop(first);
            let second = line.enter();
            assert!(waiting.join().unwrap(), "it waits for the second piece");
            drop(second);
        });
    }

    #[test]
    fn pages_have_the_layouts_of_the_protocol() {
        // As version 1 has it: three lines and sixteen, and 1024 places of 64 bytes.
        assert_eq!(size_of::<ControlPage>(), 66_752);
        assert_eq!(offset_of!(ControlPage, closed), 0);
        assert_eq!(offset_of!(ControlPage, pushed), 64);
        assert_eq!(offset_of!(ControlPage, taken), 128);
        assert_eq!(offset_of!(ControlPage, busy), 192);
        assert_eq!(offset_of!(ControlPage, ring), 1216);
        assert_eq!((offset_of!(Entry, length), offset_of!(Entry, words)), (0, 8));
        assert_eq!(size_of::<crate::live::LiveTable>(), 1024);
        assert_eq!((size_of::<DevicePage>(), offset_of!(DevicePage, busy)), (256, 64));
    }

    #[test]
    fn a_device_page_is_left_when_its_batches_are() {
        let page = DevicePage::<DEVICE_LINES>::default();
        for batch in 0..DEVICE_LINES {
            std::mem::forget(page.enter(batch));
            assert!(!page.is_left());
            assert!(!page.wait(Instant::now(), || false));
            page.leave(batch);
            assert!(page.is_left());
        }
        assert!(page.wait(Instant::now(), || false));
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
