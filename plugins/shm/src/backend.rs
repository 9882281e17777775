//! The transfer role.

use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{
    Completion, Error, ErrorCode, Level, Memory, NOTIFICATION_BYTES, Notification, Opening, PeerId,
    PreparedId, RegionId, Result, Submission, Tag, TransferBackend, TransferLimits, Write, log,
};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use crate::config::Config;
use crate::lists::Lists;
use crate::outbound::{Handover, Outbound};
use crate::queue::locked;
use crate::service::{Core, HANDSHAKE, MAX_PEERS};
use crate::wire::{Endpoint, Hello, NAME_BYTES, decode_welcome};
use crate::{copier, link, service};

/// Copies of 256 bytes and more are as fast as collecting them first; see "Pages between workers" in docs/benchmarks.md.
const SHORT_WRITES: u64 = 256;

/// An instance of the backend. See the crate.
pub struct ShmBackend {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    lists: Lists,
    next_peer: AtomicU32,
}

impl ShmBackend {
    /// Starts an instance and its threads.
    ///
    /// # Errors
    /// See [`crate::open`].
    pub fn open(opening: &Opening) -> Result<Self> {
        let config = Config::parse(&opening.config)?;
        if opening.name.is_empty() || opening.name.len() > NAME_BYTES {
            let text = format!("the name {:?} is not 1 to {NAME_BYTES} bytes", opening.name);
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        let copy_threads = config.copy_threads;
        let core = Arc::new(Core::new(config, opening.name.clone())?);
        let io = |e: Errno| Error::new(ErrorCode::IO, format!("cannot listen for peers: {e}"));
        let listener = link::listener(&core.endpoint.socket).map_err(io)?;
        let backend =
            Self { core, threads: Mutex::default(), lists: Lists::default(), next_peer: AtomicU32::new(1) };
        backend.spawn("shm-service".to_owned(), move |core| service::run(core, &listener))?;
        for thread in 0..copy_threads {
            backend.spawn(format!("shm-copy-{thread}"), move |core| copier::run(core, thread))?;
        }
        Ok(backend)
    }

    fn spawn(&self, name: String, body: impl FnOnce(&Core) + Send + 'static) -> Result<()> {
        let core = self.core.clone();
        let run = move || {
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| body(&core))) {
                // Its drop may panic, and nobody is above us to catch that.
                std::mem::forget(payload);
                core.set_broken();
            }
        };
        let thread = std::thread::Builder::new().name(name).spawn(run);
        let thread = thread.map_err(|e| Error::new(ErrorCode::IO, format!("cannot start a thread: {e}")))?;
        locked(&self.threads).push(thread);
        Ok(())
    }

    /// 0, or why no call is taken.
    fn state(&self) -> i32 {
        if self.core.is_stopping() {
            return ErrorCode::CLOSED.0;
        }
        if self.core.is_broken() { ErrorCode::PANICKED.0 } else { 0 }
    }

    fn ready(&self) -> Result<()> {
        match ErrorCode(self.state()) {
            ErrorCode(0) => Ok(()),
            ErrorCode::CLOSED => Err(Error::new(ErrorCode::CLOSED, "the instance was shut down")),
            code => Err(Error::new(code, "a thread of the instance panicked")),
        }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.core.config.fence_timeout()
    }

    fn peer(&self, id: PeerId) -> Option<Arc<Outbound>> {
        self.core.outbound.read().unwrap_or_else(PoisonError::into_inner).get(&id.0).cloned()
    }

    fn known_peer(&self, id: PeerId) -> Result<Arc<Outbound>> {
        self.peer(id).ok_or_else(|| Error::new(ErrorCode::INVALID_ARGUMENT, format!("no peer {}", id.0)))
    }

    fn fits(&self, peer: &Outbound, write: &Write) -> bool {
        let source = self.core.regions.source(write.source_region, write.source_offset, write.length.into());
        write.length > 0 && source.is_some() && peer.contains(write)
    }

    /// What [`submit`](TransferBackend::submit) and [`post`](TransferBackend::post) share.
    fn accept(
        &self,
        submission: &Submission,
        peer: Arc<Outbound>,
        writes: impl ExactSizeIterator<Item = Write>,
    ) -> i32 {
        if writes.len() > self.core.config.max_writes as usize
            || submission.notification_length as usize > NOTIFICATION_BYTES
        {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        if peer.is_gone() {
            return ErrorCode::PEER_LOST.0;
        }
        if self.core.queue.push(submission, peer, writes) { 0 } else { ErrorCode::WOULD_BLOCK.0 }
    }

    /// Keeps the event level-triggered: cleared once nothing waits, set again when something came meanwhile.
    fn settle_event(&self) {
        if self.core.nothing_waits() {
            link::clear(&self.core.event);
            if !self.core.nothing_waits() {
                self.core.signal();
            }
        }
    }
}

fn timeout(what: &str, pages: &str) -> Error {
    let text =
        format!("cannot prove that nothing is in flight {what}: {pages} must stay quarantined, try again");
    Error::new(ErrorCode::TIMEOUT, text)
}

impl TransferBackend for ShmBackend {
    fn limits(&self) -> TransferLimits {
        let config = &self.core.config;
        TransferLimits {
            max_writes: config.max_writes,
            max_submissions: config.max_submissions,
            reserved: [0; 6],
        }
        .with_short_writes(SHORT_WRITES)
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        self.ready()?;
        self.core.regions.add(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.ready()?;
        self.core.regions.kill(region)?;
        let deadline = self.deadline();
        // Ours may read the region, theirs may write it.
        let fenced = self.core.wait_own_copies(deadline)
            && self.core.inbounds().iter().all(|peer| peer.wait(deadline));
        if !fenced {
            return Err(timeout(&format!("to region {}", region.0), "its pages"));
        }
        self.core.regions.remove(region);
        Ok(())
    }

    fn endpoint(&self) -> Result<Vec<u8>> {
        self.ready()?;
        Ok(self.core.endpoint.encode())
    }

    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        self.ready()?;
        let endpoint = Endpoint::decode(endpoint)?;
        let own = &self.core.endpoint;
        let hello = Hello { token: endpoint.token, instance: own.instance, name: own.name.clone() };
        let dialled = link::dial(&endpoint.socket, &hello.encode(), HANDSHAKE);
        let (socket, answer, fds) = dialled.map_err(|e| match e {
            Errno::CONNREFUSED | Errno::CONNRESET | Errno::PIPE | Errno::AGAIN => {
                let text = format!("nobody answers for {name} on this machine: {e}");
                Error::new(ErrorCode::PEER_LOST, text)
            }
            e => Error::new(ErrorCode::IO, format!("cannot connect to {name}: {e}")),
        })?;
        let cards = decode_welcome(&answer)??;
        let id = PeerId(self.next_peer.fetch_add(1, Ordering::Relaxed));
        let (name, own_name, instance) = (name.to_owned(), endpoint.name, endpoint.instance);
        let peer = Outbound::new(Handover { id, name, own_name, instance, socket, cards, fds })?;
        let mut peers = self.core.outbound.write().unwrap_or_else(PoisonError::into_inner);
        peers.retain(|_, old| !(old.is_gone() && old.name == peer.name));
        if peers.len() >= MAX_PEERS {
            let text = format!("{MAX_PEERS} peers are connected, disconnect one first");
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        }
        log!(Level::INFO, "connected to {} as peer {}", peer.name, id.0);
        peers.insert(id.0, Arc::new(peer));
        drop(peers);
        self.core.wake();
        Ok(id)
    }

    fn disconnect(&self, id: PeerId) -> Result<()> {
        self.ready()?;
        let peer = self.known_peer(id)?;
        let deadline = self.deadline();
        peer.set_gone();
        let theirs = service::connections_of(&self.core, peer.instance);
        for inbound in &theirs {
            inbound.control.close();
        }
        let fenced = self.core.queue.wait_idle(id, deadline)
            && self.core.wait_own_copies(deadline)
            && theirs.iter().all(|inbound| inbound.fence(deadline));
        if !fenced {
            return Err(timeout(&format!("from {}", peer.name), "pages it may write"));
        }
        for inbound in &theirs {
            inbound.finish();
            // The peer sees the end; when it is gone already, there is nobody to tell.
            let _nobody = shutdown(&inbound.socket, Shutdown::Both);
        }
        let _nobody = shutdown(&peer.socket, Shutdown::Both);
        self.core.outbound.write().unwrap_or_else(PoisonError::into_inner).remove(&id.0);
        self.lists.forget(id);
        self.core.wake();
        Ok(())
    }

    fn prepare(&self, peer: PeerId, writes: &[Write]) -> Result<PreparedId> {
        self.ready()?;
        let peer = self.known_peer(peer)?;
        if let Some(at) = writes.iter().position(|write| !self.fits(&peer, write)) {
            let text = format!("write {at} is empty or leaves its region: {:?}", writes[at]);
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
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
        let Some(peer) = self.peer(submission.peer) else { return ErrorCode::INVALID_ARGUMENT.0 };
        if peer.is_gone() {
            return ErrorCode::PEER_LOST.0;
        }
        if !writes.iter().all(|write| self.fits(&peer, write)) {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        self.accept(submission, peer, writes.iter().copied())
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
        self.accept(submission, list.peer.clone(), indices.iter().map(|index| list.writes[*index as usize]))
    }

    fn poll(&self, completions: &mut [Completion]) -> i32 {
        let state = self.state();
        if state != 0 {
            return state;
        }
        let taken = self.core.queue.take(completions);
        if taken < completions.len() {
            self.settle_event();
        }
        taken as i32
    }

    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        let state = self.state();
        if state != 0 {
            return state;
        }
        let taken = self.core.take_notifications(notifications);
        if taken < notifications.len() {
            self.settle_event();
        }
        taken as i32
    }

    fn cancel(&self, tag: Tag) -> i32 {
        match self.state() {
            0 if self.core.queue.cancel(tag) => 0,
            0 => ErrorCode::INVALID_ARGUMENT.0,
            state => state,
        }
    }

    fn settled(&self, tag: Tag) -> i32 {
        match self.state() {
            0 => i32::from(self.core.queue.settled(tag)),
            state => state,
        }
    }

    fn event_fd(&self) -> i32 {
        self.core.event.as_raw_fd()
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        let deadline = Instant::now() + Duration::from_millis(deadline_ms.min(3_600_000));
        self.core.stop();
        let inbound = self.core.inbounds();
        for peer in &inbound {
            peer.control.close();
        }
        let fenced = self.core.wait_own_copies(deadline) && inbound.iter().all(|peer| peer.fence(deadline));
        let mut threads = locked(&self.threads);
        while let Some(thread) = threads.pop() {
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_micros(200));
            }
            if !thread.is_finished() {
                let name = thread.thread().name().unwrap_or("a thread").to_owned();
                threads.push(thread);
                return Err(Error::new(ErrorCode::TIMEOUT, format!("{name} still runs at the deadline")));
            }
            // It caught its own panics.
            let _ended = thread.join();
        }
        if !fenced {
            return Err(timeout("from a peer", "all pages"));
        }
        for peer in &inbound {
            let _nobody = shutdown(&peer.socket, Shutdown::Both);
        }
        for peer in self.core.outbounds() {
            let _nobody = shutdown(&peer.socket, Shutdown::Both);
        }
        Ok(())
    }
}

impl Drop for ShmBackend {
    fn drop(&mut self) {
        // Nobody is left to hear that a peer could not be fenced; the mappings it holds outlive us.
        let _unfenced = self.shutdown(1000);
    }
}
