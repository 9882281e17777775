//! An instance whose connections can be fenced by closing an inbound endpoint.

use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Memory, PeerId, RegionId, Result, Write};

use crate::backend::unknown_peer;
use crate::instance::Instance;
use crate::locked::{locked, reading, writing};
use crate::peer::{LinkedPeer, Mailbox};
use crate::regions::{RegionDescriptor, Regions, source, target};
use crate::wire::{Endpoint, Format};

/// Where the answer to a request goes. The requesting thread may have given up.
pub type Reply<T> = SyncSender<Result<T>>;

/// Gives an answer. It goes nowhere when the requesting thread has given up.
pub fn answer<T>(reply: &Reply<T>, result: Result<T>) {
    let _gone = reply.try_send(result).is_err();
}

/// A request of the host's threads to the thread that runs the [`Connections`](crate::Connections). Each is answered once.
#[derive(Debug)]
pub enum Request {
    /// Connect to an instance.
    Connect {
        /// The host's name for it.
        name: String,
        /// Its endpoint.
        endpoint: Endpoint,
        /// Gets the new peer.
        reply: Reply<PeerId>,
    },
    /// End the connections to and from a peer, and prove it.
    Disconnect {
        /// The peer.
        peer: PeerId,
        /// Answered once it is proven, or the time is over.
        reply: Reply<()>,
    },
    /// Release a region that was retired, and prove it.
    Deregister {
        /// The region.
        region: RegionId,
        /// Answered once it is proven, or the time is over.
        reply: Reply<()>,
    },
}

/// The state that the host's threads share with the thread that runs the [`Connections`](crate::Connections).
#[derive(Debug)]
pub struct LinkedInstance<M> {
    /// Submissions, peers, and notifications for the host.
    pub instance: Instance<LinkedPeer<M>>,
    /// The memory of this instance.
    pub regions: RwLock<Regions>,
    ended: Mutex<bool>,
    end: Condvar,
}

impl<M: Mailbox> LinkedInstance<M> {
    /// Makes an instance that runs. `devices` says whether memory of devices may be registered.
    pub fn new(instance: Instance<LinkedPeer<M>>, devices: bool) -> Self {
        let regions = RwLock::new(Regions::new(devices));
        Self { instance, regions, ended: Mutex::new(false), end: Condvar::new() }
    }

    /// The regions of this instance as they are now.
    pub fn region_descriptors(&self) -> Vec<RegionDescriptor> {
        reading(&self.regions).alive().to_vec()
    }

    /// Sends a request to the thread that runs the connections, and waits for its answer. That thread keeps the
    /// deadlines. `send` passes the request on.
    ///
    /// # Errors
    /// The error of the answer. `CLOSED` or `PANICKED` when no answer comes any more.
    pub fn ask<T>(&self, send: impl FnOnce(Reply<T>)) -> Result<T> {
        self.instance.ready()?;
        let (reply, answer) = sync_channel(1);
        send(reply);
        loop {
            match answer.recv_timeout(Duration::from_millis(100)) {
                Ok(answer) => return answer,
                // The thread may have ended just before the request.
                Err(RecvTimeoutError::Timeout) => self.instance.ready()?,
                Err(RecvTimeoutError::Disconnected) => {
                    self.instance.ready()?;
                    return Err(Error::new(ErrorCode::INTERNAL, "the instance gave no answer"));
                }
            }
        }
    }

    /// [`Backend::register`](crate::Backend::register).
    ///
    /// # Errors
    /// See [`Regions::add`].
    pub fn register(&self, memory: &Memory) -> Result<RegionId> {
        writing(&self.regions).add(memory)
    }

    /// [`Backend::deregister`](crate::Backend::deregister), with `send` to pass a request on.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for an unknown region, `TIMEOUT` without a proof.
    pub fn deregister(&self, region: RegionId, send: impl FnOnce(Request)) -> Result<()> {
        if !writing(&self.regions).retire(region) {
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, format!("no region {}", region.0)));
        }
        self.ask(|reply| send(Request::Deregister { region, reply }))?;
        writing(&self.regions).remove(region);
        Ok(())
    }

    /// [`Backend::connect`](crate::Backend::connect), with `send` to pass a request on. `own` is this instance's endpoint.
    ///
    /// # Errors
    /// `VERSION` or `INVALID_ARGUMENT` for bytes that are no endpoint of another instance, and the error that the other
    /// side gives.
    pub fn connect(
        &self,
        (name, endpoint): (&str, &[u8]),
        (own, format): (&Endpoint, &Format),
        send: impl FnOnce(Request),
    ) -> Result<PeerId> {
        let endpoint = Endpoint::decode(endpoint, format)?;
        if endpoint.instance == own.instance {
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, format!("{name} is this instance itself")));
        }
        self.ask(|reply| send(Request::Connect { name: name.to_owned(), endpoint, reply }))
    }

    /// [`Backend::disconnect`](crate::Backend::disconnect), with `send` to pass a request on.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for an unknown peer, `TIMEOUT` without a proof.
    pub fn disconnect(&self, id: PeerId, send: impl FnOnce(Request)) -> Result<()> {
        // Set before anything else, so that nothing new is taken for the peer.
        self.instance.peers.get(id).ok_or_else(|| unknown_peer(id))?.set_gone();
        self.ask(|reply| send(Request::Disconnect { peer: id, reply }))
    }

    /// [`Backend::misfit`](crate::Backend::misfit).
    pub fn misfit(&self, peer: &LinkedPeer<M>, writes: &[Write]) -> Option<usize> {
        let regions = reading(&self.regions);
        let fits = |write: &Write| {
            source(regions.alive(), write).is_some() && target(&peer.regions, write).is_some()
        };
        writes.iter().position(|write| !fits(write))
    }

    /// Notes that the thread that runs the connections has ended, or will answer nothing more.
    pub fn set_ended(&self) {
        *locked(&self.ended) = true;
        self.end.notify_all();
    }

    /// Waits for [`set_ended`](Self::set_ended). False when the deadline came first.
    pub fn wait_ended(&self, deadline: Instant) -> bool {
        let mut ended = locked(&self.ended);
        while !*ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            ended = self.end.wait_timeout(ended, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
