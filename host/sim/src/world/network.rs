//! Messages and connections.

use std::time::Duration;

use host_core::message::Message;
use host_core::{Event, Instance};

use super::{Clients, Pending, World};
use crate::times::Work;

/// The longest delay of a message that was held up in the network.
const HELD_UP: Duration = Duration::from_secs(5);

impl<C: Clients> World<C> {
    /// Sends a message that may get lost, come late, or come twice.
    pub(super) fn post(&mut self, from: Instance, to: Instance, floor: u64, message: &Message) {
        let (here, there) = (self.place(from), self.place(to));
        let said = |what: &str| format!("a message from worker {here} to worker {there} {what}");
        let copies = if self.strikes(self.faults.loss, || said("is lost")) {
            0
        } else if self.strikes(self.faults.repeat, || said("comes twice")) {
            2
        } else {
            1
        };
        if self.cut_off(here, there).is_some() {
            return;
        }
        for _ in 0..copies {
            let what = Pending::Deliver { to, from, floor, message: message.clone() };
            if self.strikes(self.faults.repeat, || said("is late")) {
                let wait = self.soon(HELD_UP);
                self.agenda.after(wait, what);
            } else {
                self.later(Work::Message { from: here, to: there }, what);
            }
        }
    }

    /// A handshake reaches prefill.
    pub(super) fn shake_hands(&mut self, decode: Instance, prefill: Instance, floor: u64) {
        if self.alive(decode).is_none() {
            return;
        }
        let ways = (self.place(decode), self.place(prefill));
        if self.handshake_is_lost(ways.0, ways.1, (decode, prefill)) {
            return;
        }
        let Some(place) = self.alive(prefill) else { return self.refused(decode, prefill) };
        let session = self.new_session(prefill, decode);
        // Actions that the scheduler still decides for the old session must not go out over the new connection. So it
        // decides before it learns of the new one.
        self.tick(place);
        self.handle(prefill, Event::PeerReady { peer: decode, floor, session });
        let way = Work::Handshake { from: place, to: self.place(decode) };
        self.later(way, Pending::Connected { decode, prefill });
    }

    fn refused(&mut self, decode: Instance, prefill: Instance) {
        let message = "connection refused".to_owned();
        self.handle(decode, Event::PeerRefused { peer: prefill, message });
    }

    fn new_session(&mut self, at: Instance, peer: Instance) -> u64 {
        self.last_session += 1;
        self.links.insert((at, peer), self.last_session);
        self.last_session
    }

    /// Prefill's answer to a handshake reaches decode.
    pub(super) fn connected(&mut self, decode: Instance, prefill: Instance) {
        if self.alive(decode).is_none() {
            return;
        }
        let ways = (self.place(prefill), self.place(decode));
        if self.handshake_is_lost(ways.0, ways.1, (decode, prefill)) {
            return;
        }
        if self.alive(prefill).is_none() {
            return self.refused(decode, prefill);
        }
        let session = self.new_session(decode, prefill);
        self.tell(decode, Event::PeerReady { peer: prefill, floor: 0, session });
    }

    pub(super) fn fence(&mut self, at: Instance, peer: Instance, session: u64) {
        let (here, there) = (self.place(at), self.place(peer));
        let cut = self.cut_off(here, there).or(self.cut_off(there, here)).is_some();
        let event = if self.fences_to_fail > 0 || (cut && self.random.chance(0.5)) {
            self.fences_to_fail = self.fences_to_fail.saturating_sub(1);
            self.outcome.fences_failed += 1;
            Event::FenceFailed { peer, session }
        } else {
            if self.links.get(&(at, peer)) == Some(&session) {
                self.cut(at, peer);
            }
            Event::PeerLost { peer, session, fenced: true }
        };
        // The event takes time, so a new connection may be there before it.
        self.later(Work::Loss { at: self.place(at) }, Pending::Tell { at, event });
    }

    /// Ends a connection in both directions: writes in flight land nowhere and settle with an error. Each side that was
    /// connected is told.
    pub(super) fn cut(&mut self, one: Instance, other: Instance) {
        self.unlink(one, other);
        self.unlink(other, one);
    }

    /// Ends one side of a connection, which is told of it.
    pub(super) fn unlink(&mut self, at: Instance, peer: Instance) {
        if let Some(session) = self.links.remove(&(at, peer)) {
            let event = Event::PeerLost { peer, session, fenced: true };
            self.later(Work::Loss { at: self.place(at) }, Pending::Tell { at, event });
        }
    }

    /// One side sees a connection break. Late writes may still land until the fence is proven.
    pub(super) fn disconnect(&mut self) {
        if self.links.is_empty() {
            return;
        }
        let which = self.random.place(self.links.len());
        let Some((&(at, peer), &session)) = self.links.iter().nth(which) else { return };
        self.outcome.disconnects += 1;
        self.fences_to_fail = self.random.below(3);
        self.handle(at, Event::PeerLost { peer, session, fenced: false });
    }
}
