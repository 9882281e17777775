//! What is under way, and what happens when its time has come.

use host_core::message::Message;
use host_core::request::Request;
use host_core::{Event, Instance, Room};

use super::rooms::Arrival;
use super::storage::Batch as TierBatch;
use super::transfer::Landing;
use super::{DECODE, World};

/// Something under way that happens at its time.
pub(super) enum Pending {
    Deliver {
        to: Instance,
        from: Instance,
        floor: u64,
        message: Message,
    },
    Land(Box<Landing>),
    /// Decode copies what arrived into its pages.
    Copy(Box<Arrival>),
    /// Decode looks whether a room that it gave up is still copied.
    Close(Room),
    /// A worker has computed so many layers of a batch.
    Layers {
        at: Instance,
        batch: u64,
        layers: u32,
    },
    Settle {
        at: Instance,
        event: Event,
    },
    /// Prefill hears the handshake.
    Handshake {
        prefill: Instance,
        floor: u64,
    },
    /// Decode hears the answer.
    Connected {
        prefill: Instance,
    },
    Fence {
        at: Instance,
        peer: Instance,
        session: u64,
    },
    Cancel(Room),
    /// A query, a copy, a read or a write goes on, or ends.
    Below {
        at: Instance,
        batch: TierBatch,
    },
    Submit {
        to: Instance,
        request: Request,
    },
}

impl World {
    pub(super) fn happen(&mut self, what: Pending) {
        match what {
            Pending::Submit { to, request } => {
                let gone = self.clients.get(&request.room).is_none_or(|client| client.ended.is_some());
                let not_here = self.aggregated && to != DECODE;
                if !gone && !not_here {
                    let prefill =
                        (to == DECODE && !self.aggregated).then(|| request.prefill.clone()).flatten();
                    self.handle(to, Event::Submit(Request { prefill, ..request }));
                }
            }
            Pending::Cancel(room) => {
                if let Some(client) = self.clients.get_mut(&room)
                    && client.ended.is_none()
                {
                    client.ended = Some(false);
                    self.handle(self.prefill.instance, Event::Cancel(room));
                    self.handle(DECODE, Event::Cancel(room));
                }
            }
            Pending::Deliver { to, from, floor, message } => {
                self.handle(to, Event::Message { from, floor, message });
            }
            Pending::Land(landing) => self.land(*landing),
            Pending::Copy(arrival) => self.copy(&arrival),
            Pending::Close(room) => self.closed(room),
            Pending::Layers { at, batch, layers } => {
                let Some(worker) = self.worker(at) else { return };
                if let Some((_, current)) = worker.batch.as_ref().filter(|(_, current)| current.id == batch) {
                    worker.memory.compute(current, worker.layers, layers);
                    worker.layers = worker.layers.max(layers);
                }
                // The news may get lost, or come when the batch is over.
                if !self.random.chance(0.2) {
                    self.handle(at, Event::LayersDone { batch, layers });
                }
            }
            Pending::Settle { at, event } => self.handle(at, event),
            Pending::Handshake { prefill, floor } => self.shake_hands(prefill, floor),
            Pending::Connected { prefill } => self.connected(prefill),
            Pending::Below { at, batch } => self.below(at, batch),
            Pending::Fence { at, peer, session } => self.fence(at, peer, session),
        }
    }
}
