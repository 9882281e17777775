//! The state that all threads of an instance share.

use std::sync::atomic::{AtomicBool, Ordering};

use host_plugin_api::{Counter, Error, ErrorCode, Result, TransferLimits, host};

use crate::notifications::Notifications;
use crate::peer::{Peer, Peers};
use crate::queue::Queue;
use crate::system::Event;
use crate::wire::check_name;

/// The state that all threads of an instance share: its submissions, its peers, its notifications, and whether it runs.
#[derive(Debug)]
pub struct Instance<P, X = ()> {
    /// The name under which it was opened.
    pub name: String,
    /// What it can carry at once.
    pub limits: TransferLimits,
    /// Its submissions.
    pub queue: Queue<P, X>,
    /// Its connections as a sender.
    pub peers: Peers<P>,
    /// Notifications that the host has not fetched yet.
    pub notifications: Notifications,
    /// Readable while a completion or a notification waits for the host.
    pub event: Event,
    /// The metric `submissions_written`: submissions that reached peers.
    pub submissions_written: Counter,
    /// The metric `bytes_written`: their bytes.
    pub bytes_written: Counter,
    stopping: AtomicBool,
    broken: AtomicBool,
}

impl<P: Peer, X: Default> Instance<P, X> {
    /// Makes an instance that runs. `notifications` says how many may wait for the host.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a name that is not 1 to 64 bytes, `IO` when the system has no descriptor left.
    pub fn new(name: &str, limits: TransferLimits, notifications: usize) -> Result<Self> {
        check_name(name)?;
        Ok(Self {
            name: name.to_owned(),
            limits,
            queue: Queue::new(limits.max_submissions, limits.max_writes),
            peers: Peers::default(),
            notifications: Notifications::new(notifications),
            event: Event::new()?,
            submissions_written: host().counter("submissions_written")?,
            bytes_written: host().counter("bytes_written")?,
            stopping: AtomicBool::new(false),
            broken: AtomicBool::new(false),
        })
    }

    /// Ends a submission with success: counts it, and lets its completion wait for the host.
    pub fn succeed(&self, index: u32, bytes: u64) {
        self.submissions_written.add(1);
        self.bytes_written.add(bytes);
        self.queue.finish(index, 0, bytes, None);
    }

    /// Makes the event readable if a completion or a notification waits.
    pub fn announce(&self) {
        if self.queue.has_done() || !self.notifications.is_empty() {
            self.event.signal();
        }
    }

    /// **Hot.** 0, or the code with which calls are refused.
    pub fn state(&self) -> i32 {
        if self.is_stopping() {
            return ErrorCode::CLOSED.0;
        }
        if self.is_broken() { ErrorCode::PANICKED.0 } else { 0 }
    }

    /// As [`state`](Self::state), with a text.
    ///
    /// # Errors
    /// `CLOSED` after [`stop`](Self::stop), `PANICKED` after [`set_broken`](Self::set_broken).
    pub fn ready(&self) -> Result<()> {
        match ErrorCode(self.state()) {
            ErrorCode(0) => Ok(()),
            ErrorCode::CLOSED => Err(Error::new(ErrorCode::CLOSED, "the instance was shut down")),
            code => Err(Error::new(code, "a thread of the instance panicked")),
        }
    }

    /// Whether the instance was told to end.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Makes every call answer `CLOSED`. Threads check [`is_stopping`](Self::is_stopping). The backend must wake them.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }

    /// Whether a thread of the instance panicked.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    /// Notes that a thread of the instance panicked: wakes the host, and makes every call answer `PANICKED`.
    pub fn set_broken(&self) {
        self.broken.store(true, Ordering::SeqCst);
        self.event.signal();
    }
}
