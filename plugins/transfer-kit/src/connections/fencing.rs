//! The proofs at the end of connections: fences, and deregistrations of regions.

use std::time::Instant;

use host_plugin_api::{PeerId, RegionId};

use super::stage::Event;
use super::{Connection, Connections, Transport};
use crate::backend::{unknown_peer, unproven};
use crate::linked::{Reply, answer};

/// A disconnect that waits for its proof.
pub(super) struct Fence {
    peer: PeerId,
    name: String,
    /// The inbound endpoints that were there when it began. Those that come later belong to other connections.
    inbound: Vec<Connection>,
    deadline: Instant,
    reply: Reply<()>,
}

/// A deregistration that waits until nothing reads or writes the region any more.
pub(super) struct Deregistration {
    region: RegionId,
    deadline: Instant,
    reply: Reply<()>,
}

impl<T: Transport> Connections<T> {
    /// Ends the connections to and from a peer.
    pub(super) fn disconnect(&mut self, id: PeerId, reply: Reply<()>) {
        self.end_link(id.0, Event::End);
        let Some(link) = self.links.get_mut(&id.0) else {
            return answer(&reply, Err(unknown_peer(id)));
        };
        link.told = true;
        let (instance, name) = (link.peer.instance, link.peer.name.clone());
        let inbound = self.close_inbound(|inbound| inbound.connection.instance == instance);
        self.ask_to_close(id.0);
        let deadline = Instant::now() + self.settings.fence_timeout;
        self.fences.push(Fence { peer: id, name, inbound, deadline, reply });
    }

    /// Deregisters a region, which new submissions cannot name any more.
    pub(super) fn deregister(&mut self, region: RegionId, reply: Reply<()>) {
        // Peers know the region by its address, and only a closed inbound endpoint keeps them away from it.
        self.close_inbound(|inbound| inbound.regions.iter().any(|behind| behind.id == region));
        self.transport.let_go(region);
        let deadline = Instant::now() + self.settings.fence_timeout;
        self.deregistrations.push(Deregistration { region, deadline, reply });
    }

    pub(super) fn finish_fences(&mut self, now: Instant) {
        for fence in std::mem::take(&mut self.fences) {
            let id = fence.peer.0;
            // A link that was replaced meanwhile was forgotten when it was over.
            let over = self.links.get(&id).is_none_or(|link| link.stage.is_over());
            if over && !fence.inbound.iter().any(|c| self.is_inbound_open(*c).is_some()) {
                if self.links.contains_key(&id) {
                    self.forget_link(id);
                }
                answer(&fence.reply, Ok(()));
            } else if now >= fence.deadline {
                answer(&fence.reply, Err(unproven(&format!("to {}", fence.name), "pages it may be sent")));
            } else {
                self.fences.push(fence);
            }
        }
    }

    pub(super) fn finish_deregistrations(&mut self, now: Instant) {
        for waiting in std::mem::take(&mut self.deregistrations) {
            let region = waiting.region;
            let inbound = self.inbound.iter().any(|i| i.regions.iter().any(|behind| behind.id == region));
            let free = if inbound { Ok(false) } else { self.transport.has_let_go(region) };
            match free {
                Err(error) => answer(&waiting.reply, Err(error)),
                Ok(true) => answer(&waiting.reply, Ok(())),
                Ok(false) if now >= waiting.deadline => {
                    answer(&waiting.reply, Err(unproven(&format!("from region {}", region.0), "its pages")));
                }
                Ok(false) => self.deregistrations.push(waiting),
            }
        }
    }
}
