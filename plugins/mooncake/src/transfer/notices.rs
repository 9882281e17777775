//! What peers did to us, on its way to the host.

use std::collections::VecDeque;
use std::sync::Mutex;

use host_plugin_api::{NOTIFICATION_BYTES, Notification, NotificationKind};

use super::queue::locked;
use super::wire::NAME_BYTES;

/// From so many on, what arrives is not acknowledged, so that senders wait for a host that does not take what came.
const MOST: usize = 4096;

/// See the module.
pub struct Notices(Mutex<VecDeque<Notification>>);

impl Notices {
    pub fn new() -> Self {
        // Peers that are lost are said beyond the mark.
        Self(Mutex::new(VecDeque::with_capacity(2 * MOST)))
    }

    pub fn is_full(&self) -> bool {
        locked(&self.0).len() >= MOST
    }

    pub fn is_empty(&self) -> bool {
        locked(&self.0).is_empty()
    }

    /// A submission's data is there. What is longer than a notification is nobody's, and dropped.
    pub fn arrived(&self, peer: &str, message: &[u8]) {
        if message.len() <= NOTIFICATION_BYTES {
            self.push(NotificationKind::ARRIVED, peer, message);
        }
    }

    pub fn peer_lost(&self, peer: &str) {
        self.push(NotificationKind::PEER_LOST, peer, &[]);
    }

    fn push(&self, kind: NotificationKind, peer: &str, message: &[u8]) {
        let mut payload = [0; NOTIFICATION_BYTES];
        payload[..message.len()].copy_from_slice(message);
        let mut peer_name = [0; NAME_BYTES];
        let used = peer.len().min(NAME_BYTES);
        peer_name[..used].copy_from_slice(&peer.as_bytes()[..used]);
        let (length, peer_name_length) = (message.len() as u32, used as u32);
        let notification = Notification { kind, length, peer_name_length, reserved: 0, payload, peer_name };
        locked(&self.0).push_back(notification);
    }

    /// Moves out as many as there is room for.
    pub fn take(&self, to: &mut [Notification]) -> usize {
        let mut from = locked(&self.0);
        let count = to.len().min(from.len());
        for (place, notification) in to.iter_mut().zip(from.drain(..count)) {
            *place = notification;
        }
        count
    }
}
