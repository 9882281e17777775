//! How a connection comes to be: hello from the one that will send, welcome from the other.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

use host_plugin_api::{Error, ErrorCode, PeerId, Result};

use crate::capi::{Agent, Refusal};
use crate::door::Door;
use crate::driver::{Driver, Front, MAX_PEERS};
use crate::link::Link;
use crate::regions::Card;
use crate::shared::Peer;
use crate::wire::{Body, Endpoint, Random};

/// A hello that was not answered yet.
pub struct Connecting {
    pub id: u32,
    pub instance: Random,
    /// What the host calls the peer, and the name it was opened under.
    names: (String, String),
    agent: Agent,
    pub deadline: Instant,
    reply: SyncSender<Result<PeerId>>,
}

impl Connecting {
    /// Ends in an error. The agent goes with it.
    pub fn fail(self, error: Error) {
        // Whoever asked has given up when nobody takes the answer.
        let _gone = self.reply.try_send(Err(error)).is_err();
    }

    pub fn name(&self) -> &str {
        &self.names.0
    }
}

fn io(refusal: Refusal) -> Error {
    Error::new(ErrorCode::IO, refusal.to_string())
}

impl Driver {
    /// Sends a hello, whose answer ends the call.
    pub fn connect(&mut self, name: String, endpoint: Endpoint, reply: SyncSender<Result<PeerId>>) {
        if let Err(error) = self.call(name, endpoint, &reply) {
            let _gone = reply.try_send(Err(error)).is_err();
        }
    }

    fn call(&mut self, name: String, endpoint: Endpoint, reply: &SyncSender<Result<PeerId>>) -> Result<()> {
        if self.links.len() + self.connecting.len() >= MAX_PEERS {
            let text = format!("{MAX_PEERS} peers are connected, disconnect one first");
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        }
        let Endpoint { token, instance, name: own_name, front } = endpoint;
        self.learn_front(instance, &front).map_err(|refusal| {
            let text = format!(
                "{name} cannot be reached over devices = {:?}; if it is on another machine, set devices in \
                 [plugin.nixl] to a network that both are on: {refusal}",
                self.shared.config.devices
            );
            Error::new(ErrorCode::PEER_LOST, text)
        })?;
        self.last_link += 1;
        let id = self.last_link;
        let agent = self.maker.agent(&format!("link-{id}"), false).map_err(io)?;
        let front = self.front.metadata().map_err(io)?;
        let deadline = Instant::now() + self.shared.config.connect_timeout();
        let names = (name, own_name);
        self.connecting.push(Connecting { id, instance, names, agent, deadline, reply: reply.clone() });
        let hello = Body::Hello { token, name: self.shared.name.clone(), front };
        self.say(instance, id.into(), hello);
        Ok(())
    }

    /// Makes another instance known, if it is not yet.
    fn learn_front(&mut self, instance: Random, metadata: &[u8]) -> std::result::Result<(), Refusal> {
        if self.fronts.contains_key(&instance) {
            return Ok(());
        }
        let agent = self.front.learn(metadata)?;
        let front = Front { agent, asked: Instant::now(), unanswered: 0 };
        self.fronts.insert(instance, front);
        Ok(())
    }

    /// Somebody wants to send to us.
    pub fn hello(&mut self, instance: Random, connection: u64, token: Random, name: String, front: &[u8]) {
        // Without a way to answer, the caller's time runs out.
        if self.fronts.len() >= 2 * MAX_PEERS || self.learn_front(instance, front).is_err() {
            return;
        }
        let body = match self.open_door(instance, connection, token, name) {
            Ok((door, regions)) => Body::Welcome { door, regions },
            Err(error) => Body::Refused { code: error.code.0, reason: error.message },
        };
        self.say(instance, connection, body);
    }

    fn open_door(
        &mut self,
        instance: Random,
        connection: u64,
        token: Random,
        name: String,
    ) -> Result<(Vec<u8>, Vec<Card>)> {
        if token != self.token {
            return Err(Error::new(ErrorCode::PEER_LOST, "this endpoint is of an instance that is gone"));
        }
        if self.doors.len() >= MAX_PEERS {
            return Err(Error::new(ErrorCode::NO_RESOURCE, format!("{MAX_PEERS} peers are connected")));
        }
        self.doors_made += 1;
        let with_thread = self.doors.iter().filter(|door| door.has_thread).count();
        let has_thread = self.shared.config.progress_threads.next_has_one(self.doors.len(), with_thread);
        let mut agent = self.maker.agent(&format!("door-{}", self.doors_made), has_thread).map_err(io)?;
        let regions = self.shared.cards();
        for card in &regions {
            agent.register(card.id, card.place()).map_err(io)?;
        }
        let metadata = agent.metadata().map_err(io)?;
        self.doors.push(Door { instance, connection, peer_name: name, agent, has_thread });
        Ok((metadata, regions))
    }

    /// The answer to a hello.
    pub fn welcome(&mut self, instance: Random, connection: u64, answer: Result<(Vec<u8>, Vec<Card>)>) {
        let meant = |c: &Connecting| c.instance == instance && u64::from(c.id) == connection;
        let Some(at) = self.connecting.iter().position(meant) else {
            // Too late: nobody will come through that door.
            if answer.is_ok() {
                self.say(instance, connection, Body::Cut);
            }
            return;
        };
        let mut connecting = self.connecting.swap_remove(at);
        let learned = answer.and_then(|(door, regions)| {
            let door = connecting.agent.learn(&door).map_err(io)?;
            Ok((door, regions))
        });
        let (door, regions) = match learned {
            Ok(learned) => learned,
            Err(error) => return connecting.fail(error),
        };
        let Connecting { id, names: (name, own_name), agent, reply, .. } = connecting;
        self.forget_lost_links(&name);
        let peer = Arc::new(Peer::new(PeerId(id), name, own_name, instance, regions));
        let in_order = self.shared.config.finishes_in_order();
        self.links.insert(id, Link::new(peer.clone(), door, agent, in_order));
        self.shared.add_peer(peer);
        let _gone = reply.try_send(Ok(PeerId(id))).is_err();
    }

    /// A lost connection is replaced by the next one of that name; its id is unknown from then on.
    fn forget_lost_links(&mut self, name: &str) {
        let lost = |link: &Link| !link.is_open() && !link.unsettled && link.peer.name == name;
        let lost: Vec<u32> = self.links.iter().filter(|(_, link)| lost(link)).map(|(id, _)| *id).collect();
        for id in lost {
            self.links.remove(&id);
            self.shared.remove_peer(PeerId(id));
        }
    }
}
