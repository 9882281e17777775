//! Notifications that the host has not fetched yet.

use host_plugin_api::Notification;
use host_transfer_kit::locked;

use crate::shared::Core;

impl Core {
    /// Whether a notification waits for the host.
    pub fn has_notifications(&self) -> bool {
        !self.instance.notifications.is_empty() || locked(&self.inbound).iter().any(|peer| peer.has_waiting())
    }

    /// Fills `notifications` from the front, and says how many there were.
    pub fn take_notifications(&self, notifications: &mut [Notification]) -> usize {
        let (taken, any_lost) = self.take_of_connections(notifications);
        if any_lost {
            // The service thread drops the connection, because that unmaps memory and closes files.
            self.wake.signal();
        }
        taken + self.instance.notifications.take(&mut notifications[taken..])
    }

    /// Returns how many there were, and whether one said that its connection is lost.
    fn take_of_connections(&self, notifications: &mut [Notification]) -> (usize, bool) {
        let inbound = locked(&self.inbound);
        let (mut taken, mut any_lost) = (0, false);
        // One notification of each peer per round, so that a peer with many does not hold up the others.
        let mut before = usize::MAX;
        while before != taken {
            before = taken;
            for peer in inbound.iter() {
                if taken < notifications.len()
                    && let Some(notification) = peer.take()
                {
                    any_lost |= peer.is_finished();
                    notifications[taken] = notification;
                    taken += 1;
                }
            }
        }
        (taken, any_lost)
    }
}
