//! A thread that keeps many runs in flight through one ring of the kernel.

use std::io;
use std::os::fd::AsRawFd;

use host_plugin_api::{Level, log};
use io_uring::{IoUring, Probe, opcode, types};
use rustix::io::Errno;

use crate::queue::Ended;
use crate::run::Run;
use crate::store::Store;
use crate::work;

/// `user_data` of the poll for new batches; runs are numbered from 0.
const WAKE: u64 = u64::MAX;

/// See the module.
pub struct Ring {
    ring: IoUring,
    /// What the kernel works on, boxed so that it does not move.
    runs: Vec<Option<Box<Run>>>,
    free: Vec<usize>,
    polling: bool,
}

impl Ring {
    /// A ring for so many runs.
    ///
    /// # Errors
    /// When the kernel has no io_uring, or not what is needed of it, or forbids it.
    pub fn new(depth: u32) -> io::Result<Self> {
        let entries = (depth + 1).next_power_of_two();
        let ring =
            IoUring::builder().setup_coop_taskrun().build(entries).or_else(|_| IoUring::new(entries))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Readv::CODE, opcode::Writev::CODE, opcode::PollAdd::CODE];
        if !needed.iter().all(|code| probe.is_supported(*code)) {
            return Err(io::Error::other("this kernel's io_uring lacks vectored reads and writes"));
        }
        let depth = depth as usize;
        let runs = (0..depth).map(|_| None).collect();
        Ok(Self { ring, runs, free: (0..depth).rev().collect(), polling: false })
    }

    fn in_flight(&self) -> usize {
        self.runs.len() - self.free.len()
    }

    /// Puts a request into the submission queue, which has room for all that can be in flight.
    fn push(&mut self, entry: &io_uring::squeue::Entry) -> io::Result<()> {
        // SAFETY: what the entry points to lives until its completion: runs in `self.runs`, see `Drop`.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.ring.submit()?;
        }
        Ok(())
    }

    fn start(&mut self, run: Box<Run>) -> Result<(), (Box<Run>, io::Error)> {
        let Some(at) = self.free.pop() else {
            return Err((run, io::Error::other("more runs than the ring has room for")));
        };
        let entry = entry_of(&run, at);
        self.runs[at] = Some(run);
        match self.push(&entry) {
            Ok(()) => Ok(()),
            Err(e) => {
                self.free.push(at);
                // It was not submitted, so the kernel does not know of it.
                Err((self.runs[at].take().unwrap_or_else(|| unreachable!("put there above")), e))
            }
        }
    }

    /// Waits for a completion at least; interrupted waits are no error.
    fn wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(()),
            // The completion queue is full, which emptying it cures.
            Err(e) if e.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => Ok(()),
            Err(e) => Err(e),
        }
    }
}

fn entry_of(run: &Run, at: usize) -> io_uring::squeue::Entry {
    let (vectors, offset) = run.rest();
    let (pointer, count) = (vectors.as_ptr().cast(), vectors.len() as u32);
    let file = types::Fd(run.file.as_raw_fd());
    let entry = if run.is_read() {
        opcode::Readv::new(file, pointer, count).offset(offset).build()
    } else {
        opcode::Writev::new(file, pointer, count).offset(offset).build()
    };
    entry.user_data(at as u64)
}

impl Drop for Ring {
    fn drop(&mut self) {
        // What the kernel still works on must stay where it is.
        for run in self.runs.drain(..).flatten() {
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
    let (mut claim, mut ended, mut runs) = (Vec::new(), Vec::new(), Vec::<Run>::new());
    let mut waiting: Vec<Run> = Vec::new();
    let mut done = Vec::new();
    loop {
        waker.arm();
        loop {
            let room = !ring.free.is_empty() && waiting.is_empty();
            if !store.queue.claim(room, &mut claim) {
                break;
            }
            work::start(store, &claim, &mut ended, &mut runs);
            waiting.append(&mut runs);
            begin(store, &mut ring, &mut waiting, &mut ended);
            flush(store, &mut ended);
        }
        begin(store, &mut ring, &mut waiting, &mut ended);
        flush(store, &mut ended);
        if store.queue.is_closed() && ring.in_flight() == 0 && waiting.is_empty() {
            return Ok(());
        }
        if !ring.polling {
            let events = rustix::event::PollFlags::IN.bits().into();
            let poll = opcode::PollAdd::new(types::Fd(waker.fd.as_raw_fd()), events).build().user_data(WAKE);
            ring.push(&poll)?;
            ring.polling = true;
        }
        ring.wait()?;
        done.extend(ring.ring.completion().map(|entry| (entry.user_data(), entry.result())));
        for (data, result) in done.drain(..) {
            if data == WAKE {
                ring.polling = false;
                waker.clear();
            } else {
                complete(store, &mut ring, data as usize, result, &mut ended);
            }
        }
        flush(store, &mut ended);
    }
}

fn flush(store: &Store, ended: &mut Vec<Ended>) {
    store.queue.finish(ended);
    ended.clear();
}

/// Starts as many of the waiting runs as the ring has room for, first come, first served.
fn begin(store: &Store, ring: &mut Ring, waiting: &mut Vec<Run>, ended: &mut Vec<Ended>) {
    let count = waiting.len().min(ring.free.len());
    for run in waiting.drain(..count) {
        if let Err((run, e)) = ring.start(Box::new(run)) {
            work::finish(store, *run, Err(e), ended);
        }
    }
}

/// The kernel's answer to the run at this place.
fn complete(store: &Store, ring: &mut Ring, at: usize, result: i32, ended: &mut Vec<Ended>) {
    let Some(mut run) = ring.runs.get_mut(at).and_then(Option::take) else {
        log!(Level::ERROR, "io_uring completed run {at}, which was not in flight");
        return;
    };
    ring.free.push(at);
    let is = |errno: Errno| result == -errno.raw_os_error();
    let outcome = match usize::try_from(result) {
        Ok(0) if run.is_read() => Some(Ok(())),
        Ok(0) => Some(Err(io::ErrorKind::WriteZero.into())),
        Ok(bytes) => run.advance(bytes).then_some(Ok(())),
        Err(_) if is(Errno::INTR) => None,
        // The kernel cannot do it in the background: then here.
        Err(_) if is(Errno::AGAIN) => Some(run.execute()),
        Err(_) => Some(Err(io::Error::from_raw_os_error(-result))),
    };
    match outcome {
        Some(result) => work::finish(store, *run, result, ended),
        None => {
            if let Err((run, e)) = ring.start(run) {
                work::finish(store, *run, Err(e), ended);
            }
        }
    }
}
