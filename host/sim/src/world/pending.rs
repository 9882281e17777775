//! What is under way, and what happens when its time has come.

use host_core::message::Message;
use host_core::request::Request;
use host_core::{Event, Instance, Room};

use super::rooms::Arrival;
use super::storage::TierWork;
use super::transfer::Landing;
use super::{Clients, World};

/// Something under way that happens at its time.
pub(super) enum Pending {
    /// A request reaches a worker.
    Submit {
        to: Instance,
        request: Request,
    },
    /// A client leaves.
    Cancel(Room),
    /// The router sees a leg break.
    Lose {
        room: Room,
        leg: Instance,
    },
    /// A worker that stood still goes on.
    Thaw {
        place: usize,
    },
    Deliver {
        to: Instance,
        from: Instance,
        floor: u64,
        message: Message,
    },
    /// A worker has computed so many layers of a batch.
    Layers {
        at: Instance,
        batch: u64,
        layers: u32,
    },
    Computed {
        at: Instance,
        batch: u64,
    },
    /// A worker gets an event.
    Tell {
        at: Instance,
        event: Event,
    },
    /// A prefill worker gets the handshake.
    Handshake {
        decode: Instance,
        prefill: Instance,
        floor: u64,
    },
    /// A decode worker gets the answer.
    Connected {
        decode: Instance,
        prefill: Instance,
    },
    Fence {
        at: Instance,
        peer: Instance,
        session: u64,
    },
    Land(Box<Landing>),
    /// What arrived is copied into the pages that it is for.
    Copy(Box<Arrival>),
    /// A worker looks whether a room that it gave up is still copied.
    Close {
        at: Instance,
        room: Room,
    },
    /// A query, a copy, a read or a write goes on, or ends.
    Tier {
        at: Instance,
        work: TierWork,
    },
}

impl<C: Clients> World<C> {
    pub(super) fn happen(&mut self, what: Pending) {
        match what {
            Pending::Submit { to, request } => self.submit(to, request),
            Pending::Cancel(room) => self.cancel(room),
            Pending::Lose { room, leg } => self.lose(room, leg),
            Pending::Thaw { place } => self.thaw(place),
            Pending::Deliver { to, from, floor, message } => {
                self.handle(to, Event::Message { from, floor, message });
            }
            Pending::Layers { at, batch, layers } => self.layers(at, batch, layers),
            Pending::Computed { at, batch } => self.computed(at, batch),
            Pending::Tell { at, event } => self.handle(at, event),
            Pending::Handshake { decode, prefill, floor } => self.shake_hands(decode, prefill, floor),
            Pending::Connected { decode, prefill } => self.connected(decode, prefill),
            Pending::Fence { at, peer, session } => self.fence(at, peer, session),
            Pending::Land(landing) => self.land(*landing),
            Pending::Copy(arrival) => self.copy(&arrival),
            Pending::Close { at, room } => self.closed(at, room),
            Pending::Tier { at, work } => self.tier(at, work),
        }
    }
}
