//! The part of the transfer role that is the same for all backends.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use host_plugin_api::{
    Completion, Error, ErrorCode, Memory, NOTIFICATION_BYTES, Notification, PeerId, RegionId, Result,
    Submission, Tag, TransferBackend, TransferLimits, Write,
};

use crate::instance::Instance;
use crate::peer::Peer;

/// The part that a backend implements. [`Frontend`] makes a [`TransferBackend`] of it.
///
/// Any thread may call any method, also several at once. Once the instance is stopping or broken, only
/// [`shutdown`](Backend::shutdown) is called. Methods marked **hot** neither block nor allocate. For a method that the
/// trait `TransferBackend` has, too, that trait's documentation is the contract.
pub trait Backend: Send + Sync + 'static {
    /// A connection on which this instance sends.
    type Peer: Peer;
    /// State that the backend keeps with a submission while it works on it.
    type Progress: Default + Send + 'static;

    /// The state that the threads of this instance share.
    fn instance(&self) -> &Instance<Self::Peer, Self::Progress>;

    /// Registers memory: writes of this instance may read it, and connected peers may write it.
    ///
    /// # Errors
    /// `UNSUPPORTED` when the backend cannot use this kind of memory, or needs a descriptor that the memory lacks.
    fn register(&self, memory: &Memory) -> Result<RegionId>;

    /// Ends the registration of a region. When it returns, no peer's write lands in the region any more.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for an unknown region, `TIMEOUT` without a proof. See [`unproven`].
    fn deregister(&self, region: RegionId) -> Result<()>;

    /// Returns what a peer needs to connect to this instance.
    ///
    /// # Errors
    /// When no endpoint can be offered.
    fn endpoint(&self) -> Result<Vec<u8>>;

    /// Connects to a peer, and adds it to the instance's [peers](Instance::peers).
    ///
    /// # Errors
    /// `PEER_LOST` when the peer does not answer, `VERSION` when the endpoint is of another kind.
    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId>;

    /// Ends the connections in both directions, which is a fence, and removes the peer from the instance's peers.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for an unknown peer, `TIMEOUT` without a proof. See [`unproven`].
    fn disconnect(&self, peer: PeerId) -> Result<()>;

    /// **Hot.** The index of the first write that is empty, or leaves its region on either side.
    fn misfit(&self, peer: &Self::Peer, writes: &[Write]) -> Option<usize>;

    /// **Hot.** Starts the submission in slot `index` of the queue. False when the peer takes no more submissions. The
    /// submission was checked. It belongs to the backend from now on, until the backend finishes it.
    fn start(&self, peer: &Arc<Self::Peer>, index: u32) -> bool;

    /// **Hot.** Moves notifications out. Returns how many. By default those of the instance.
    fn notifications(&self, to: &mut [Notification]) -> usize {
        self.instance().notifications.take(to)
    }

    /// **Hot.** Whether a notification waits.
    fn has_notifications(&self) -> bool {
        !self.instance().notifications.is_empty()
    }

    /// Stops all threads of the instance: calls [`Instance::stop`], wakes them, and waits.
    ///
    /// # Errors
    /// `TIMEOUT` when something still ran at the deadline.
    fn shutdown(&self, deadline_ms: u64) -> Result<()>;
}

/// The error of a fence without a proof in time: pages stay quarantined. `what` says which writes may be in flight (`to
/// decode-0`), `pages` says which pages stay.
pub fn unproven(what: &str, pages: &str) -> Error {
    let text =
        format!("cannot prove that nothing is in flight {what}: {pages} must stay quarantined, try again");
    Error::new(ErrorCode::TIMEOUT, text)
}

/// The error for a number that belongs to no peer.
pub fn unknown_peer(id: PeerId) -> Error {
    Error::new(ErrorCode::INVALID_ARGUMENT, format!("no peer {}", id.0))
}

/// A transfer backend: the checks and the hot calls, around a [`Backend`].
///
/// When it is dropped, the backend's own drop ends what runs.
#[derive(Debug)]
pub struct Frontend<B>(B);

impl<B: Backend> Frontend<B> {
    /// Wraps an instance that runs.
    pub fn new(backend: B) -> Self {
        Self(backend)
    }

    /// The backend inside.
    pub fn backend(&self) -> &B {
        &self.0
    }

    fn nothing_waits(&self) -> bool {
        !self.0.instance().queue.has_done() && !self.0.has_notifications()
    }

    /// Keeps the event level-triggered: cleared once nothing waits, set again when something came meanwhile.
    fn settle_event(&self) {
        let event = &self.0.instance().event;
        if self.nothing_waits() {
            event.clear();
            if !self.nothing_waits() {
                event.signal();
            }
        }
    }
}

impl<B: Backend> TransferBackend for Frontend<B> {
    fn limits(&self) -> TransferLimits {
        self.0.instance().limits
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        self.0.instance().ready()?;
        self.0.register(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.0.instance().ready()?;
        self.0.deregister(region)
    }

    fn endpoint(&self) -> Result<Vec<u8>> {
        self.0.instance().ready()?;
        self.0.endpoint()
    }

    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        self.0.instance().ready()?;
        self.0.connect(name, endpoint)
    }

    fn disconnect(&self, id: PeerId) -> Result<()> {
        self.0.instance().ready()?;
        self.0.disconnect(id)
    }

    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        let instance = self.0.instance();
        let state = instance.state();
        if state != 0 {
            return state;
        }
        let Some(peer) = instance.peers.get(submission.peer) else { return ErrorCode::INVALID_ARGUMENT.0 };
        if peer.is_gone() {
            return ErrorCode::PEER_LOST.0;
        }
        if writes.len() > instance.limits.max_writes as usize
            || submission.notification_length as usize > NOTIFICATION_BYTES
            || self.0.misfit(&peer, writes).is_some()
        {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        let Some(index) = instance.queue.take_in(submission, &peer, writes) else {
            return ErrorCode::WOULD_BLOCK.0;
        };
        if !self.0.start(&peer, index) {
            instance.queue.give_back(index);
            return ErrorCode::PEER_LOST.0;
        }
        0
    }

    fn poll(&self, completions: &mut [Completion]) -> i32 {
        let instance = self.0.instance();
        let state = instance.state();
        if state != 0 {
            return state;
        }
        let taken = instance.queue.take(completions);
        self.settle_event();
        taken as i32
    }

    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        let state = self.0.instance().state();
        if state != 0 {
            return state;
        }
        let taken = self.0.notifications(notifications);
        self.settle_event();
        taken as i32
    }

    fn cancel(&self, tag: Tag) -> i32 {
        let instance = self.0.instance();
        match instance.state() {
            0 if instance.queue.cancel(tag) => 0,
            0 => ErrorCode::INVALID_ARGUMENT.0,
            state => state,
        }
    }

    fn settled(&self, tag: Tag) -> i32 {
        let instance = self.0.instance();
        match instance.state() {
            0 => i32::from(instance.queue.is_settled(tag)),
            state => state,
        }
    }

    fn event_fd(&self) -> i32 {
        self.0.instance().event.as_raw_fd()
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.0.shutdown(deadline_ms)
    }
}
