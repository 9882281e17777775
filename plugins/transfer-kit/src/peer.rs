//! Peers, as the hot calls see them.

use std::collections::HashMap;
use std::sync::Arc;

use host_plugin_api::PeerId;

use crate::locked::{reading, writing};
use crate::regions::RegionDescriptor;
use crate::sync::RwLock;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::system::Random;

/// A connection on which this instance is the sender.
pub trait Peer: Send + Sync + 'static {
    /// The host's number for it.
    fn id(&self) -> PeerId;

    /// Whether nothing more may be sent. Once true it stays true.
    fn is_gone(&self) -> bool;
}

/// The peers of an instance, by their numbers.
#[derive(Debug)]
pub struct Peers<P>(RwLock<HashMap<u32, Arc<P>>>);

impl<P> Default for Peers<P> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<P: Peer> Peers<P> {
    /// **Hot.** One of them.
    pub fn get(&self, id: PeerId) -> Option<Arc<P>> {
        reading(&self.0).get(&id.0).cloned()
    }

    /// All of them, in no order.
    pub fn all(&self) -> Vec<Arc<P>> {
        reading(&self.0).values().cloned().collect()
    }

    /// Adds one, unless there are `most` already. Those that `obsolete` names go first. Says whether it was added.
    pub fn add(&self, peer: Arc<P>, most: usize, obsolete: impl Fn(&P) -> bool) -> bool {
        let mut peers = writing(&self.0);
        peers.retain(|_, old| !obsolete(old));
        let room = peers.len() < most;
        if room {
            peers.insert(peer.id().0, peer);
        }
        room
    }

    /// Forgets one.
    pub fn remove(&self, id: PeerId) {
        writing(&self.0).remove(&id.0);
    }
}

/// What a backend keeps with each [`LinkedPeer`]: the submissions on their way to the thread that sends them.
pub trait Mailbox: Send + Sync + 'static {
    /// Wakes the thread that reads it, for what is not in it.
    fn wake(&self) {}
}

/// No mailbox: one thread sends to all peers.
impl Mailbox for () {}

/// A peer whose connections the [`Connections`](crate::Connections) keep.
#[derive(Debug)]
pub struct LinkedPeer<M> {
    /// The host's number for it. Also the connection's number in what the two instances say to each other.
    pub id: PeerId,
    /// What the host called the peer.
    pub name: String,
    /// The name the peer was opened under.
    pub own_name: String,
    /// Identity of the peer's instance.
    pub instance: Random,
    /// The peer's memory behind the inbound endpoint that it opened for us.
    pub regions: Vec<RegionDescriptor>,
    /// The backend's own.
    pub mailbox: M,
    gone: AtomicBool,
}

impl<M: Mailbox> LinkedPeer<M> {
    /// A peer that is there. `names`: what the host calls it, and the name it was opened under.
    pub fn new(
        id: PeerId,
        (name, own_name): (String, String),
        instance: Random,
        regions: Vec<RegionDescriptor>,
        mailbox: M,
    ) -> Self {
        Self { id, name, own_name, instance, regions, mailbox, gone: AtomicBool::new(false) }
    }

    /// Says that nothing more is sent, and wakes the thread that does.
    pub fn set_gone(&self) {
        self.gone.store(true, Ordering::SeqCst);
        self.mailbox.wake();
    }
}

impl<M: Mailbox> Peer for LinkedPeer<M> {
    fn id(&self) -> PeerId {
        self.id
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }
}
