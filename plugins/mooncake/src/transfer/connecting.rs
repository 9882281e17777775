//! How a connection comes to be: hello from the one that will send, a door and a welcome from the other, and then the link.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

use host_plugin_api::{Error, ErrorCode, PeerId, Result};

use super::courier::Courier;
use super::door::{Door, Stage, end};
use super::link::{self, Link};
use super::peer::Peer;
use super::regions::Card;
use super::service::{Front, Known, MAX_PEERS, Service};
use super::shared::Connection;
use super::wire::{Body, Endpoint, Random};
use crate::engine::Engine;

/// A connect that was not answered yet.
pub struct Connecting {
    pub id: u32,
    pub instance: Random,
    /// What the host calls the peer, and the name it was opened under.
    names: (String, String),
    pub deadline: Instant,
    reply: SyncSender<Result<PeerId>>,
    /// There, once the door is: the engine is being started.
    link: Option<Arc<Link>>,
}

impl Connecting {
    /// Ends in an error.
    pub fn fail(self, error: Error) {
        if let Some(link) = self.link {
            link.peer.set_gone();
        }
        // Whoever asked has given up when nobody takes the answer.
        let _gone = self.reply.try_send(Err(error)).is_err();
    }

    pub fn name(&self) -> &str {
        &self.names.0
    }
}

impl Service {
    /// Sends a hello, whose answer goes on with the call.
    pub fn connect(&mut self, name: String, endpoint: Endpoint, reply: SyncSender<Result<PeerId>>) {
        if self.links.len() + self.connecting.len() >= MAX_PEERS {
            let text = format!("{MAX_PEERS} peers are connected, disconnect one first");
            let _gone = reply.try_send(Err(Error::new(ErrorCode::NO_RESOURCE, text))).is_err();
            return;
        }
        let Endpoint { token, instance, name: own_name, session } = endpoint;
        if let Err(error) = self.learn_front(instance, &session) {
            let _gone = reply.try_send(Err(error)).is_err();
            return;
        }
        self.last_link += 1;
        let id = self.last_link;
        let deadline = Instant::now() + self.shared.config.connect_timeout();
        let names = (name, own_name);
        self.connecting.push(Connecting { id, instance, names, deadline, reply, link: None });
        self.say(instance, id.into(), Body::Hello { token, name: self.shared.name.clone() });
    }

    /// Makes another instance known, if it is not yet.
    ///
    /// # Errors
    /// When there are too many.
    pub fn learn_front(&mut self, instance: Random, session: &str) -> Result<()> {
        if self.fronts.contains_key(&instance) {
            return Ok(());
        }
        if self.fronts.len() >= 2 * MAX_PEERS {
            let text = format!("{} instances are known", self.fronts.len());
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        }
        self.streams += 1;
        let courier = Courier::start(&self.shared, &self.front, instance, session.to_owned(), self.streams)?;
        self.fronts.insert(instance, Front { courier, heard: (0, 0), spoke: Instant::now() });
        Ok(())
    }

    /// Somebody wants to send to us.
    pub fn hello(&mut self, connection: Connection, token: Random, name: String) {
        let opened = self.open_door(connection, token, name);
        if let Err(error) = opened {
            let body = Body::Refused { code: error.code.0, reason: error.message };
            self.say(connection.instance, connection.number, body);
        }
    }

    fn open_door(&mut self, connection: Connection, token: Random, name: String) -> Result<()> {
        if token != self.token {
            return Err(Error::new(ErrorCode::PEER_LOST, "this endpoint is of an instance that is gone"));
        }
        if self.doors.iter().any(|door| door.connection == connection) {
            return Ok(());
        }
        if self.doors.len() >= MAX_PEERS {
            return Err(Error::new(ErrorCode::NO_RESOURCE, format!("{MAX_PEERS} peers are connected")));
        }
        self.doors.push(Door::open(&self.shared, connection, name, self.shared.cards())?);
        Ok(())
    }

    /// A door is there, or could not be made.
    pub fn door_opened(
        &mut self,
        connection: Connection,
        opened: std::result::Result<Box<dyn Engine>, String>,
    ) {
        let Some(at) = self.doors.iter().position(|door| door.connection == connection) else { return };
        let door = &mut self.doors[at];
        let body = match (opened, matches!(door.stage, Stage::Closing)) {
            (Ok(engine), true) => return end(&self.shared, connection, engine),
            (Ok(engine), false) => {
                let session = engine.session().to_owned();
                door.stage = Stage::Open(engine);
                // A region that went meanwhile was behind the door when it was made, and closes it.
                Body::Welcome { door: session, regions: door.regions.clone() }
            }
            (Err(why), _) => {
                self.door_closed(connection);
                Body::Refused { code: ErrorCode::IO.0, reason: why }
            }
        };
        self.say(connection.instance, connection.number, body);
    }

    /// The answer to a hello.
    pub fn welcome(&mut self, instance: Random, number: u64, answer: Result<(String, Vec<Card>)>) {
        let meant = |c: &Connecting| c.instance == instance && u64::from(c.id) == number;
        let Some(at) = self.connecting.iter().position(meant) else {
            // Too late: nobody will come through that door.
            if answer.is_ok() {
                self.say(instance, number, Body::Cut);
            }
            return;
        };
        let (door, regions) = match answer {
            Ok(answer) => answer,
            Err(error) => return self.connecting.swap_remove(at).fail(error),
        };
        let Some(courier) = self.fronts.get(&instance).map(|front| front.courier.clone()) else { return };
        let connecting = &mut self.connecting[at];
        let names = connecting.names.clone();
        let id = PeerId(connecting.id);
        let peer = Peer::new(id, names, instance, regions, self.shared.config.max_submissions);
        let link = Arc::new(Link { peer: Arc::new(peer), report: std::sync::Mutex::default() });
        connecting.link = Some(link.clone());
        let shared = self.shared.clone();
        let spawned =
            self.shared.spawn_alone("mooncake-link", move || link::run(shared, link, courier, &door));
        if let Err(error) = spawned {
            self.connecting.swap_remove(at).fail(error);
            self.say(instance, number, Body::Cut);
        }
    }

    /// A link's engine runs, and the door was found, or not.
    pub fn link_opened(&mut self, id: u32, opened: std::result::Result<(), String>) {
        let Some(at) = self.connecting.iter().position(|connecting| connecting.id == id) else { return };
        let connecting = self.connecting.swap_remove(at);
        let instance = connecting.instance;
        let name = connecting.names.0.clone();
        let (Ok(()), Some(link)) = (&opened, connecting.link.clone()) else {
            let why = opened.err().unwrap_or_default();
            let text = format!(
                "the engine of {name} cannot be reached: {why}; if it is on another machine, its local_hostname in \
                 [plugin.mooncake] must be an address that this one reaches"
            );
            connecting.fail(Error::new(ErrorCode::PEER_LOST, text));
            return self.say(instance, id.into(), Body::Cut);
        };
        self.forget_lost_links(&name);
        self.shared.add_peer(link.peer.clone());
        let known = Known { link, running: true, shut: false, asked: None, told: false };
        self.links.insert(id, known);
        let _gone = connecting.reply.try_send(Ok(PeerId(id))).is_err();
    }

    /// A lost connection is replaced by the next one of that name; its id is unknown from then on.
    fn forget_lost_links(&mut self, name: &str) {
        let lost = |known: &Known| known.is_over() && known.link.peer.name == name;
        let lost: Vec<u32> = self.links.iter().filter(|(_, known)| lost(known)).map(|(id, _)| *id).collect();
        for id in lost {
            self.links.remove(&id);
            self.shared.remove_peer(PeerId(id));
        }
    }
}
