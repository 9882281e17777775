//! What an instance's threads share, and the service thread: it answers peers that connect and notices those that go.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Level, Result, TransferLimits, log};
use host_transfer_kit::{Event, Instance, Peer as _, Random, locked, random};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::config::Config;
use crate::control::{ControlPage, Line, MAX_COPY_THREADS};
use crate::copier::Progress;
use crate::inbound::Inbound;
use crate::mapping::{SharedPage, Writers};
use crate::outbound::Outbound;
use crate::ready::Ready;
use crate::regions::Regions;
use crate::socket;
use crate::wire::{Endpoint, Hello, encode_welcome};

/// Copies of 256 bytes and more are as fast as collecting them first. See docs/benchmarks.md.
const SHORT_WRITES: u64 = 256;

/// Most connections in each direction.
pub const MAX_PEERS: usize = 256;
/// Most connections that have not said hello.
const MAX_STRANGERS: usize = 32;
/// How long a stranger has to say hello, and a dialled peer to answer.
pub const HANDSHAKE: Duration = Duration::from_secs(5);

/// See the module.
pub struct Core {
    pub config: Config,
    pub endpoint: Endpoint,
    /// Its notifications are of peers that only we were connected to, and that are gone.
    pub instance: Instance<Outbound, Progress>,
    pub regions: Regions,
    pub ready: Ready,
    /// Busy marks of our copy threads, for our own fences.
    pub holds: [Line; MAX_COPY_THREADS],
    pub inbound: Mutex<Vec<Arc<Inbound>>>,
    /// Makes the service thread look around.
    pub wake: Event,
}

impl Core {
    pub fn new(config: Config, name: &str) -> Result<Self> {
        let Config { max_writes, max_submissions, .. } = config;
        let limits =
            TransferLimits { short_writes: SHORT_WRITES, ..TransferLimits::new(max_writes, max_submissions) };
        let instance = Instance::new(name, limits, MAX_PEERS)?;
        let name = name.to_owned();
        Ok(Self {
            endpoint: Endpoint { socket: random()?, token: random()?, instance: random()?, name },
            instance,
            regions: Regions::new()?,
            ready: Ready::new(max_submissions),
            holds: Default::default(),
            inbound: Mutex::new(Vec::with_capacity(MAX_PEERS)),
            wake: Event::new()?,
            config,
        })
    }

    /// Tells all threads to end.
    pub fn stop(&self) {
        self.instance.stop();
        self.ready.stop();
        self.wake.signal();
    }

    pub fn inbounds(&self) -> Vec<Arc<Inbound>> {
        locked(&self.inbound).clone()
    }

    /// Waits until every copy of ours that began before this call has ended.
    pub fn wait_own_copies(&self, deadline: Instant) -> bool {
        self.holds.iter().all(|line| line.wait(deadline, || false))
    }
}

/// The service thread. `listener` does not block.
pub fn run(core: &Core, listener: &OwnedFd) {
    let mut strangers: Vec<(OwnedFd, Instant)> = Vec::new();
    while !core.instance.is_stopping() {
        locked(&core.inbound).retain(|i| !i.is_finished());
        let inbound: Vec<_> = core.inbounds().into_iter().filter(|i| !i.is_lost()).collect();
        let outbound: Vec<_> = core.instance.peers.all().into_iter().filter(|o| !o.is_gone()).collect();
        let timeout = (!strangers.is_empty()).then_some(Timespec { tv_sec: 1, tv_nsec: 0 });
        let watched = [core.wake.as_fd(), listener.as_fd()]
            .into_iter()
            .chain(strangers.iter().map(|(fd, _)| fd.as_fd()))
            .chain(inbound.iter().map(|i| i.socket.as_fd()))
            .chain(outbound.iter().map(|o| o.socket.as_fd()));
        let ready = readable(watched, timeout.as_ref());
        let mut ready = ready.into_iter();
        let woken = ready.next().unwrap_or(false);
        let called = ready.next().unwrap_or(false);
        let speaking: Vec<bool> = ready.by_ref().take(strangers.len()).collect();
        for peer in inbound {
            if ready.next().unwrap_or(false) && socket::has_ended(&peer.socket) {
                peer.set_lost();
                log!(Level::INFO, "{} closed its connection to us", peer.name);
                core.instance.event.signal();
            }
        }
        for peer in outbound {
            if ready.next().unwrap_or(false) && socket::has_ended(&peer.socket) && peer.set_gone() {
                report_outbound(core, &peer);
            }
        }
        let mut speaking = speaking.into_iter();
        strangers.retain(|(fd, since)| {
            if speaking.next().unwrap_or(false) {
                greet(core, fd);
                return false;
            }
            since.elapsed() < HANDSHAKE
        });
        if woken {
            core.wake.clear();
        }
        while called && let Some(fd) = socket::accept(listener) {
            // One more than allowed is closed, which the caller sees as a peer that does not answer.
            if strangers.len() < MAX_STRANGERS {
                strangers.push((fd, Instant::now()));
            }
        }
    }
}

fn readable<'a>(fds: impl Iterator<Item = BorrowedFd<'a>>, timeout: Option<&Timespec>) -> Vec<bool> {
    let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    match poll(&mut fds, timeout) {
        Ok(_) => fds.iter().map(|fd| !fd.revents().is_empty()).collect(),
        // Interrupted: nothing is known to be readable, the loop looks again.
        Err(_) => Vec::new(),
    }
}

/// The peer we send to is gone. Says so here only when no connection of the peer's own will.
fn report_outbound(core: &Core, peer: &Outbound) {
    let other_way = locked(&core.inbound).iter().any(|i| i.instance == peer.instance);
    if !other_way {
        let notifications = &core.instance.notifications;
        if !notifications.is_full() {
            notifications.peer_lost(&peer.own_name);
        }
    }
    core.instance.event.signal();
}

/// Answers a hello. Whatever is wrong with it harms only this connection.
fn greet(core: &Core, stranger: &OwnedFd) {
    let Ok((bytes, _)) = socket::receive(stranger) else { return };
    if let Err(refusal) = Hello::decode(&bytes).and_then(|hello| admit(core, stranger, hello)) {
        log!(Level::WARN, "a connection was refused: {refusal}");
        // A refusal that cannot be delivered is a closed connection, which says the same.
        let _undelivered = socket::send(stranger, &encode_welcome(Err(&refusal)), &[]);
    }
}

fn admit(core: &Core, stranger: &OwnedFd, hello: Hello) -> Result<()> {
    if hello.token != core.endpoint.token {
        return Err(Error::new(ErrorCode::PEER_LOST, "this endpoint is of an instance that is gone"));
    }
    let io = |e| Error::new(ErrorCode::IO, format!("cannot set up the connection: {e}"));
    let (control, control_fd) =
        SharedPage::<ControlPage>::create("host-shm-control", Writers::All).map_err(io)?;
    let socket = stranger.try_clone().map_err(|e| Error::new(ErrorCode::IO, e.to_string()))?;
    let peer = Arc::new(Inbound::new(hello.instance, hello.name, socket, control));
    {
        let mut inbound = locked(&core.inbound);
        if inbound.len() >= MAX_PEERS {
            return Err(Error::new(ErrorCode::NO_RESOURCE, format!("{MAX_PEERS} peers are connected")));
        }
        // In the list before the peer gets the means to write, so that no fence misses it.
        inbound.push(peer.clone());
    }
    let sent = core.regions.offer(|descriptors, live, regions| {
        let mut fds = vec![control_fd.as_fd(), live, core.instance.event.as_fd()];
        fds.extend_from_slice(regions);
        socket::send(stranger, &encode_welcome(Ok(descriptors)), &fds)
    });
    if let Err(e) = sent {
        peer.finish();
        return Err(io(e));
    }
    Ok(())
}

/// The connections that an instance made to us.
pub fn connections_of(core: &Core, instance: Random) -> Vec<Arc<Inbound>> {
    let inbound = locked(&core.inbound);
    inbound.iter().filter(|i| i.instance == instance).cloned().collect()
}
