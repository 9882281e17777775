//! Mooncake's engines, as the books of connections use them: the front, one for each link, one for each inbound
//! endpoint. Work that takes long, and work that may wait for a peer, runs on threads of its own.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, RegionId, Result};
use host_transfer_kit::connections::{Connection, Transport};
use host_transfer_kit::wire::Message;
use host_transfer_kit::{Mailbox as _, Random, RegionDescriptor};

use super::inbound_endpoint;
use super::link;
use super::mailbox::{Inbox, Peer};
use super::message_sender::MessageSender;
use super::shared::{Link, Shared};
use super::wire::{Body, session};
use crate::engine::Engine;
use crate::engine::idle_connections::port;

/// Most connections in each direction. Each is an engine, which takes two of the two thousand ports that Mooncake chooses from.
pub const MAX_PEERS: usize = 128;
/// How long a connected peer may be silent before it gets a ping.
const SILENCE: Duration = Duration::from_millis(500);
/// How long an instance without a connection is remembered.
const MEMORY: Duration = Duration::from_secs(60);

/// Another instance.
pub struct Front {
    pub sender: Arc<MessageSender>,
    /// The other instance's stream to this one, and the last message of it that came in order.
    pub heard: (u64, u64),
    /// When a message of the other instance last came, or a ping went to it.
    pub spoke: Instant,
}

/// All engines of one instance.
pub struct Engines {
    shared: Arc<Shared>,
    pub front: Arc<dyn Engine>,
    pub fronts: HashMap<Random, Front>,
    streams: u64,
    /// Links that were opened and are known to the books.
    pub links: BTreeMap<u32, Arc<Link>>,
    /// Inbound endpoints that are open.
    pub inbound: HashMap<Connection, Box<dyn Engine>>,
}

impl Engines {
    pub fn new(shared: Arc<Shared>, front: Arc<dyn Engine>) -> Self {
        let (links, inbound) = (BTreeMap::new(), HashMap::new());
        Self { shared, front, fronts: HashMap::new(), streams: 0, links, inbound }
    }

    /// Makes another instance known, if it is not yet.
    ///
    /// # Errors
    /// When too many are known.
    pub fn learn_front(&mut self, instance: Random, session: &str) -> Result<()> {
        if self.fronts.contains_key(&instance) {
            return Ok(());
        }
        if self.fronts.len() >= 2 * MAX_PEERS {
            let text = format!("{} instances are known", self.fronts.len());
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        }
        self.streams += 1;
        let session = session.to_owned();
        let sender = MessageSender::start(&self.shared, &self.front, instance, session, self.streams)?;
        self.fronts.insert(instance, Front { sender, heard: (0, 0), spoke: Instant::now() });
        Ok(())
    }

    /// Instances that have sent nothing for a while, and to which no message is on its way.
    pub fn silent(&self) -> Vec<Random> {
        let now = Instant::now();
        let silent = |front: &Front| now.duration_since(front.spoke) >= SILENCE && front.sender.is_idle();
        self.fronts.iter().filter(|(_, front)| silent(front)).map(|(instance, _)| *instance).collect()
    }

    /// Sends a ping to a silent instance, or forgets it if no connection concerns it and it has been silent for long.
    pub fn ask_or_forget(&mut self, instance: Random, concerned: bool) {
        let Some(front) = self.fronts.get(&instance) else { return };
        if concerned {
            front.sender.say(0, Body::Ping);
        } else if front.spoke.elapsed() >= MEMORY {
            self.forget(instance);
        }
    }

    /// Wakes the links to an instance.
    pub fn wake_links_to(&self, instance: Random) {
        for link in self.links.values().filter(|link| link.peer.instance == instance) {
            link.peer.mailbox.wake();
        }
    }

    /// The ports at which the front and the inbound endpoints listen.
    pub fn ports(&self) -> Vec<u16> {
        let inbound = self.inbound.values().filter_map(|engine| port(engine.session()));
        port(self.front.session()).into_iter().chain(inbound).collect()
    }
}

impl Transport for Engines {
    type Mailbox = Inbox;

    fn meet(&mut self, instance: Random, _: &str, address: &[u8]) -> Result<()> {
        self.learn_front(instance, &session(address))
    }

    fn forget(&mut self, instance: Random) -> bool {
        let front = self.fronts.remove(&instance);
        front.is_some_and(|front| {
            front.sender.stop();
            true
        })
    }

    fn say(&mut self, to: Random, connection: u64, message: Message) {
        if let Some(front) = self.fronts.get(&to) {
            front.sender.say(connection, Body::Connection(message));
        }
    }

    fn mailbox(&self) -> Inbox {
        Inbox::new(self.shared.config.max_submissions)
    }

    fn open_inbound(
        &mut self,
        connection: Connection,
        _: &str,
        regions: &[RegionDescriptor],
    ) -> Result<Option<Vec<u8>>> {
        inbound_endpoint::open(&self.shared, connection, regions).map(|()| None)
    }

    fn close_inbound(&mut self, connection: Connection) -> bool {
        let engine = self.inbound.remove(&connection);
        engine.is_none_or(|engine| inbound_endpoint::close(&self.shared, connection, engine))
    }

    fn open_link(&mut self, peer: Arc<Peer>, address: Vec<u8>) -> Result<bool> {
        let Some(front) = self.fronts.get(&peer.instance) else {
            return Err(Error::new(ErrorCode::PEER_LOST, format!("{} is gone", peer.name)));
        };
        let (shared, sender) = (self.shared.clone(), front.sender.clone());
        let link = Arc::new(Link::new(peer));
        let run = move || link::run(shared, link, sender, &session(&address));
        self.shared.spawn_alone("mooncake-link", run).map(|()| false)
    }

    /// Does nothing: the link's thread sees that the peer is gone.
    fn end_link(&mut self, _: u32) -> Option<bool> {
        None
    }

    fn remove_link(&mut self, id: u32) {
        self.links.remove(&id);
    }

    /// Each link sees for itself which regions are gone, when it is woken.
    fn let_go(&mut self, _: RegionId) {
        for link in self.links.values() {
            link.peer.mailbox.wake();
        }
    }

    fn has_let_go(&mut self, region: RegionId) -> Result<bool> {
        Ok(!self.links.values().any(|link| link.knows(region)))
    }

    /// Not while messages are unacknowledged: they are repeated anyway.
    fn may_ask_again(&self, instance: Random) -> bool {
        self.fronts.get(&instance).is_some_and(|front| front.sender.is_idle())
    }

    fn note_link_failed(&self) {
        self.shared.counts.links_failed.add(1);
    }

    fn note_peer_lost(&self) {
        self.shared.counts.peers_lost.add(1);
    }
}
