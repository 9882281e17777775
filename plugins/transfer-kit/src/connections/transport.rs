//! The transport, which carries out the decisions of the books.

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

/// The part that a backend does for its [`Connections`](super::Connections), on the thread that owns them.
///
/// Nothing here may wait for a peer. A method begins work that takes long, and the backend reports when it is done:
/// with [`inbound_opened`](super::Connections::inbound_opened), [`inbound_closed`](super::Connections::inbound_closed),
/// [`link_opened`](super::Connections::link_opened) and [`link_ended`](super::Connections::link_ended).
pub trait Transport {
    /// The backend's part of each peer.
    type Mailbox: Mailbox;

    /// Makes an instance known, at the address of its endpoint, so that messages can be sent to it. `name` is the
    /// host's name for it, for texts. An instance that is known stays as it is.
    ///
    /// # Errors
    /// When the instance cannot be reached, or too many are known.
    fn meet(&mut self, instance: Random, name: &str, address: &[u8]) -> Result<()>;

    /// Forgets an instance that is gone. False when it was not known.
    fn forget(&mut self, instance: Random) -> bool;

    /// Sends a message to an instance, in order, now or as soon as the instance listens. If that fails, the instance is
    /// lost a moment later, with a proof that it is gone or without: see [`lose`](super::Connections::lose) and
    /// [`lose_contact`](super::Connections::lose_contact).
    fn say(&mut self, to: Random, connection: u64, message: Message);

    /// A mailbox for a new peer.
    fn mailbox(&self) -> Self::Mailbox;

    /// Opens an inbound endpoint for one sender, with these regions behind it. Returns its address, or `None` when that
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

    /// Ends a link, whose peer was set gone: nothing more of this instance's memory is read for it, and all its submissions
    /// are finished. Returns whether something of them may still land at the peer, or `None` when that is reported later.
    fn end_link(&mut self, id: u32) -> Option<bool>;

    /// Forgets a link that has ended.
    fn remove_link(&mut self, _id: u32) {}

    /// Lets the links release a region that was retired, once nothing that they have started reads it.
    fn let_go(&mut self, region: RegionId);

    /// Whether all links have released the region.
    ///
    /// # Errors
    /// When the region cannot be released.
    fn has_let_go(&mut self, region: RegionId) -> Result<bool>;

    /// Whether the request to close an inbound endpoint may be sent again.
    ///
    /// False while the instance has not taken the last one, which the transport repeats, and while it cannot be reached.
    fn may_ask_again(&self, _instance: Random) -> bool {
        true
    }

    /// Notes that a link failed: for metrics.
    fn note_link_failed(&self) {}

    /// Notes that the host is told of a lost peer: for metrics.
    fn note_peer_lost(&self) {}
}
