//! How a connection begins: a hello from the sender, an inbound endpoint and a welcome from the receiver, and then the link.

use std::sync::Arc;
use std::time::Instant;

use host_plugin_api::{Error, ErrorCode, PeerId, Result};

use super::stage::Stage;
use super::{Connection, Connections, Inbound, Link, Opening, Transport};
use crate::linked::{Reply, answer};
use crate::peer::{LinkedPeer, Mailbox};
use crate::regions::RegionDescriptor;
use crate::system::Random;
use crate::wire::{Endpoint, Message};

/// A connect that was not answered yet.
pub(super) struct Connecting<M> {
    pub id: u32,
    pub instance: Random,
    /// The host's name for the peer, and the name under which the peer was opened.
    names: (String, String),
    deadline: Instant,
    reply: Reply<PeerId>,
    /// Set once the peer has opened its end. The link is then being opened.
    peer: Option<Arc<LinkedPeer<M>>>,
}

impl<M: Mailbox> Connecting<M> {
    /// Ends the connect with an error.
    pub fn fail(self, error: Error) {
        if let Some(peer) = self.peer {
            peer.set_gone();
        }
        answer(&self.reply, Err(error));
    }

    /// Whether the peer has opened its end.
    pub fn is_welcome(&self) -> bool {
        self.peer.is_some()
    }

    /// The host's name for the peer.
    pub fn name(&self) -> &str {
        &self.names.0
    }
}

impl<T: Transport> Connections<T> {
    /// Sends a hello. The answer to it continues the connect.
    pub(super) fn connect(&mut self, name: String, endpoint: Endpoint, reply: Reply<PeerId>) {
        let most = self.settings.max_peers;
        // The host cannot disconnect a link that was replaced.
        let links = self.links.values().filter(|link| !link.replaced).count();
        if links + self.connecting.len() >= most {
            let text = format!("{most} peers are connected, disconnect one first");
            return answer(&reply, Err(Error::new(ErrorCode::NO_RESOURCE, text)));
        }
        let Endpoint { token, instance, name: own_name, address } = endpoint;
        if let Err(error) = self.transport.meet(instance, &name, &address) {
            return answer(&reply, Err(error));
        }
        self.last_link += 1;
        let id = self.last_link;
        let deadline = Instant::now() + self.settings.connect_timeout;
        let names = (name, own_name);
        self.connecting.push(Connecting { id, instance, names, deadline, reply, peer: None });
        let hello = Message::Hello { token, name: self.shared.instance.name.clone() };
        self.transport.say(instance, id.into(), hello);
    }

    /// Handles the hello of an instance that wants to send to this one.
    pub(super) fn hello(&mut self, connection: Connection, token: Random, name: String) {
        match self.open_inbound(connection, token, name) {
            Ok(Some(address)) => self.inbound_opened(connection, Ok(address)),
            Ok(None) => {}
            Err(error) => self.refuse(connection, error),
        }
    }

    fn refuse(&mut self, connection: Connection, error: Error) {
        let refused = Message::Refused { code: error.code.0, reason: error.message };
        self.transport.say(connection.instance, connection.number, refused);
    }

    fn open_inbound(
        &mut self,
        connection: Connection,
        token: Random,
        peer_name: String,
    ) -> Result<Option<Vec<u8>>> {
        if token != self.token {
            return Err(Error::new(ErrorCode::PEER_LOST, "this endpoint is of an instance that is gone"));
        }
        if self.is_inbound_open(connection).is_some() {
            return Ok(None);
        }
        let most = self.settings.max_peers;
        if self.inbound.len() >= most {
            return Err(Error::new(ErrorCode::NO_RESOURCE, format!("{most} peers are connected")));
        }
        let regions = self.shared.region_descriptors();
        let address = self.transport.open_inbound(connection, &peer_name, &regions)?;
        let opening = Opening::Begun;
        self.inbound.push(Inbound { connection, peer_name, regions, opening, cut: false, report: false });
        Ok(address)
    }

    /// To be called when the transport has opened an inbound endpoint at this address, or could not.
    pub fn inbound_opened(&mut self, connection: Connection, opened: Result<Vec<u8>>) {
        let Some(inbound) = self.inbound.iter_mut().find(|inbound| inbound.connection == connection) else {
            return;
        };
        match opened {
            Ok(_) if inbound.opening == Opening::Closing => {
                if self.transport.close_inbound(connection) {
                    self.inbound_closed(connection);
                }
            }
            Ok(address) => {
                inbound.opening = Opening::Open;
                // If one of these regions was deregistered meanwhile, that deregistration closes the endpoint.
                let welcome = Message::Welcome { address, regions: inbound.regions.clone() };
                self.transport.say(connection.instance, connection.number, welcome);
            }
            Err(error) => {
                self.inbound_closed(connection);
                self.refuse(connection, error);
            }
        }
    }

    /// Handles the answer to a hello.
    pub(super) fn welcome(
        &mut self,
        instance: Random,
        number: u64,
        answered: Result<(Vec<u8>, Vec<RegionDescriptor>)>,
    ) {
        let matches = |c: &Connecting<_>| c.instance == instance && u64::from(c.id) == number;
        let Some(at) = self.connecting.iter().position(matches) else {
            // The answer is too late: nothing will come through that endpoint.
            if answered.is_ok() {
                self.transport.say(instance, number, Message::Cut);
            }
            return;
        };
        let (address, regions) = match answered {
            Ok(answered) => answered,
            Err(error) => return self.connecting.swap_remove(at).fail(error),
        };
        let connecting = &mut self.connecting[at];
        let id = connecting.id;
        let names = connecting.names.clone();
        let peer = LinkedPeer::new(PeerId(id), names, instance, regions, self.transport.mailbox());
        let peer = Arc::new(peer);
        connecting.peer = Some(peer.clone());
        match self.transport.open_link(peer, address) {
            Ok(true) => self.link_opened(id, Ok(())),
            Ok(false) => {}
            Err(error) => self.link_opened(id, Err(error)),
        }
    }

    /// To be called when the transport has opened a link, or could not.
    pub fn link_opened(&mut self, id: u32, opened: Result<()>) {
        let Some(at) = self.connecting.iter().position(|connecting| connecting.id == id) else { return };
        let mut connecting = self.connecting.swap_remove(at);
        let (Ok(()), Some(peer)) = (&opened, connecting.peer.take()) else {
            let instance = connecting.instance;
            let lost = || Error::new(ErrorCode::INTERNAL, "a link was opened to nothing");
            connecting.fail(opened.err().unwrap_or_else(lost));
            return self.transport.say(instance, id.into(), Message::Cut);
        };
        self.replace_lost_links(&peer.name);
        self.shared.instance.peers.add(peer.clone(), usize::MAX, |_| false);
        self.links
            .insert(id, Link { peer, stage: Stage::Open, close_sent: None, told: false, replaced: false });
        answer(&connecting.reply, Ok(PeerId(id)));
    }

    /// Replaces lost connections by a new one of that name. Their ids are unknown from then on, even if something of
    /// them is still in flight.
    fn replace_lost_links(&mut self, name: &str) {
        let lost = |link: &Link<_>| link.stage != Stage::Open && link.peer.name == name;
        let lost: Vec<u32> = self.links.iter().filter(|(_, link)| lost(link)).map(|(id, _)| *id).collect();
        for id in lost {
            self.shared.instance.peers.remove(PeerId(id));
            let Some(link) = self.links.get_mut(&id) else { continue };
            link.replaced = true;
            if link.stage.is_over() {
                self.forget_link(id);
            }
        }
    }

    pub(super) fn forget_link(&mut self, id: u32) {
        self.links.remove(&id);
        self.transport.remove_link(id);
        self.shared.instance.peers.remove(PeerId(id));
    }

    /// Takes out the connects that are chosen.
    pub(super) fn take_connecting(
        &mut self,
        chosen: impl Fn(&Connecting<T::Mailbox>) -> bool,
    ) -> Vec<Connecting<T::Mailbox>> {
        let (taken, kept) = std::mem::take(&mut self.connecting).into_iter().partition(chosen);
        self.connecting = kept;
        taken
    }

    /// Ends the connects that no peer answered in time.
    pub(super) fn end_waiting(&mut self, now: Instant) {
        for connecting in self.take_connecting(|connecting| now >= connecting.deadline) {
            let text = format!("no peer answers for {}", connecting.name());
            let (instance, number) = (connecting.instance, connecting.id.into());
            connecting.fail(Error::new(ErrorCode::PEER_LOST, text));
            // If there is an inbound endpoint by now, nothing will come through it.
            self.transport.say(instance, number, Message::Cut);
        }
    }
}
