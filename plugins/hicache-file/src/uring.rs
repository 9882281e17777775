//! A thread that keeps many runs in flight through one ring of the kernel.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use host_plugin_api::{Level, log};
use io_uring::{IoUring, Probe, opcode, types};
use rustix::io::Errno;

use crate::memory::Vector;
use crate::pinned::Pinned;
use crate::queue::Ended;
use crate::run::Run;
use crate::store::Store;
use crate::work;

/// `user_data` of the poll for new batches. Runs are numbered from 0.
const WAKE: u64 = u64::MAX;
/// How long the thread waits when the kernel has no memory for requests.
const BREATH: Duration = Duration::from_millis(1);

/// A ring takes no more reads when this many bytes of reads are in flight: further reads wait in this thread and not in
/// the device. Devices of some virtual machines end all their work at once. With this bound, such a device gets more
/// work before the host is told of ended reads, which takes checksums. On such a device reads of 4 MiB reached these
/// fractions of raw reads, medians of 20 rounds: with 32 MiB 0.97, with 48 MiB 0.97, with no bound 0.91. Writes have no
/// bound, since their checksums come first: with 32 MiB they reached 0.91, with no bound 0.98.
const FLIGHT_BYTES: usize = 48 << 20;
/// While this many runs wait for room in the ring, no more are claimed. Waiting writes have their checksums already.
const AHEAD: usize = 4;

/// A kernel's ring and the runs in flight on it.
pub struct Ring {
    ring: IoUring,
    pinned: Pinned,
    /// The runs that the kernel works on, boxed so that they do not move, and whether each uses pinned memory.
    runs: Vec<Option<(Box<Run>, bool)>>,
    free: Vec<usize>,
    /// Bytes of the reads among `runs`.
    bytes_read: usize,
    polling: bool,
    /// Set when the ring is dropped while the kernel works on runs, so that their end will not be seen.
    abandoned: Arc<AtomicBool>,
}

impl Ring {
    /// Makes a ring for `depth` runs and `pieces` [pieces](crate::pinned) of memory.
    ///
    /// # Errors
    /// When the kernel has no io_uring, lacks a needed operation, or forbids io_uring.
    pub fn new(depth: u32, pieces: usize) -> io::Result<Self> {
        let entries = (depth + 1).next_power_of_two();
        let ring =
            IoUring::builder().setup_coop_taskrun().build(entries).or_else(|_| IoUring::new(entries))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Readv::CODE, opcode::Writev::CODE, opcode::PollAdd::CODE];
        if !needed.iter().all(|code| probe.is_supported(*code)) {
            return Err(io::Error::other("this kernel's io_uring lacks vectored reads and writes"));
        }
        let fixed = [opcode::ReadFixed::CODE, opcode::WriteFixed::CODE];
        let pieces = if fixed.iter().all(|code| probe.is_supported(*code)) { pieces } else { 0 };
        let vectored = [opcode::ReadvFixed::CODE, opcode::WritevFixed::CODE];
        let pinned = Pinned::new(&ring, pieces, vectored.iter().all(|code| probe.is_supported(*code)));
        let depth = depth as usize;
        Ok(Self {
            ring,
            pinned,
            runs: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            bytes_read: 0,
            polling: false,
            abandoned: Arc::default(),
        })
    }

    /// Whether the ring takes this run, too.
    fn has_room(&self, run: &Run) -> bool {
        !self.free.is_empty() && (!run.is_read() || self.bytes_read < FLIGHT_BYTES)
    }

    fn in_flight(&self) -> usize {
        self.runs.len() - self.free.len()
    }

    /// Puts a request into the submission queue, which has room for all that can be in flight.
    fn push(&mut self, entry: &io_uring::squeue::Entry) -> io::Result<()> {
        // SAFETY: the memory that the entry points to lives until its completion: it is of runs in `self.runs`, see `Drop`.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.submit()?;
        }
        Ok(())
    }

    /// Submits the pushed requests to the kernel.
    fn submit(&mut self) -> io::Result<()> {
        if self.ring.submission().is_empty() {
            return Ok(());
        }
        let submitted = self.ring.submit();
        passing(submitted)
    }

    fn start(&mut self, run: Box<Run>) -> Result<(), (Box<Run>, io::Error)> {
        let Some(at) = self.free.pop() else {
            return Err((run, io::Error::other("more runs than the ring has room for")));
        };
        let place = self.pinned.place(&self.ring, &run);
        let entry = entry_of(&run, at, place);
        self.bytes_read += read_bytes(&run);
        self.runs[at] = Some((run, place.is_some()));
        // The kernel does not know a request that was not submitted, so the run can be taken back.
        self.push(&entry).map_err(|e| (self.take(at).unwrap_or_else(|| unreachable!("put there above")).0, e))
    }

    /// Takes out a run that the kernel does not work on, and says whether it used pinned memory.
    fn take(&mut self, at: usize) -> Option<(Box<Run>, bool)> {
        let (run, is_pinned) = self.runs.get_mut(at)?.take()?;
        self.free.push(at);
        self.bytes_read -= read_bytes(&run);
        Some((run, is_pinned))
    }

    /// Waits for at least one completion. Returns early when the kernel cannot wait just now.
    fn wait(&mut self) -> io::Result<()> {
        let waited = self.ring.submit_and_wait(1);
        passing(waited)
    }
}

/// Ignores errors that the next call may not meet.
fn passing(entered: io::Result<usize>) -> io::Result<()> {
    let Err(error) = entered else { return Ok(()) };
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        // The completion queue is full, until the caller empties it.
        Some(Errno::INTR | Errno::BUSY) => Ok(()),
        // No memory for requests. Pushed requests stay, and requests in flight give back their memory when they end.
        Some(Errno::AGAIN) => {
            std::thread::sleep(BREATH);
            Ok(())
        }
        _ => Err(error),
    }
}

fn read_bytes(run: &Run) -> usize {
    if run.is_read() { run.total } else { 0 }
}

/// Builds the kernel's request for a run. `place` is the place of the pinned piece that contains the run.
fn entry_of(run: &Run, at: usize, place: Option<u16>) -> io_uring::squeue::Entry {
    let (vectors, offset) = run.rest();
    let (pointer, count) = (vectors.as_ptr().cast(), vectors.len() as u32);
    let file = types::Fd(run.file.as_raw_fd());
    let one = match vectors {
        [Vector { base, length }] => Some((*base, *length as u32)),
        _ => None,
    };
    let entry = match (run.is_read(), place, one) {
        (true, Some(place), Some((base, length))) => {
            opcode::ReadFixed::new(file, base, length, place).offset(offset).build()
        }
        (false, Some(place), Some((base, length))) => {
            opcode::WriteFixed::new(file, base, length, place).offset(offset).build()
        }
        (true, Some(place), None) => {
            opcode::ReadvFixed::new(file, pointer, count, place).offset(offset).build()
        }
        (false, Some(place), None) => {
            opcode::WritevFixed::new(file, pointer, count, place).offset(offset).build()
        }
        (true, None, _) => opcode::Readv::new(file, pointer, count).offset(offset).build(),
        (false, None, _) => opcode::Writev::new(file, pointer, count).offset(offset).build(),
    };
    entry.user_data(at as u64)
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Runs that the kernel still works on must stay in place.
        for (run, _) in self.runs.drain(..).flatten() {
            self.abandoned.store(true, Ordering::SeqCst);
            Box::leak(run);
        }
    }
}

/// The loop of a thread with a ring. Ends when the queue is closed and nothing is in flight.
///
/// # Errors
/// When the ring fails as a whole.
pub fn thread(store: &Store, mut ring: Ring, number: usize) -> io::Result<()> {
    let Some(waker) = store.queue.waker(number) else { return Ok(()) };
    ring.abandoned = store.abandoned.clone();
    let (mut claim, mut ended, mut runs) = (Vec::new(), Vec::new(), Vec::<Run>::new());
    let mut waiting = VecDeque::new();
    let (mut done, mut finished) = (Vec::new(), VecDeque::new());
    loop {
        if finished.is_empty() {
            waker.arm();
        }
        ring.pinned.forget_gone(&ring.ring, &store.queue);
        loop {
            begin(store, &mut ring, &mut waiting, &mut ended)?;
            flush(store, &mut ended);
            // Bounds the ended runs that wait for their check.
            let wanted = waiting.len() < AHEAD && finished.len() < ring.runs.len();
            if !store.queue.claim(wanted, &mut claim) {
                break;
            }
            work::start(store, &claim, &mut ended, &mut runs);
            waiting.extend(runs.drain(..));
        }
        // Checks one run while the device works on the runs that were begun just now. The host is told of the checked
        // run, and its next requests begin before the next run is checked.
        if let Some((run, result)) = finished.pop_front() {
            work::finish(store, run, result, &mut ended);
            flush(store, &mut ended);
        } else {
            if store.queue.is_closed() && ring.in_flight() == 0 && waiting.is_empty() {
                return Ok(());
            }
            if !ring.polling {
                let events = rustix::event::PollFlags::IN.bits().into();
                let poll =
                    opcode::PollAdd::new(types::Fd(waker.fd.as_raw_fd()), events).build().user_data(WAKE);
                ring.push(&poll)?;
                ring.polling = true;
            }
            ring.wait()?;
        }
        done.extend(ring.ring.completion().map(|entry| (entry.user_data(), entry.result())));
        for (data, result) in done.drain(..) {
            if data == WAKE {
                ring.polling = false;
                waker.clear();
            } else {
                finished.extend(complete(&mut ring, data as usize, result));
            }
        }
    }
}

fn flush(store: &Store, ended: &mut Vec<Ended>) {
    store.queue.finish(ended);
    ended.clear();
}

/// Starts as many of the waiting runs as the ring has room for, first come, first served, and tells the kernel.
fn begin(
    store: &Store,
    ring: &mut Ring,
    waiting: &mut VecDeque<Run>,
    ended: &mut Vec<Ended>,
) -> io::Result<()> {
    while waiting.front().is_some_and(|run| ring.has_room(run))
        && let Some(run) = waiting.pop_front()
    {
        if let Err((run, e)) = ring.start(Box::new(run)) {
            work::finish(store, *run, Err(e), ended);
        }
    }
    ring.submit()
}

/// Takes the kernel's answer to the run at this place. Returns the run, if it has ended.
fn complete(ring: &mut Ring, at: usize, result: i32) -> Option<(Run, io::Result<()>)> {
    let Some((mut run, is_pinned)) = ring.take(at) else {
        log!(Level::ERROR, "io_uring completed run {at}, which was not in flight");
        return None;
    };
    let is = |errno: Errno| result == -errno.raw_os_error();
    let outcome = match usize::try_from(result) {
        Ok(0) if run.is_read() => Some(Ok(())),
        Ok(0) => Some(Err(io::ErrorKind::WriteZero.into())),
        Ok(bytes) => run.advance(bytes).then_some(Ok(())),
        Err(_) if is(Errno::INTR) => None,
        // The kernel cannot do it in the background, so this thread does it.
        Err(_) if is(Errno::AGAIN) => Some(run.execute()),
        // Not every file system takes pinned memory. An error of the device comes again.
        Err(_) if is_pinned => Some(run.execute()),
        Err(_) => Some(Err(io::Error::from_raw_os_error(-result))),
    };
    match outcome {
        Some(result) => Some((*run, result)),
        None => ring.start(run).err().map(|(run, e)| (*run, Err(e))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Name, Value};
    use crate::memory::Buffer;
    use crate::queue::{Claimed, Kind};
    use crate::run::{RunPage, RunPlace};
    use crate::segment::Segment;

    #[test]
    fn a_ring_that_goes_while_the_kernel_reads_says_so_and_one_that_is_idle_does_not() {
        let Ok(mut ring) = Ring::new(4, 1) else { return println!("SKIPPED: no io_uring here") };
        let (idle, read) = (Ring::new(4, 0).unwrap(), Arc::new(AtomicBool::new(false)));
        ring.abandoned = read.clone();
        let unread = idle.abandoned.clone();
        drop(idle);
        assert!(!unread.load(Ordering::SeqCst));
        // Nothing is ever written to this pipe, so the read never ends.
        let (end, _other) = rustix::pipe::pipe().unwrap();
        ring.start(Box::new(reading(4096, Arc::new(end)))).map_err(|(_, e)| e).unwrap();
        ring.submit().unwrap();
        drop(ring);
        assert!(read.load(Ordering::SeqCst));
    }

    fn reading(length: u32, from: Arc<std::os::fd::OwnedFd>) -> Run {
        let value = Value { key: Default::default(), checksum: 0, block: 0, length };
        let page = Claimed { kind: Kind::Get, slot: 0, page: 0, what: Default::default(), span: None };
        let part =
            RunPage { page, value, number: 0, is_suspect: false, buffer: Buffer::new(length as usize) };
        let segment = Segment::new(1, Name { birth: 1, random: 1 }, None);
        Run::new(RunPlace::From(segment), from, vec![part])
    }

    #[test]
    fn a_ring_is_full_by_its_bytes_or_its_runs_and_takes_more_when_one_has_ended() {
        let Ok(mut ring) = Ring::new(6, 0) else { return println!("SKIPPED: no io_uring here") };
        let (end, other) = rustix::pipe::pipe().unwrap();
        let end = Arc::new(end);
        let fill = |ring: &mut Ring, length: u32| {
            let mut count = 0;
            loop {
                let run = reading(length, end.clone());
                if !ring.has_room(&run) {
                    break;
                }
                ring.start(Box::new(run)).map_err(|(_, e)| e).unwrap();
                count += 1;
            }
            ring.submit().unwrap();
            count
        };
        assert_eq!(fill(&mut ring, FLIGHT_BYTES as u32 / 4), 4);
        // A pipe without a writer ends the read.
        drop(other);
        let end_one = |ring: &mut Ring| {
            // A wait may end early, and a run may go on.
            let ended = loop {
                ring.wait().unwrap();
                let entry = ring.ring.completion().next();
                let ended =
                    entry.and_then(|entry| complete(ring, entry.user_data() as usize, entry.result()));
                if let Some((_, ended)) = ended {
                    break ended;
                }
            };
            ended.unwrap();
        };
        end_one(&mut ring);
        assert_eq!(fill(&mut ring, 4096), 3, "six runs");
        for _ in 0..6 {
            end_one(&mut ring);
        }
        assert_eq!((ring.bytes_read, ring.in_flight()), (0, 0));
    }

    #[test]
    fn a_kernel_that_cannot_just_now_is_called_again() {
        for (errno, ends) in [
            (Errno::INTR, false),
            (Errno::BUSY, false),
            (Errno::AGAIN, false),
            (Errno::BADF, true),
            (Errno::FAULT, true),
        ] {
            assert_eq!(passing(Err(errno.into())).is_err(), ends, "{errno}");
        }
    }
}
