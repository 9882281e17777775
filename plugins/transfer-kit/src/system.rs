//! Services of the system: events, random bytes, threads.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{Builder, JoinHandle};

use host_plugin_api::{Error, ErrorCode, Result};
use rustix::event::{EventfdFlags, eventfd};
use rustix::rand::{GetRandomFlags, getrandom};

/// Sixteen random bytes: a secret or an identity.
pub type Random = [u8; 16];

/// Random bytes from the kernel.
///
/// # Errors
/// `IO` when the kernel has none.
pub fn random() -> Result<Random> {
    let mut bytes = Random::default();
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(16) => Ok(bytes),
        other => Err(Error::new(ErrorCode::IO, format!("the system gave no random bytes: {other:?}"))),
    }
}

/// An eventfd: a descriptor that one thread makes readable and another polls. It never blocks.
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    /// Makes an event that is not readable.
    ///
    /// # Errors
    /// `IO` when the system has no descriptor left.
    pub fn new() -> Result<Self> {
        let io = |e| Error::new(ErrorCode::IO, format!("cannot create an eventfd: {e}"));
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self).map_err(io)
    }

    /// Makes the event readable. An event that cannot take more is readable already.
    pub fn signal(&self) {
        let _already_readable = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes the event not readable.
    pub fn clear(&self) {
        let _nothing_to_clear = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

/// An eventfd that another process made.
impl From<OwnedFd> for Event {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Event {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Starts a thread. `broken` is called, on that thread, if `body` panics.
///
/// # Errors
/// `IO` when no thread can be started. `body` is dropped then.
pub fn start_thread(
    name: &str,
    body: impl FnOnce() + Send + 'static,
    broken: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let run = move || {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(body)) {
            // Its drop may panic, and nothing above us would catch that.
            std::mem::forget(payload);
            broken();
        }
    };
    let thread = Builder::new().name(name.to_owned()).spawn(run);
    thread.map_err(|e| Error::new(ErrorCode::IO, format!("cannot start a thread: {e}")))
}
