//! Connections that can be fenced: how they begin, how they end, and what their end proves.
//!
//! A connection has a direction. At its sender it is a *link*, at its receiver an *inbound endpoint*, through which that sender
//! alone writes. Closing the inbound endpoint is the fence: nothing that was sent through it lands afterwards, whatever the
//! sender does. [`Connections`] keeps the books of both and decides. A [`Transport`] carries the decisions out.
//!
//! ```text
//!   sender                               receiver
//!   connect ── Hello ──────────────────► opens an inbound endpoint
//!   opens its link ◄────────── Welcome ─ with its address and regions
//!   writes ════════════════════════════► lands
//!   link failed, or disconnect
//!           ── Cut ────────────────────► closes the inbound endpoint
//!   settled ◄───────────────── CutDone ─
//! ```
//!
//! The receiver may close the inbound endpoint at any time, and says `Closed` then. An instance that says `Bye`, or that the
//! transport proves to be gone, takes all of its connections with it. The connections of an instance that cannot be reached
//! end, too. But links to it are settled only by its `CutDone`, or by the proof that it is gone.

mod connecting;
mod ending;
mod fencing;
mod stage;
#[cfg(test)]
mod tests;
mod transport;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode};

use crate::linked::{LinkedInstance, Request};
use crate::peer::LinkedPeer;
use crate::regions::RegionDescriptor;
use crate::system::Random;
use crate::wire::Message;
use connecting::Connecting;
use fencing::{Deregistration, Fence};
use stage::Stage;
pub use transport::{Connection, Transport};

/// Limits and times.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Most connections in each direction.
    pub max_peers: usize,
    /// How long a peer has to answer a connect.
    pub connect_timeout: Duration,
    /// How long a fence may take.
    pub fence_timeout: Duration,
    /// How often a peer is told again to close an inbound endpoint.
    pub ask_again: Duration,
}

/// A connection on which this instance is the sender.
struct Link<M> {
    peer: Arc<LinkedPeer<M>>,
    stage: Stage,
    /// When the last request to close went to the peer.
    close_sent: Option<Instant>,
    /// Whether the host knows that the link has ended.
    told: bool,
    /// Whether another link has taken its name, so that the host does not know this link any more. It is forgotten once
    /// it is over.
    replaced: bool,
}

/// The state of an inbound endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opening {
    /// The transport opens it.
    Begun,
    Open,
    /// The transport closes it, or will as soon as it is open.
    Closing,
}

/// An inbound endpoint, through which one peer's writes come in.
struct Inbound {
    connection: Connection,
    /// The name under which the sender was opened.
    peer_name: String,
    /// The regions behind it.
    regions: Vec<RegionDescriptor>,
    opening: Opening,
    /// Whether the sender requested the end. It then gets another message than a sender that did not.
    cut: bool,
    /// Whether the host is told of the end, because the peer caused it.
    report: bool,
}

/// The books of an instance's connections. See the [module](crate::connections).
///
/// One thread owns it. That thread passes on what the host [requests](Connections::request), what peers [say](Connections::hear)
/// and what the transport reports, and lets it [keep time](Connections::keep_time) every few milliseconds. Nothing here waits.
pub struct Connections<T: Transport> {
    /// Carries out the decisions.
    pub transport: T,
    shared: Arc<LinkedInstance<T::Mailbox>>,
    settings: Settings,
    token: Random,
    links: BTreeMap<u32, Link<T::Mailbox>>,
    last_link: u32,
    inbound: Vec<Inbound>,
    connecting: Vec<Connecting<T::Mailbox>>,
    fences: Vec<Fence>,
    deregistrations: Vec<Deregistration>,
}

impl<T: Transport> Connections<T> {
    /// No connections yet. `token` is the secret in this instance's endpoint.
    pub fn new(
        transport: T,
        shared: Arc<LinkedInstance<T::Mailbox>>,
        settings: Settings,
        token: Random,
    ) -> Self {
        Self {
            transport,
            shared,
            settings,
            token,
            links: BTreeMap::new(),
            last_link: 0,
            inbound: Vec::new(),
            connecting: Vec::new(),
            fences: Vec::new(),
            deregistrations: Vec::new(),
        }
    }

    /// Handles a request of the host.
    pub fn request(&mut self, request: Request) {
        match request {
            Request::Connect { name, endpoint, reply } => self.connect(name, endpoint, reply),
            Request::Disconnect { peer, reply } => self.disconnect(peer, reply),
            Request::Deregister { region, reply } => self.deregister(region, reply),
        }
    }

    /// Handles a message of another instance about a connection. `number` is the one that the connection's sender gave
    /// it. The transport must know how to answer the instance.
    pub fn hear(&mut self, from: Random, number: u64, message: Message) {
        let connection = Connection { instance: from, number };
        match message {
            Message::Hello { token, name } => self.hello(connection, token, name),
            Message::Welcome { address, regions } => self.welcome(from, number, Ok((address, regions))),
            Message::Refused { code, reason } => {
                self.welcome(from, number, Err(Error::new(ErrorCode(code), reason)));
            }
            Message::Cut => self.cut(connection),
            Message::CutDone | Message::Closed => self.peer_closed(from, number),
            Message::Bye => self.lose(from, "it said goodbye"),
        }
    }

    /// Does work that depends on time: gives answers that are due, and repeats requests.
    pub fn keep_time(&mut self) {
        let now = Instant::now();
        self.finish_fences(now);
        self.finish_deregistrations(now);
        self.end_waiting(now);
        self.ask_again(now);
    }

    /// Whether calls of the host wait for other instances.
    pub fn is_expecting(&self) -> bool {
        !self.connecting.is_empty() || !self.fences.is_empty()
    }

    /// Whether there is a connection with an instance, or what is left of one.
    pub fn is_concerned_with(&self, instance: Random) -> bool {
        let link = |link: &Link<_>| (!link.told || !link.stage.is_over()) && link.peer.instance == instance;
        self.has_inbound_of(instance) || self.links.values().any(link)
    }

    /// Whether this instance has a link to an instance, or makes one.
    pub fn sends_to(&self, instance: Random) -> bool {
        self.connecting.iter().any(|connecting| connecting.instance == instance)
            || self.links.values().any(|link| link.peer.instance == instance)
    }

    /// Whether an instance has an inbound endpoint here, also one that is being closed.
    pub fn has_inbound_of(&self, instance: Random) -> bool {
        self.inbound.iter().any(|inbound| inbound.connection.instance == instance)
    }

    /// Whether there is an inbound endpoint, also one that is being closed.
    pub fn has_inbound(&self) -> bool {
        !self.inbound.is_empty()
    }

    /// Whether an inbound endpoint is open. `None` when there is none.
    pub fn is_inbound_open(&self, connection: Connection) -> Option<bool> {
        let inbound = self.inbound.iter().find(|inbound| inbound.connection == connection)?;
        Some(inbound.opening == Opening::Open)
    }

    /// The name under which the sender of an inbound endpoint was opened.
    pub fn sender(&self, connection: Connection) -> Option<&str> {
        let inbound = self.inbound.iter().find(|inbound| inbound.connection == connection)?;
        Some(&inbound.peer_name)
    }
}
