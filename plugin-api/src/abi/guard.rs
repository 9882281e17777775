//! Keeps panics on the plugin's side.
//!
//! A panic that reached the boundary would end the process, and only the plugin's own copy of `std` can catch it. So
//! the code that catches is compiled into the plugin, around every call, the factory and the drop.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use abi_stable::sabi_trait::prelude::TD_Opaque;
use abi_stable::std_types::{RResult, RSlice, RSliceMut, RStr, RVec};

use super::{AbiError, AbiResult, TransferObject, TransferRole, TransferRole_TO};
use crate::error::{Error, ErrorCode, Result};
use crate::transfer::{
    Completion, Memory, Notification, Opening, PeerId, RegionId, Submission, Tag, TransferBackend,
    TransferLimits, Write,
};

/// Wraps the author's instance and catches its panics. After the first panic every call that returns a code answers
/// `PANICKED`. Calls that also return a text give that panic's text.
pub(super) struct Guard<T> {
    inner: ManuallyDrop<T>,
    poisoned: AtomicBool,
    first: OnceLock<String>,
}

impl<T> Guard<T> {
    pub(super) fn new(inner: T) -> Self {
        Self { inner: ManuallyDrop::new(inner), poisoned: AtomicBool::new(false), first: OnceLock::new() }
    }

    /// Runs `call` unless poisoned. The answer is `None` when a call panicked, now or earlier.
    ///
    /// After a caught panic the backend may be inconsistent, so only drop reaches it again.
    #[inline]
    pub(super) fn run<R>(&self, call: impl FnOnce(&T) -> R) -> Option<R> {
        // Relaxed: a call that races with the first panic may still enter, as it might have a moment earlier.
        if self.poisoned.load(Ordering::Relaxed) {
            return None;
        }
        match catch_unwind(AssertUnwindSafe(|| call(&self.inner))) {
            Ok(value) => Some(value),
            Err(payload) => {
                self.poison(payload);
                None
            }
        }
    }

    #[cold]
    fn poison(&self, payload: Box<dyn Any + Send>) {
        let _kept_first = self.first.set(text_of(payload));
        self.poisoned.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn hot(&self, call: impl FnOnce(&T) -> i32) -> i32 {
        self.run(call).unwrap_or(ErrorCode::PANICKED.0)
    }

    pub(super) fn cold<R>(&self, call: impl FnOnce(&T) -> Result<R>) -> AbiResult<R> {
        match self.run(call) {
            Some(Ok(value)) => RResult::ROk(value),
            Some(Err(error)) => RResult::RErr(error.into()),
            None => {
                let first = self.first.get().map_or("a panic whose text is not recorded yet", String::as_str);
                RResult::RErr(panicked(first))
            }
        }
    }
}

impl<T> Drop for Guard<T> {
    fn drop(&mut self) {
        // SAFETY: `inner` is dropped here only, and not touched afterwards.
        let dropped = catch_unwind(AssertUnwindSafe(|| unsafe { ManuallyDrop::drop(&mut self.inner) }));
        if let Err(payload) = dropped {
            // No caller is left to report the panic to. The payload is forgotten because its own drop may panic.
            std::mem::forget(payload);
        }
    }
}

impl<T: TransferBackend> TransferRole for Guard<T> {
    fn limits(&self) -> TransferLimits {
        self.run(|b| b.limits()).unwrap_or(TransferLimits::new(0, 0))
    }
    fn register(&self, memory: &Memory) -> AbiResult<RegionId> {
        self.cold(|b| b.register(memory))
    }
    fn deregister(&self, region: RegionId) -> AbiResult<()> {
        self.cold(|b| b.deregister(region))
    }
    fn endpoint(&self) -> AbiResult<RVec<u8>> {
        self.cold(|b| b.endpoint().map(RVec::from))
    }
    fn connect(&self, name: RStr<'_>, endpoint: RSlice<'_, u8>) -> AbiResult<PeerId> {
        self.cold(|b| b.connect(name.as_str(), endpoint.as_slice()))
    }
    fn disconnect(&self, peer: PeerId) -> AbiResult<()> {
        self.cold(|b| b.disconnect(peer))
    }
    fn submit(&self, submission: &Submission, writes: RSlice<'_, Write>) -> i32 {
        self.hot(|b| b.submit(submission, writes.as_slice()))
    }
    fn poll(&self, mut completions: RSliceMut<'_, Completion>) -> i32 {
        self.hot(|b| b.poll(completions.as_mut_slice()))
    }
    fn notifications(&self, mut notifications: RSliceMut<'_, Notification>) -> i32 {
        self.hot(|b| b.notifications(notifications.as_mut_slice()))
    }
    fn cancel(&self, tag: Tag) -> i32 {
        self.hot(|b| b.cancel(tag))
    }
    fn settled(&self, tag: Tag) -> i32 {
        self.hot(|b| b.settled(tag))
    }
    fn event_fd(&self) -> i32 {
        self.run(|b| b.event_fd()).unwrap_or(-1)
    }
    fn shutdown(&self, deadline_ms: u64) -> AbiResult<()> {
        self.cold(|b| b.shutdown(deadline_ms))
    }
}

/// Runs a plugin's factory, catches its panics and wraps its backend. Called by
/// [`export_plugin!`](crate::export_plugin).
pub fn open_guarded<T: TransferBackend>(
    open: impl FnOnce(&Opening) -> Result<T>,
    name: RStr<'_>,
    config: RStr<'_>,
) -> AbiResult<TransferObject> {
    let opening = Opening { name: name.into(), config: config.into() };
    caught(|| open(&opening)).map(|backend| TransferRole_TO::from_value(Guard::new(backend), TD_Opaque))
}

/// Runs a plugin's check of a configuration and catches its panics. Called by [`export_plugin!`](crate::export_plugin).
pub fn check_guarded(
    check: impl FnOnce(&str, &str) -> Result<()>,
    role: RStr<'_>,
    config: RStr<'_>,
) -> AbiResult<()> {
    caught(|| check(role.as_str(), config.as_str()))
}

/// Runs a factory. Returns the instance, the factory's error, or an error with the text of its panic.
pub(super) fn caught<T>(open: impl FnOnce() -> Result<T>) -> AbiResult<T> {
    match catch_unwind(AssertUnwindSafe(open)) {
        Ok(Ok(made)) => RResult::ROk(made),
        Ok(Err(error)) => RResult::RErr(error.into()),
        Err(payload) => RResult::RErr(panicked(&text_of(payload))),
    }
}

fn panicked(text: &str) -> AbiError {
    Error::new(ErrorCode::PANICKED, format!("the plugin panicked: {text}")).into()
}

/// Text of a panic. The payload itself is forgotten, because its drop may panic again.
fn text_of(payload: Box<dyn Any + Send>) -> String {
    let text = text_in(&*payload).to_owned();
    std::mem::forget(payload);
    text
}

/// Text in a panic's payload, if the payload is text, as that of `panic!` is.
pub(super) fn text_in(payload: &dyn Any) -> &str {
    let literal = payload.downcast_ref::<&str>().copied();
    let text = literal.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a payload that is not text")
}
