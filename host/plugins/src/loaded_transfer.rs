//! A loaded backend as the plain trait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use host_plugin_api::abi::{RSlice, RSliceMut, RStr, TransferObject};
use host_plugin_api::{
    Completion, Error, Memory, Notification, PeerId, RegionId, Result, Submission, Tag, TransferBackend,
    TransferLimits, WAKES, Write,
};

use super::calls::{Call, Called, Peers};
use super::services::{Services, Waker};

/// A loaded transfer backend, called through the trait that plugins implement.
///
/// Answers are checked as far as memory safety depends on them: a returned count never exceeds the caller's slice.
pub struct LoadedTransfer {
    called: Called,
    object: TransferObject,
    /// Replaces the descriptor if the plugin wakes the host itself (`WAKES`).
    waker: Option<Arc<Waker>>,
    /// Whether the wake-ups before the next poll were taken back already.
    cleared: AtomicBool,
    peers: Peers,
}

impl LoadedTransfer {
    /// Wraps an object that the root of the plugin of this name opened.
    ///
    /// # Errors
    /// When the system has no descriptor for the plugin's wake-ups.
    pub fn new(plugin: &str, object: TransferObject, services: &Services) -> std::io::Result<Self> {
        let waker = (object.event_fd() == WAKES).then(|| services.waker()).transpose()?;
        Ok(Self {
            called: Called::plugin(plugin),
            object,
            waker,
            cleared: AtomicBool::new(false),
            peers: Peers::new(),
        })
    }
}

impl LoadedTransfer {
    /// Takes back the plugin's wake-ups.
    fn clear(&self) {
        if let Some(waker) = &self.waker {
            waker.clear();
        }
    }
}

impl TransferBackend for LoadedTransfer {
    fn limits(&self) -> TransferLimits {
        let _note = self.called.enter(Call::Limits);
        self.object.limits()
    }
    fn register(&self, memory: &Memory) -> Result<RegionId> {
        let _note = self.called.enter(Call::Register);
        self.object.register(memory).into_result().map_err(Error::from)
    }
    fn deregister(&self, region: RegionId) -> Result<()> {
        let _note = self.called.enter(Call::Deregister);
        self.object.deregister(region).into_result().map_err(Error::from)
    }
    fn endpoint(&self) -> Result<Vec<u8>> {
        let _note = self.called.enter(Call::Endpoint);
        self.object.endpoint().into_result().map(Vec::from).map_err(Error::from)
    }
    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        let connecting = self.peers.connecting(name);
        let _note = self.called.enter_connecting(&connecting);
        let (name, endpoint) = (RStr::from_str(name), RSlice::from_slice(endpoint));
        let connected = self.object.connect(name, endpoint).into_result().map_err(Error::from);
        connected.inspect(|peer| self.peers.add(peer.0, name.as_str()))
    }
    fn disconnect(&self, peer: PeerId) -> Result<()> {
        let _note = self.called.enter_about(Call::Disconnect, &self.peers, peer.0);
        let disconnected = self.object.disconnect(peer).into_result().map_err(Error::from);
        disconnected.inspect(|()| self.peers.remove(peer.0))
    }
    #[inline]
    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        let _note = self.called.enter_about(Call::Submit, &self.peers, submission.peer.0);
        self.object.submit(submission, RSlice::from_slice(writes))
    }
    #[inline]
    fn poll(&self, completions: &mut [Completion]) -> i32 {
        let _note = self.called.enter(Call::Poll);
        let room = completions.len();
        if !self.cleared.swap(false, Ordering::Relaxed) {
            self.clear();
        }
        self.called.counted(Call::Poll, self.object.poll(RSliceMut::from_mut_slice(completions)), room)
    }
    #[inline]
    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        let _note = self.called.enter(Call::Notifications);
        let room = notifications.len();
        // Before both calls of a turn: a notification that comes between them must wake the host.
        self.clear();
        self.cleared.store(true, Ordering::Relaxed);
        let answer = self.object.notifications(RSliceMut::from_mut_slice(notifications));
        self.called.counted(Call::Notifications, answer, room)
    }
    fn cancel(&self, tag: Tag) -> i32 {
        let _note = self.called.enter(Call::Cancel);
        self.object.cancel(tag)
    }
    #[inline]
    fn settled(&self, tag: Tag) -> i32 {
        let _note = self.called.enter(Call::Settled);
        self.object.settled(tag)
    }
    fn event_fd(&self) -> i32 {
        let _note = self.called.enter(Call::EventFd);
        self.waker.as_ref().map_or_else(|| self.object.event_fd(), |waker| waker.fd())
    }
    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.object.shutdown(deadline_ms).into_result().map_err(Error::from)
    }
}
