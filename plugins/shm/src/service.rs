//! What an instance's threads share, and the service thread: it answers peers that connect and notices those that go.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use host_plugin_api::{Level, Result, TransferLimits, log};
use host_transfer_kit::{Event, Instance, Peer as _, Random, locked, random};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use crate::config::Config;
use crate::control::{LINES, Line};
use crate::copier::Progress;
use crate::cuda::{Devices, Refused};
use crate::handshake::{HANDSHAKE, greet};
use crate::inbound::Inbound;
use crate::outbound::Outbound;
use crate::ready::Ready;
use crate::regions::Regions;
use crate::socket::{self, Heard};
use crate::wire::{Endpoint, LetGo};

/// Copies of 256 bytes and more are as fast as collecting them first. See docs/benchmarks.md.
const SHORT_WRITES: u64 = 256;

/// Most connections in each direction.
pub const MAX_PEERS: usize = 256;
/// Most connections that have not said hello.
const MAX_STRANGERS: usize = 32;

/// See the module.
pub struct Core {
    pub config: Config,
    pub endpoint: Endpoint,
    /// Its notifications are of peers that only we were connected to, and that are gone.
    pub instance: Instance<Outbound, Progress>,
    pub regions: Regions,
    pub ready: Ready,
    /// Busy marks of our copies, for our own fences.
    pub holds: [Line; LINES],
    pub devices: Devices,
    pinning: Mutex<()>,
    /// Submissions that wait for the thread that copies by devices.
    pub device_ready: Ready,
    /// Readable once this process is gone, for peers that our devices write to.
    pub process: Option<OwnedFd>,
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
        let endpoint = Endpoint { socket: random()?, token: random()?, instance: random()?, name };
        Ok(Self {
            regions: Regions::new(endpoint.instance)?,
            endpoint,
            instance,
            ready: Ready::new(max_submissions),
            devices: Devices::default(),
            pinning: Mutex::default(),
            device_ready: Ready::new(max_submissions),
            // Linux before 5.3 has none.
            process: pidfd_open(getpid(), PidfdFlags::empty()).ok(),
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
        self.device_ready.stop();
        self.wake.signal();
    }

    /// Has host memory that takes part in copies with devices kept in its place. Without it these copies work, and are slower.
    pub fn pin(&self) {
        let _one_at_a_time = locked(&self.pinning);
        let ours: Vec<_> = self.regions.devices();
        let peers = self.instance.peers.all();
        let theirs: Vec<u32> = peers.iter().flat_map(|peer| peer.devices().collect::<Vec<_>>()).collect();
        let warn = |whose: &str, result: std::result::Result<(), Refused>| {
            if let Err(refused) = result {
                log!(Level::WARN, "copies between GPUs and {whose} are slower: {refused}");
            }
        };
        let one =
            |among: &[u32]| self.devices.known().into_iter().find(|device| among.contains(&device.ordinal));
        if let Some(device) = one(&theirs) {
            warn("our host memory", self.regions.pin(&device));
        }
        if let Some(device) = one(&ours) {
            for peer in &peers {
                warn(&format!("the host memory of {}", peer.name), peer.pin(&device));
            }
        }
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
        let inbound = core.inbounds().into_iter().filter(|i| !i.is_lost() && i.watched().is_some());
        let inbound: Vec<_> = inbound.collect();
        let outbound: Vec<_> = core.instance.peers.all().into_iter().filter(|o| !o.is_gone()).collect();
        let timeout = (!strangers.is_empty()).then_some(Timespec { tv_sec: 1, tv_nsec: 0 });
        let watched = [core.wake.as_fd(), listener.as_fd()]
            .into_iter()
            .chain(strangers.iter().map(|(fd, _)| fd.as_fd()))
            .chain(inbound.iter().filter_map(|i| i.watched()))
            .chain(outbound.iter().map(|o| o.socket.as_fd()));
        let ready = readable(watched, timeout.as_ref());
        let mut ready = ready.into_iter();
        let woken = ready.next().unwrap_or(false);
        let called = ready.next().unwrap_or(false);
        let speaking: Vec<bool> = ready.by_ref().take(strangers.len()).collect();
        for peer in inbound {
            if !ready.next().unwrap_or(false) {
                continue;
            }
            if peer.notice(|socket| socket::has_ended(socket)) {
                log!(Level::INFO, "{} closed its connection to us", peer.name);
                core.instance.event.signal();
            } else if peer.watched().is_none() {
                log!(
                    Level::ERROR,
                    "{} ended in mid copy, and its kernel has no proof that its GPU stopped",
                    peer.name
                );
            }
        }
        for peer in outbound {
            if !ready.next().unwrap_or(false) {
                continue;
            }
            match socket::hear(&peer.socket) {
                Heard::End if peer.set_gone() => {
                    report_outbound(core, &peer);
                    close_memory(core, &peer);
                }
                Heard::Message(bytes) => let_go(core, &peer, &bytes),
                Heard::End | Heard::Nothing => {}
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

/// Gives the memory on devices of a peer that is gone back to them, so that its successor has it.
fn close_memory(core: &Core, peer: &Outbound) {
    // Copies that begin from now on see that the peer is gone.
    if peer.devices().next().is_some() && core.wait_own_copies(Instant::now() + core.config.fence_timeout()) {
        peer.close_devices(|_| true);
    }
}

/// A peer took a region on a device back, and is about to free its memory.
fn let_go(core: &Core, peer: &Outbound, message: &[u8]) {
    let Ok(LetGo { region }) = LetGo::decode(message) else { return };
    // The peer has closed the region's gate, so copies that begin from now on do not use it.
    if core.wait_own_copies(Instant::now() + core.config.fence_timeout()) {
        peer.close_devices(|known| known.id == region && !peer.region_lives(known));
        peer.say_let_go();
    }
}

/// The connections that an instance made to us.
pub fn connections_of(core: &Core, instance: Random) -> Vec<Arc<Inbound>> {
    let inbound = locked(&core.inbound);
    inbound.iter().filter(|i| i.instance == instance).cloned().collect()
}
