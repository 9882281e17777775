//! The transfer role: the calls of the host's threads. None of them calls into Mooncake.
//!
//! Mooncake can say that a write failed, but not that nothing of it is in flight any more. It goes on with writes that
//! it was given, and the receiver's kernel may hold bytes that it will still copy. Only the end of an engine, with its
//! sockets and threads, ends both. So each connection has a pair of engines of its own: one at the sender ([`link`]),
//! and an *inbound endpoint* at the receiver ([`inbound_endpoint`]) through which that sender alone writes. Ending the
//! inbound endpoint's engine is a fence, which needs no help of the other side. The transfer kit decides when a
//! connection begins and ends, and [`engines`] carries that out.
//!
//! - An instance's *front* is an engine without memory. Its address is the endpoint, and instances exchange their few
//!   messages through it ([`wire`]). The plugin numbers and acknowledges them ([`message_sender`]).
//! - Threads of the plugin make the calls into Mooncake: a [`service`] that decides and never waits, one thread per link,
//!   one per peer for messages, and short ones that start and end engines. The hot calls of the trait only touch queues.
//! - A sender's success means that the data is in the peer's memory, as Mooncake's TCP says since 0.3.13 and RDMA always, and
//!   that the peer has taken the notification.
//!
//! A peer is gone when it says so, or when nothing listens at its address any more. A stopped peer is not gone: fences
//! to it run into their deadline, and submissions in flight stay unsettled.

mod engines;
mod inbound_endpoint;
mod link;
mod mailbox;
mod message_sender;
mod runs;
mod service;
mod shared;
#[cfg(test)]
mod tests;
pub(crate) mod wire;

use std::sync::Arc;
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Level, Memory, Opening, PeerId, RegionId, Result, Write, log};
use host_transfer_kit::wire::{Endpoint, check_name};
use host_transfer_kit::{Backend, Frontend, Instance, random};

use crate::config::Config;
use crate::engine::{Driver, Engine};
use mailbox::Peer;
use service::Service;
use shared::{Event, Shared};
use wire::FORMAT;

/// An instance of the backend. See the module.
pub type MooncakeBackend = Frontend<Mooncake>;

/// What Mooncake brings to a [`MooncakeBackend`].
pub struct Mooncake {
    shared: Arc<Shared>,
    endpoint: Endpoint,
}

/// Finds Mooncake and starts an instance.
///
/// # Errors
/// See [`crate::open`].
pub fn open(opening: &Opening) -> Result<MooncakeBackend> {
    let config = Config::parse(&opening.config)?;
    let driver = crate::engine::find::load(&config)?;
    start(opening, config, driver)
}

/// Starts an instance on a Mooncake that was found.
///
/// # Errors
/// `INVALID_ARGUMENT` for an invalid name, `IO` when Mooncake refuses.
fn start(opening: &Opening, config: Config, driver: Box<dyn Driver>) -> Result<MooncakeBackend> {
    // Checked before an engine starts.
    check_name(&opening.name)?;
    log!(Level::INFO, "Mooncake is {}", driver.describe());
    let front: Arc<dyn Engine> = driver.engine().map_err(|why| Error::new(ErrorCode::IO, why))?.into();
    let (instance, token) = (random()?, random()?);
    let (name, session) = (opening.name.clone(), front.session().to_owned());
    let address = session.clone().into_bytes();
    let shared = Arc::new(Shared::new(config, &name, (instance, session), driver)?);
    let service = Service::new(shared.clone(), front, token);
    let own = shared.clone();
    shared.spawn("mooncake-service", move || {
        // Tells threads that wait, also after a panic.
        let _ended = Ended(own);
        service.run();
    })?;
    Ok(Frontend::new(Mooncake { shared, endpoint: Endpoint { token, instance, name, address } }))
}

/// Reports the end of the service when dropped.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.set_ended();
    }
}

impl Backend for Mooncake {
    type Peer = Peer;
    type Progress = ();

    fn instance(&self) -> &Instance<Peer> {
        self.shared.instance()
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        self.shared.linked.register(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.shared.linked.deregister(region, |request| self.shared.tell(Event::Connections(request)))
    }

    fn endpoint(&self) -> Result<Vec<u8>> {
        Ok(self.endpoint.encode(&FORMAT))
    }

    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        let send = |request| self.shared.tell(Event::Connections(request));
        self.shared.linked.connect((name, endpoint), (&self.endpoint, &FORMAT), send)
    }

    fn disconnect(&self, id: PeerId) -> Result<()> {
        self.shared.linked.disconnect(id, |request| self.shared.tell(Event::Connections(request)))
    }

    fn misfit(&self, peer: &Peer, writes: &[Write]) -> Option<usize> {
        self.shared.linked.misfit(peer, writes)
    }

    fn start(&self, peer: &Arc<Peer>, index: u32) -> bool {
        peer.mailbox.hand_over(index)
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.shared.stop();
        let deadline = Instant::now() + Duration::from_millis(deadline_ms.min(600_000));
        if self.shared.wait_ended(deadline) {
            return Ok(());
        }
        let text = format!("not everything of Mooncake had ended within {deadline_ms} ms");
        Err(Error::new(ErrorCode::TIMEOUT, text))
    }
}

impl Drop for Mooncake {
    fn drop(&mut self) {
        self.shared.stop();
        // Mooncake's longest end takes this long. Threads that are stuck then stay, with all that they hold.
        self.shared.wait_ended(Instant::now() + Duration::from_secs(10));
    }
}
