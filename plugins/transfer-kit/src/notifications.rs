//! Notifications of this instance's peers, on their way to the host.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use host_plugin_api::{NOTIFICATION_BYTES, Notification, NotificationKind};

use crate::locked::locked;
use crate::wire::NAME_BYTES;

/// Makes a notification. A text that is longer than its field is cut: 48 bytes of message, 64 of name.
pub fn notification(kind: NotificationKind, peer: &str, message: &[u8]) -> Notification {
    let mut payload = [0; NOTIFICATION_BYTES];
    let length = message.len().min(NOTIFICATION_BYTES);
    payload[..length].copy_from_slice(&message[..length]);
    let mut peer_name = [0; NAME_BYTES];
    let used = peer.len().min(NAME_BYTES);
    peer_name[..used].copy_from_slice(&peer.as_bytes()[..used]);
    let (length, peer_name_length) = (length as u32, used as u32);
    Notification { kind, length, peer_name_length, reserved: 0, payload, peer_name }
}

/// Notifications that the host has not fetched yet, in their order.
#[derive(Debug)]
pub struct Notifications {
    waiting: Mutex<VecDeque<Notification>>,
    most: usize,
    /// Signalled when the host has fetched some.
    fetched: Condvar,
}

impl Notifications {
    /// Room for `most` notifications, and for as many again that come before the backend checks whether it is full.
    pub fn new(most: usize) -> Self {
        Self { waiting: Mutex::new(VecDeque::with_capacity(2 * most)), most, fetched: Condvar::new() }
    }

    /// Whether as many wait as may wait. The backend then takes nothing more from its peers until the host has fetched some.
    pub fn is_full(&self) -> bool {
        locked(&self.waiting).len() >= self.most
    }

    /// Waits until there is room for one more, but no longer than `most`. Returns whether there is room.
    pub fn wait_for_room(&self, most: Duration) -> bool {
        let waiting = locked(&self.waiting);
        let full = |waiting: &mut VecDeque<Notification>| waiting.len() >= self.most;
        let waited = self.fetched.wait_timeout_while(waiting, most, full);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        locked(&self.waiting).is_empty()
    }

    /// Adds the notification for a submission whose data is there. A longer message than a notification holds is
    /// dropped: it comes from no instance of the same plugin.
    pub fn arrived(&self, peer: &str, message: &[u8]) {
        if message.len() <= NOTIFICATION_BYTES {
            self.push(notification(NotificationKind::ARRIVED, peer, message));
        }
    }

    /// Adds the notification that a peer is lost, and none of its writes lands any more. Added also when full.
    pub fn peer_lost(&self, peer: &str) {
        self.push(notification(NotificationKind::PEER_LOST, peer, &[]));
    }

    fn push(&self, notification: Notification) {
        locked(&self.waiting).push_back(notification);
    }

    /// **Hot.** Moves out as many as there is room for. Returns how many.
    pub fn take(&self, to: &mut [Notification]) -> usize {
        let mut from = locked(&self.waiting);
        let count = to.len().min(from.len());
        for (place, notification) in to.iter_mut().zip(from.drain(..count)) {
            *place = notification;
        }
        drop(from);
        if count > 0 {
            self.fetched.notify_all();
        }
        count
    }
}
