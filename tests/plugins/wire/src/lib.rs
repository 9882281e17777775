//! A transfer backend over TCP.
//!
//! A submission waits in a queue until the thread of its peer ([`outbound`]) sends it. A thread of the receiving instance
//! ([`inbound`]) lands the bytes in registered memory ([`regions`]) and answers. The answer completes the submission.
//!
//! It does not use the transfer kit, and wakes its host instead of having a descriptor. `examples/tcp-transfer` does the same
//! with the kit.

mod inbound;
mod outbound;
mod queues;
mod regions;

use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{
    Completion, Error, ErrorCode, Memory, MemoryKind, NOTIFICATION_BYTES, Notification, Opening, PeerId,
    RegionId, Result, Submission, Tag, TransferBackend, TransferLimits, WAKES, Write,
};

use inbound::Endpoint;
use outbound::Peer;
use queues::Queues;
use regions::Regions;

/// Most writes in one submission.
const MAX_WRITES: usize = 1024;
/// Most submissions accepted and not yet polled.
const MAX_SUBMISSIONS: usize = 64;
const MAX_PEERS: usize = 256;

/// Time that a peer has for its part of a connection's beginning or end. On this machine a process is slow only when it gets no
/// processor. A link to another machine may be broken.
fn patience(peer: IpAddr) -> Duration {
    Duration::from_secs(if peer.is_loopback() { 60 } else { 2 })
}

/// An instance of the backend.
pub struct Backend {
    shared: Arc<Shared>,
    endpoint: Endpoint,
    peers: Mutex<Vec<Arc<Peer>>>,
    next_peer: AtomicU32,
    acceptor: Mutex<Option<JoinHandle<()>>>,
    /// Time that a disconnect waits for the proof that nothing is in flight any more. None for the usual time ([`patience`]).
    fence: Option<Duration>,
}

/// State that the instance's threads share.
struct Shared {
    name: String,
    regions: Regions,
    queues: Queues,
}

/// Opens an instance. `opening.config` is the user's `[plugin.NAME]` table as TOML. Without keys in plugin.toml it is empty, and
/// only this machine reaches the instance. To reach other machines, declare `address` there, and the capability `multi_host`. To
/// add more keys, declare each, which lets the host check them, and read the text with the crate `toml`.
///
/// # Errors
/// `CONFIG` for an invalid address, `INVALID_ARGUMENT` for a name that notifications cannot carry, `IO` when the instance cannot
/// listen.
pub fn open(opening: &Opening) -> Result<Backend> {
    if opening.name.len() > 64 {
        return Err(invalid("the instance's name is longer than 64 bytes"));
    }
    let io = |error: std::io::Error| Error::new(ErrorCode::IO, format!("cannot listen: {error}"));
    let listener = TcpListener::bind((address(&opening.config)?, 0)).map_err(io)?;
    let endpoint = Endpoint::of(&listener).map_err(io)?;
    let shared =
        Arc::new(Shared { name: opening.name.clone(), regions: Regions::default(), queues: Queues::new() });
    let acceptor = std::thread::Builder::new().name("accept".into());
    let accept = {
        let (shared, endpoint) = (Arc::clone(&shared), endpoint.clone());
        move || inbound::accept(&shared, &listener, &endpoint)
    };
    let acceptor = acceptor.spawn(accept).map_err(io)?;
    Ok(Backend {
        shared,
        endpoint,
        peers: Mutex::default(),
        next_peer: AtomicU32::new(1),
        acceptor: Mutex::new(Some(acceptor)),
        fence: None,
    })
}

// The plugin's entry: writes plugin.toml into the file and exports the factory. `shutdown` and `drop` need no entry.
host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
}

/// The value of the key `address`. One key needs no parser. For more keys, use `toml`.
fn address(config: &str) -> Result<Ipv4Addr> {
    let Some(value) = config.lines().find_map(|line| line.trim().strip_prefix("address")) else {
        return Ok(Ipv4Addr::LOCALHOST);
    };
    let value = value.trim_start().trim_start_matches('=').trim().trim_matches(['"', '\'']);
    value.parse().map_err(|error| Error::new(ErrorCode::CONFIG, format!("address {value:?}: {error}")))
}

fn invalid(text: &str) -> Error {
    Error::new(ErrorCode::INVALID_ARGUMENT, text)
}

/// Locks a mutex. A poisoned lock is ignored: the data that a panicking thread left is still the best there is.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Backend {
    /// Sets the time that a disconnect waits, for tests in which the proof does not come.
    #[must_use]
    pub fn with_fence(mut self, fence: Duration) -> Self {
        self.fence = Some(fence);
        self
    }

    fn peers(&self) -> MutexGuard<'_, Vec<Arc<Peer>>> {
        lock(&self.peers)
    }

    fn end(&self, peer: &Peer) -> Result<()> {
        let fence = self.fence.unwrap_or_else(|| patience(peer.address()));
        if !peer.end(Instant::now() + fence) {
            let text = format!("{} has not confirmed that nothing is in flight to it", peer.name);
            return Err(Error::new(ErrorCode::TIMEOUT, text));
        }
        self.peers().retain(|other| other.id != peer.id);
        Ok(())
    }

    fn opened(&self) -> Result<()> {
        match self.shared.queues.closed() {
            true => Err(Error::new(ErrorCode::CLOSED, "the instance was shut down")),
            false => Ok(()),
        }
    }
}

impl TransferBackend for Backend {
    fn limits(&self) -> TransferLimits {
        let (max_writes, max_submissions) = (MAX_WRITES as u32, MAX_SUBMISSIONS as u32);
        TransferLimits::new(max_writes, max_submissions)
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        self.opened()?;
        if memory.kind != MemoryKind::DRAM {
            return Err(Error::new(ErrorCode::UNSUPPORTED, "only host memory can be registered"));
        }
        self.shared.regions.add(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.opened()?;
        self.shared.regions.remove(region)
    }

    fn endpoint(&self) -> Result<Vec<u8>> {
        self.opened()?;
        Ok(self.endpoint.to_bytes())
    }

    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        self.opened()?;
        let endpoint = Endpoint::from_bytes(endpoint)
            .ok_or_else(|| Error::new(ErrorCode::VERSION, "the endpoint is not one of this backend"))?;
        // An older connection under the same name is ended: most likely it was lost.
        let old = self.peers().iter().find(|peer| peer.name == name).cloned();
        if let Some(old) = old {
            self.end(&old)?;
        }
        if self.peers().len() >= MAX_PEERS {
            return Err(Error::new(ErrorCode::NO_RESOURCE, format!("{MAX_PEERS} peers are connected")));
        }
        let id = self.next_peer.fetch_add(1, Ordering::Relaxed);
        let peer = outbound::connect(&self.shared, id, name, &endpoint)?;
        self.peers().push(peer);
        Ok(PeerId(id))
    }

    fn disconnect(&self, peer: PeerId) -> Result<()> {
        self.opened()?;
        let unknown = || invalid("no such peer");
        let peer = self.peers().iter().find(|p| p.id == peer.0).cloned().ok_or_else(unknown)?;
        // Inbound connections are cut first: after that nothing of the peer lands here.
        self.shared.regions.cut(|name| name == peer.name);
        self.end(&peer)
    }

    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        let fits =
            writes.len() <= MAX_WRITES && submission.notification_length as usize <= NOTIFICATION_BYTES;
        if !fits {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        match self.peers().iter().find(|peer| peer.id == submission.peer.0) {
            None if self.shared.queues.closed() => ErrorCode::CLOSED.0,
            None => ErrorCode::INVALID_ARGUMENT.0,
            Some(peer) if peer.lost() => ErrorCode::PEER_LOST.0,
            Some(_) => self.shared.queues.submit(submission, writes),
        }
    }

    fn poll(&self, completions: &mut [Completion]) -> i32 {
        self.shared.queues.poll(completions)
    }

    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        self.shared.queues.notifications(notifications)
    }

    fn cancel(&self, tag: Tag) -> i32 {
        self.shared.queues.cancel(tag)
    }

    fn settled(&self, tag: Tag) -> i32 {
        self.shared.queues.settled(tag)
    }

    fn event_fd(&self) -> i32 {
        // This plugin has no descriptor: `queues` wakes the host when there is something to fetch.
        WAKES
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        let deadline = Instant::now() + Duration::from_millis(deadline_ms.min(60_000));
        if !self.shared.queues.close() {
            return Ok(());
        }
        let mut ended = true;
        for peer in std::mem::take(&mut *self.peers()) {
            let proven = peer.end(deadline);
            if !proven {
                peer.abandon();
            }
            ended &= proven;
        }
        self.shared.regions.cut(|_| true);
        // `accept` looks after each connection whether the instance is closed: a connection from here wakes it up.
        if let Ok(stream) = TcpStream::connect(self.endpoint.address) {
            let _gone = stream.shutdown(Shutdown::Both);
        }
        if let Some(acceptor) = lock(&self.acceptor).take() {
            ended &= acceptor.join().is_ok();
        }
        match ended {
            true => Ok(()),
            false => Err(Error::new(ErrorCode::TIMEOUT, "a peer did not answer before the deadline")),
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // A host calls `shutdown` first. This is for a host that fails before it can.
        let _best_effort = self.shutdown(1000);
    }
}
