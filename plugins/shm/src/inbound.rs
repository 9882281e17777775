//! A connection on which we are the receiver.

use std::os::fd::OwnedFd;
use std::time::Instant;

use host_plugin_api::{Notification, NotificationKind};
use host_transfer_kit::{Random, notification};

use crate::control::ControlPage;
use crate::mapping::SharedPage;
use crate::sync::atomic::{AtomicBool, Ordering};

/// See the module.
pub struct Inbound {
    pub instance: Random,
    pub name: String,
    pub socket: OwnedFd,
    pub control: SharedPage<ControlPage>,
    /// The sender's end of the socket is closed. That proves that none of its writes will land: a sender closes after
    /// its copy threads have let go, and when a process dies, the kernel takes its threads' address space before it
    /// closes their files, so no copy can be under way once we see the end.
    lost: AtomicBool,
    /// The host was told, or need not be. The service thread may let go.
    finished: AtomicBool,
}

impl Inbound {
    pub fn new(instance: Random, name: String, socket: OwnedFd, control: SharedPage<ControlPage>) -> Self {
        let (lost, finished) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { instance, name, socket, control, lost, finished }
    }

    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    pub fn set_lost(&self) {
        self.lost.store(true, Ordering::SeqCst);
    }

    pub fn is_finished(&self) -> bool {
        self.finished.load(Ordering::SeqCst)
    }

    /// From now on nothing of this connection is reported.
    pub fn finish(&self) {
        self.finished.store(true, Ordering::SeqCst);
    }

    /// Closes the gate and waits until no thread can be behind it. False when that could not be proven in time.
    pub fn fence(&self, deadline: Instant) -> bool {
        self.control.close();
        self.wait(deadline)
    }

    /// Waits until every copy that began before this call has ended, or the sender is proven gone.
    pub fn wait(&self, deadline: Instant) -> bool {
        self.control.wait(deadline, || self.is_lost())
    }

    /// The next thing to tell the host: what arrived, and last that the peer is gone.
    pub fn take(&self) -> Option<Notification> {
        if self.is_finished() {
            return None;
        }
        // Looked at before the ring: what was pushed before the end is seen by the take that follows.
        let lost = self.is_lost();
        if let Some((payload, length)) = self.control.take() {
            return Some(notification(NotificationKind::ARRIVED, &self.name, &payload[..length as usize]));
        }
        if lost {
            self.finish();
            return Some(notification(NotificationKind::PEER_LOST, &self.name, &[]));
        }
        None
    }

    pub fn has_waiting(&self) -> bool {
        !self.is_finished() && (self.is_lost() || self.control.has_waiting())
    }
}
