//! Messages and connections.

use host_core::message::Message;
use host_core::{Event, Instance, Role, Room};

use super::{DECODE, Pending, Worker, World};

impl World {
    /// Prefill hears a handshake.
    pub(super) fn shake_hands(&mut self, prefill: Instance, floor: u64) {
        if self.prefill.instance != prefill {
            let message = "connection refused".to_owned();
            return self.handle(DECODE, Event::PeerRefused { peer: prefill, message });
        }
        self.last_session += 1;
        let session = self.last_session;
        self.prefill_link = Some(session);
        // What the old session still decides between the new connection and the news of it must not go out
        // over the new one.
        self.tick(true);
        self.handle(prefill, Event::PeerReady { peer: DECODE, floor, session });
        let after = self.soon(50);
        self.schedule(after, Pending::Connected { prefill });
    }

    /// Decode hears prefill's answer.
    pub(super) fn connected(&mut self, prefill: Instance) {
        if self.prefill.instance != prefill {
            let message = "connection refused".to_owned();
            return self.handle(DECODE, Event::PeerRefused { peer: prefill, message });
        }
        self.last_session += 1;
        let session = self.last_session;
        self.decode_link = Some(session);
        let after = self.soon(20);
        let event = Event::PeerReady { peer: prefill, floor: 0, session };
        self.schedule(after, Pending::Settle { at: DECODE, event });
    }

    pub(super) fn fence(&mut self, at: Instance, peer: Instance, session: u64) {
        let event = if self.fence_fails > 0 {
            self.fence_fails -= 1;
            self.outcome.fences_failed += 1;
            Event::FenceFailed { peer, session }
        } else {
            let ours = if at == DECODE { self.decode_link } else { self.prefill_link };
            if ours == Some(session) {
                self.cut();
            }
            Event::PeerLost { peer, session, fenced: true }
        };
        // The news takes its time; a new connection may be there first.
        let after = self.soon(200);
        self.schedule(after, Pending::Settle { at, event });
    }

    /// Ends the connection in both directions: writes in flight land nowhere and settle with an error. Each side that
    /// did not ask for it hears of it.
    pub(super) fn cut(&mut self) {
        let prefill = self.prefill.instance;
        let ends = [(DECODE, prefill, self.decode_link.take()), (prefill, DECODE, self.prefill_link.take())];
        for (at, peer, session) in ends {
            if let Some(session) = session {
                let after = self.soon(50);
                let event = Event::PeerLost { peer, session, fenced: true };
                self.schedule(after, Pending::Settle { at, event });
            }
        }
    }

    pub(super) fn kill_prefill(&mut self) {
        self.outcome.deaths += 1;
        let dead = self.prefill.instance;
        let pages = self.prefill.scheduler.stats().pool;
        let total = (pages.free + pages.held + pages.cached + pages.quarantined) as u32;
        let (instance, groups) = (Instance(dead.0 + 1), self.layer_groups);
        self.prefill = Worker::new(instance, Role::Prefill, total, self.faults, groups, self.sliding);
        // A dead process writes no more; the backend tells us so.
        self.prefill_link = None;
        if let Some(session) = self.decode_link.take() {
            let after = self.soon(50);
            let event = Event::PeerLost { peer: dead, session, fenced: true };
            self.schedule(after, Pending::Settle { at: DECODE, event });
        }
        // The router sees the prefill legs break and gives the decode legs up.
        let rooms: Vec<Room> =
            self.clients.iter().filter(|(_, c)| c.ended.is_none()).map(|(r, _)| *r).collect();
        for room in rooms {
            let after = self.soon(100);
            self.schedule(after, Pending::Cancel(room));
        }
        for _ in 0..3 {
            let at = 200 + self.random.below(1_000);
            self.add_request(at);
        }
    }

    /// One side sees the connection break; late writes may still land until the fence is proven.
    pub(super) fn drop_connection(&mut self) {
        let prefill = self.prefill.instance;
        let at_decode = self.random.chance(0.7);
        let (at, peer, session) = match at_decode {
            true => (DECODE, prefill, self.decode_link),
            false => (prefill, DECODE, self.prefill_link),
        };
        let Some(session) = session else { return };
        self.outcome.disconnects += 1;
        self.fence_fails = self.random.below(3);
        self.handle(at, Event::PeerLost { peer, session, fenced: false });
    }

    pub(super) fn post(&mut self, from: Instance, to: Instance, floor: u64, message: &Message) {
        let copies = if self.random.chance(self.faults.loss) {
            0
        } else if self.random.chance(self.faults.repeat) {
            2
        } else {
            1
        };
        for _ in 0..copies {
            let most = if self.random.chance(self.faults.repeat) { 5_000 } else { 50 };
            let after = self.soon(most);
            self.schedule(after, Pending::Deliver { to, from, floor, message: message.clone() });
        }
    }
}
