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
    /// **Hot.** The peer with this number.
    pub fn get(&self, id: PeerId) -> Option<Arc<P>> {
        reading(&self.0).get(&id.0).cloned()
    }

    /// All peers, in no order.
    pub fn all(&self) -> Vec<Arc<P>> {
        reading(&self.0).values().cloned().collect()
    }

    /// Adds a peer, unless there are `most` already. Peers that `obsolete` names are removed first. Returns whether it was added.
    pub fn add(&self, peer: Arc<P>, most: usize, obsolete: impl Fn(&P) -> bool) -> bool {
        let mut peers = writing(&self.0);
        peers.retain(|_, old| !obsolete(old));
        let room = peers.len() < most;
        if room {
            peers.insert(peer.id().0, peer);
        }
        room
    }

    /// Forgets a peer.
    pub fn remove(&self, id: PeerId) {
        writing(&self.0).remove(&id.0);
    }
}

/// What a backend keeps with each [`LinkedPeer`]: the submissions on their way to the thread that sends them.
pub trait Mailbox: Send + Sync + 'static {
    /// Wakes the thread that reads the mailbox, for work that is not in the mailbox.
    fn wake(&self) {}
}

/// No mailbox: one thread sends to all peers.
impl Mailbox for () {}

/// A peer whose connections the [`Connections`](crate::Connections) keep.
#[derive(Debug)]
pub struct LinkedPeer<M> {
    /// The host's number for it. Also the connection's number in messages between the two instances.
    pub id: PeerId,
    /// The host's name for the peer.
    pub name: String,
    /// The name under which the peer was opened.
    pub own_name: String,
    /// Identity of the peer's instance.
    pub instance: Random,
    /// The peer's memory behind the inbound endpoint that it opened for this instance.
    pub regions: Vec<RegionDescriptor>,
    /// The backend's mailbox of the peer.
    pub mailbox: M,
    gone: AtomicBool,
}

impl<M: Mailbox> LinkedPeer<M> {
    /// Makes a connected peer. The names are the host's for it, and the one under which it was opened.
    pub fn new(
        id: PeerId,
        (name, own_name): (String, String),
        instance: Random,
        regions: Vec<RegionDescriptor>,
        mailbox: M,
    ) -> Self {
        Self { id, name, own_name, instance, regions, mailbox, gone: AtomicBool::new(false) }
    }

    /// Notes that nothing more is sent, and wakes the thread that sends.
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
