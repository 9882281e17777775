//! The transfer role: what the host's threads call. None of it calls into Mooncake.
//!
//! Mooncake can say that a write failed, but not that nothing of it is in flight any more: what it was given it goes on with,
//! and the receiver's kernel may hold bytes that it will still copy. What ends both is the end of an engine, with its sockets
//! and threads. So each connection has a pair of engines of its own: one at the sender ([`link`]), and a *door* at the receiver
//! ([`door`]) through which that sender alone writes. Ending a door's engine is a fence; it needs nobody's help.
//!
//! - An instance's *front* is an engine without memory. Its address is the endpoint, and instances exchange their few messages
//!   through it ([`wire`]), numbered and acknowledged by us ([`courier`]).
//! - Calls into Mooncake are made by threads of our own: a [`service`] that decides and never waits, one per link, one per
//!   peer for messages, and short ones that start and end engines. The hot calls of the trait only touch queues.
//! - A sender's success means that the data is in the peer's memory, as Mooncake's TCP says since 0.3.13 and RDMA always, and
//!   that the peer has taken the notification.
//!
//! A peer is gone when it says so, or when nobody listens at its address any more. One that is stopped is not gone: fences
//! to it run into their deadline, and what is in flight stays unsettled.

mod connecting;
mod courier;
mod door;
mod fencing;
mod link;
mod lists;
mod notices;
mod peer;
mod queue;
mod regions;
mod runs;
mod service;
mod shared;
#[cfg(test)]
mod tests;
mod wire;

use std::os::fd::AsRawFd;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use host_plugin_api::{
    Completion, Error, ErrorCode, Level, Memory, NOTIFICATION_BYTES, Notification, Opening, PeerId,
    PreparedId, RegionId, Result, Submission, Tag, TransferBackend, TransferLimits, Write, log,
};

use crate::config::Config;
use crate::engine::{Driver, Engine};
use lists::Lists;
use peer::Peer;
use regions::{source, target};
use service::Service;
use shared::{Event, Shared, random};
use wire::{Endpoint, NAME_BYTES};

/// An instance of the backend. See the module.
pub struct MooncakeBackend {
    shared: Arc<Shared>,
    endpoint: Endpoint,
    lists: Lists,
}

impl MooncakeBackend {
    /// Finds Mooncake and starts an instance.
    ///
    /// # Errors
    /// See [`crate::open`].
    pub fn open(opening: &Opening) -> Result<Self> {
        let config = Config::parse(&opening.config)?;
        let driver = crate::engine::find::load(&config)?;
        Self::start(opening, config, driver)
    }

    /// Starts an instance on a Mooncake that was found.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a name that is none, `IO` when Mooncake refuses.
    pub fn start(opening: &Opening, config: Config, driver: Box<dyn Driver>) -> Result<Self> {
        if opening.name.is_empty() || opening.name.len() > NAME_BYTES {
            let text = format!("the name {:?} is not 1 to {NAME_BYTES} bytes", opening.name);
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        log!(Level::INFO, "Mooncake is {}", driver.describe());
        let front: Arc<dyn Engine> = driver.engine().map_err(|why| Error::new(ErrorCode::IO, why))?.into();
        let (instance, token) = (random()?, random()?);
        let (name, session) = (opening.name.clone(), front.session().to_owned());
        let shared = Arc::new(Shared::new(config, name.clone(), (instance, session.clone()), driver)?);
        let service = Service::new(shared.clone(), front, token);
        let own = shared.clone();
        shared.spawn("mooncake-service", move || {
            // Told to whoever waits, also when it panics.
            let _ended = Ended(own);
            service.run();
        })?;
        Ok(Self { shared, endpoint: Endpoint { token, instance, name, session }, lists: Lists::default() })
    }

    /// 0, or why no call is taken.
    fn state(&self) -> i32 {
        if self.shared.is_stopping() {
            return ErrorCode::CLOSED.0;
        }
        if self.shared.is_broken() { ErrorCode::PANICKED.0 } else { 0 }
    }

    fn ready(&self) -> Result<()> {
        match ErrorCode(self.state()) {
            ErrorCode(0) => Ok(()),
            ErrorCode::CLOSED => Err(Error::new(ErrorCode::CLOSED, "the instance was shut down")),
            code => Err(Error::new(code, "a thread of the instance panicked")),
        }
    }

    /// Asks the service, and waits for its answer; it keeps the deadlines.
    fn ask<T>(&self, event: impl FnOnce(SyncSender<Result<T>>) -> Event) -> Result<T> {
        self.ready()?;
        let (reply, answer) = sync_channel(1);
        self.shared.tell(event(reply));
        loop {
            match answer.recv_timeout(Duration::from_millis(100)) {
                Ok(answer) => return answer,
                // The service may have ended just before it was asked.
                Err(RecvTimeoutError::Timeout) => self.ready()?,
                Err(RecvTimeoutError::Disconnected) => {
                    self.ready()?;
                    return Err(Error::new(ErrorCode::INTERNAL, "the service gave no answer"));
                }
            }
        }
    }

    fn known_peer(&self, id: PeerId) -> Result<Arc<Peer>> {
        let unknown = || Error::new(ErrorCode::INVALID_ARGUMENT, format!("no peer {}", id.0));
        self.shared.peer(id).ok_or_else(unknown)
    }

    fn fit(&self, peer: &Peer, writes: &[Write]) -> std::result::Result<(), usize> {
        let regions = self.shared.regions.read().unwrap_or_else(PoisonError::into_inner);
        let fits = |write: &Write| {
            source(regions.alive(), write).is_some() && target(&peer.regions, write).is_some()
        };
        writes.iter().position(|write| !fits(write)).map_or(Ok(()), Err)
    }

    /// What [`submit`](TransferBackend::submit) and [`post`](TransferBackend::post) share.
    fn accept(
        &self,
        submission: &Submission,
        peer: &Peer,
        writes: impl ExactSizeIterator<Item = Write>,
    ) -> i32 {
        if writes.len() > self.shared.config.max_writes as usize
            || submission.notification_length as usize > NOTIFICATION_BYTES
        {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        let Some(index) = self.shared.queue.take_in(submission, writes) else {
            return ErrorCode::WOULD_BLOCK.0;
        };
        if !peer.hand_over(index) {
            self.shared.queue.give_back(index);
            return ErrorCode::PEER_LOST.0;
        }
        0
    }
}

/// Says that the service has ended.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.set_ended();
    }
}

impl TransferBackend for MooncakeBackend {
    fn limits(&self) -> TransferLimits {
        let Config { max_writes, max_submissions, short_writes, .. } = self.shared.config;
        TransferLimits { max_writes, max_submissions, reserved: [0; 6] }.with_short_writes(short_writes)
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        self.ready()?;
        self.shared.regions.write().unwrap_or_else(PoisonError::into_inner).add(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.ready()?;
        if !self.shared.regions.write().unwrap_or_else(PoisonError::into_inner).kill(region) {
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, format!("no region {}", region.0)));
        }
        self.ask(|reply| Event::Deregister { region, reply })?;
        self.shared.regions.write().unwrap_or_else(PoisonError::into_inner).bury(region);
        Ok(())
    }

    fn endpoint(&self) -> Result<Vec<u8>> {
        self.ready()?;
        Ok(self.endpoint.encode())
    }

    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        self.ready()?;
        let endpoint = Endpoint::decode(endpoint)?;
        if endpoint.instance == self.endpoint.instance {
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, format!("{name} is this instance itself")));
        }
        self.ask(|reply| Event::Connect { name: name.to_owned(), endpoint, reply })
    }

    fn disconnect(&self, id: PeerId) -> Result<()> {
        // Before anything else, so that nothing new is taken for it.
        let known = self.shared.peer(id).inspect(|peer| peer.set_gone());
        self.ready()?;
        known.map_or_else(|| self.known_peer(id).map(drop), |_| Ok(()))?;
        self.ask(|reply| Event::Disconnect { peer: id, reply })?;
        self.lists.forget(id);
        Ok(())
    }

    fn prepare(&self, peer: PeerId, writes: &[Write]) -> Result<PreparedId> {
        self.ready()?;
        let peer = self.known_peer(peer)?;
        self.fit(&peer, writes).map_err(|at| {
            let text = format!("write {at} is empty or leaves its region: {:?}", writes[at]);
            Error::new(ErrorCode::INVALID_ARGUMENT, text)
        })?;
        self.lists.add(peer, writes)
    }

    fn release(&self, prepared: PreparedId) -> Result<()> {
        self.ready()?;
        self.lists.remove(prepared)
    }

    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        let state = self.state();
        if state != 0 {
            return state;
        }
        let Some(peer) = self.shared.peer(submission.peer) else { return ErrorCode::INVALID_ARGUMENT.0 };
        if peer.is_gone() {
            return ErrorCode::PEER_LOST.0;
        }
        if self.fit(&peer, writes).is_err() {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        self.accept(submission, &peer, writes.iter().copied())
    }

    fn post(&self, submission: &Submission, prepared: PreparedId, indices: &[u32]) -> i32 {
        let state = self.state();
        if state != 0 {
            return state;
        }
        let Some(list) = self.lists.get(prepared) else { return ErrorCode::INVALID_ARGUMENT.0 };
        let known = |index: &u32| (*index as usize) < list.writes.len();
        if list.peer.id != submission.peer || !indices.iter().all(known) {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        if list.peer.is_gone() {
            return ErrorCode::PEER_LOST.0;
        }
        self.accept(submission, &list.peer, indices.iter().map(|index| list.writes[*index as usize]))
    }

    fn poll(&self, completions: &mut [Completion]) -> i32 {
        let state = self.state();
        if state != 0 {
            return state;
        }
        let taken = self.shared.queue.take(completions);
        self.shared.settle_event();
        taken as i32
    }

    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        let state = self.state();
        if state != 0 {
            return state;
        }
        let taken = self.shared.notices.take(notifications);
        self.shared.settle_event();
        taken as i32
    }

    fn cancel(&self, tag: Tag) -> i32 {
        match self.state() {
            0 if self.shared.queue.cancel(tag) => 0,
            0 => ErrorCode::INVALID_ARGUMENT.0,
            state => state,
        }
    }

    fn settled(&self, tag: Tag) -> i32 {
        match self.state() {
            0 => i32::from(self.shared.queue.is_settled(tag)),
            state => state,
        }
    }

    fn event_fd(&self) -> i32 {
        self.shared.event.as_raw_fd()
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

impl Drop for MooncakeBackend {
    fn drop(&mut self) {
        self.shared.stop();
        // As long as Mooncake's longest end; what is stuck then stays, with what it holds.
        self.shared.wait_ended(Instant::now() + Duration::from_secs(10));
    }
}
