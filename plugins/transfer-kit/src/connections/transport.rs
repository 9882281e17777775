//! What acts for the books.

use std::sync::Arc;

use host_plugin_api::{RegionId, Result};

use crate::peer::{LinkedPeer, Mailbox};
use crate::regions::RegionDescriptor;
use crate::system::Random;
use crate::wire::Message;

/// A connection: its sender, and the number that the sender gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    /// The sender's identity.
    pub instance: Random,
    /// Its number for the connection.
    pub number: u64,
}

/// What a backend does for its [`Connections`](super::Connections), on the thread that owns them.
///
/// Nothing here may wait for a peer. What takes long is begun, and reported when it is done: with
/// [`inbound_opened`](super::Connections::inbound_opened), [`inbound_closed`](super::Connections::inbound_closed),
/// [`link_opened`](super::Connections::link_opened) and [`link_ended`](super::Connections::link_ended).
pub trait Transport {
    /// What goes with each peer.
    type Mailbox: Mailbox;

    /// Makes an instance known, at the address of its endpoint, so that it can be told something. `name` is the host's, for
    /// messages. One that is known stays as it is.
    ///
    /// # Errors
    /// When it cannot be reached, or too many are known.
    fn meet(&mut self, instance: Random, name: &str, address: &[u8]) -> Result<()>;

    /// Forgets an instance that is gone. False when it was not known.
    fn forget(&mut self, instance: Random) -> bool;

    /// Tells an instance something, in order, now or as soon as it listens. One that cannot be told is lost, a moment later:
    /// see [`lose`](super::Connections::lose).
    fn say(&mut self, to: Random, connection: u64, message: Message);

    /// A mailbox for a new peer.
    fn mailbox(&self) -> Self::Mailbox;

    /// Opens an inbound endpoint for one sender, with these regions behind it. The answer is its address, or nothing when that
    /// is reported later.
    ///
    /// # Errors
    /// When it cannot be opened. The sender is told why.
    fn open_inbound(
        &mut self,
        connection: Connection,
        peer_name: &str,
        regions: &[RegionDescriptor],
    ) -> Result<Option<Vec<u8>>>;

    /// Closes an inbound endpoint that is open. True when nothing lands through it any more. False when that is reported
    /// later.
    fn close_inbound(&mut self, connection: Connection) -> bool;

    /// Opens a link to a peer's inbound endpoint. True when it is open. False when that is reported later.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn open_link(&mut self, peer: Arc<LinkedPeer<Self::Mailbox>>, address: Vec<u8>) -> Result<bool>;

    /// Ends a link, whose peer was set gone: nothing more of our memory is read for it, and all its submissions are finished.
    /// The answer says whether something of them may still land at the peer. There is no answer when that is reported later.
    fn end_link(&mut self, id: u32) -> Option<bool>;

    /// Forgets a link that has ended.
    fn remove_link(&mut self, _id: u32) {}

    /// Has the links let go of a region that was retired, once nothing that they have started reads it.
    fn let_go(&mut self, region: RegionId);

    /// Whether they have.
    ///
    /// # Errors
    /// When the region cannot be taken back.
    fn has_let_go(&mut self, region: RegionId) -> Result<bool>;

    /// Whether the request to close an inbound endpoint may be sent again.
    ///
    /// False while the instance has not taken the last one, which the transport repeats.
    fn may_ask_again(&self, _instance: Random) -> bool {
        true
    }

    /// A link failed: for metrics.
    fn note_link_failed(&self) {}

    /// The host is told that a peer is lost: for metrics.
    fn note_peer_lost(&self) {}
}
