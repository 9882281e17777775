//! Notifications of peers' ranks, and the verification of pages that arrived.

use host_core::Event;
use host_core::aux_row::AUX_ROW_BYTES;
use host_core::heads::HeadLane;
use host_core::notice::{KIND, KIND_LANE, LaneNotice};
use host_plugin_api::transfer::{NOTIFICATION_BYTES, Notification, NotificationKind};

use super::{BATCH, Report, Thread, Verification, counted};
use crate::channels::Input;
use crate::complaints::Failed;
use crate::lane_sums;
use crate::link::rank_of;

/// A notification, and the link that was in use when it was taken. The link may be replaced before the notification is
/// handled.
pub(super) struct Taken {
    notification: Notification,
    /// The session of that link, if the notification says that a peer is gone.
    session: Option<u64>,
}

impl Thread {
    pub(super) fn take_notifications(&self) -> Result<Vec<Taken>, Failed> {
        let blank = Notification {
            kind: NotificationKind(0),
            length: 0,
            peer_name_length: 0,
            reserved: 0,
            payload: [0; NOTIFICATION_BYTES],
            peer_name: [0; 64],
        };
        let mut notifications = [blank; BATCH];
        let count = counted("notifications", self.backend.notifications(&mut notifications))?;
        let taken = |notification: &Notification| {
            let lost = notification.kind == NotificationKind::PEER_LOST;
            let peer = rank_of(name(notification)).filter(|_| lost);
            let link = peer.and_then(|(peer, _)| self.start.links.get(peer));
            Taken { notification: *notification, session: link.map(|link| link.session) }
        };
        Ok(notifications[..count].iter().map(taken).collect())
    }

    pub(super) fn notified(&mut self, Taken { notification, session }: &Taken) {
        match notification.kind {
            NotificationKind::ARRIVED => self.arrived(notification),
            NotificationKind::PEER_LOST => self.peer_lost(notification, *session),
            _ => {}
        }
    }

    fn arrived(&mut self, notification: &Notification) {
        let length = (notification.length as usize).min(NOTIFICATION_BYTES);
        let (payload, name) = (&notification.payload[..length], name(notification));
        let message = payload.get(KIND).filter(|kind| **kind == KIND_LANE);
        let lane = message.and_then(|_| LaneNotice::decode(payload));
        let (rank, sender) = (self.start.rank, rank_of(name));
        match (lane, sender) {
            (Some(lane), Some((peer, source)))
                if usize::from(lane.source) == source && usize::from(lane.target) == rank =>
            {
                self.report(Report::Landed { rank, peer, notice: lane });
            }
            (None, Some(sender)) if self.heard(sender, payload) => {}
            _ => {
                let plugin = self.start.links.plugin_name();
                tracing::warn!(
                    plugin,
                    name,
                    length,
                    rank,
                    "a peer sent a notification that is not for this rank; it is dropped"
                );
            }
        }
    }

    /// Handles the loss of one of a peer's ranks, which loses the whole link. The link is fenced on another thread,
    /// because the peer's other ranks may still write.
    fn peer_lost(&mut self, notification: &Notification, session: Option<u64>) {
        let Some((peer, rank)) = rank_of(name(notification)) else { return };
        tracing::warn!(%peer, rank, "the transfer plugin says that a peer is gone");
        // If the link was removed, the scheduler was told then.
        let Some(session) = session else { return };
        self.staging_lost(peer, session);
        self.tell(Input::Event(Event::PeerLost { peer, session, fenced: false }));
    }

    /// Digests the pages that have arrived, and reports the digests.
    ///
    /// # Errors
    /// When the device that holds the pool fails.
    pub(super) fn verify(&self, verification: &Verification) -> Result<(), String> {
        let rank = self.start.rank;
        let aux_row = (rank == 0).then(|| {
            let mut row = Box::new([0; AUX_ROW_BYTES]);
            let place = verification.aux_slot as usize * AUX_ROW_BYTES;
            // SAFETY: the peer has said that the row has arrived, and the scheduler gives it to no other before it was read. A
            // peer that writes all the same breaks the protocol, and what is read then is checked like any row.
            unsafe { self.start.links.aux().read(place, &mut row[..]) };
            row
        });
        let sums = || {
            let kv = &self.own().kv;
            let layers = 0..kv.layout().shape.layers;
            let lanes = verification.lanes.iter().filter(|lane| lane.target == rank);
            let sum = |lane: &HeadLane| {
                let pages = (0..).zip(verification.pages.iter().copied());
                Ok((lane.source, lane_sums::of(kv, pages, &layers, &lane.heads)?))
            };
            lanes.map(sum).collect::<Result<_, String>>()
        };
        let found = self.start.page_integrity.then(sums).transpose()?;
        let (room, attempt) = (verification.room, verification.attempt);
        self.report(Report::Checked { rank, room, attempt, aux_row, found });
        Ok(())
    }
}

fn name(notification: &Notification) -> &str {
    let length = (notification.peer_name_length as usize).min(notification.peer_name.len());
    std::str::from_utf8(&notification.peer_name[..length]).unwrap_or_default()
}
