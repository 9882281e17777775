//! The transfer role.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{
    Error, ErrorCode, Level, Memory, MemoryKind, Notification, Opening, PeerId, RegionId, Result, Write, log,
};
use host_transfer_kit::{
    Backend, Frontend, Instance, Peer as _, locked, start_thread, unknown_peer, unproven,
};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use crate::config::Config;
use crate::copier::{self, Between};
use crate::outbound::{Handover, Outbound};
use crate::progress::Progress;
use crate::regions::no_device;
use crate::shared::{Core, MAX_PEERS};
use crate::wire::{Endpoint, LetGo};
use crate::{device_copier, handshake, service, socket};

/// An instance of the backend. See the crate.
pub type ShmBackend = Frontend<Shm>;

/// What shared memory brings to a [`ShmBackend`].
pub struct Shm {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    next_peer: AtomicU32,
    /// Whether the thread that copies by devices runs.
    device_thread: Mutex<bool>,
}

/// Starts an instance and its threads.
///
/// # Errors
/// See [`crate::open`].
pub fn open(opening: &Opening) -> Result<ShmBackend> {
    let config = Config::parse(&opening.config)?;
    let copy_threads = config.copy_threads;
    let core = Arc::new(Core::new(config, &opening.name)?);
    let io = |e: Errno| Error::new(ErrorCode::IO, format!("cannot listen for peers: {e}"));
    let listener = socket::listener(&core.endpoint.socket).map_err(io)?;
    let backend = Shm {
        core,
        threads: Mutex::default(),
        next_peer: AtomicU32::new(1),
        device_thread: Mutex::new(false),
    };
    backend.spawn("shm-service", move |core| service::run(core, &listener))?;
    for thread in 0..copy_threads {
        backend.spawn(&format!("shm-copy-{thread}"), move |core| copier::run(core, thread))?;
    }
    Ok(Frontend::new(backend))
}

impl Shm {
    fn spawn(&self, name: &str, body: impl FnOnce(&Core) + Send + 'static) -> Result<()> {
        let (core, broken) = (self.core.clone(), self.core.clone());
        let thread = start_thread(name, move || body(&core), move || broken.instance.set_broken())?;
        locked(&self.threads).push(thread);
        Ok(())
    }

    /// Starts the thread that copies by devices, unless it runs.
    fn use_devices(&self) -> Result<()> {
        let mut runs = locked(&self.device_thread);
        if !*runs {
            if self.core.process.is_none() {
                let text =
                    "this kernel cannot prove that a process is gone with its GPU's copies, Linux 5.3 can";
                return Err(no_device(&text));
            }
            self.spawn("shm-device", device_copier::run)?;
            *runs = true;
        }
        Ok(())
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.core.config.fence_timeout()
    }

    /// Asks every peer that may have opened a region on a device to close it. A peer that does not close it has the
    /// memory longer, but writes nothing to it.
    fn have_closed(&self, region: RegionId, deadline: Instant) {
        let message = LetGo { region: region.0 }.encode();
        let told: Vec<_> = self
            .core
            .inbounds()
            .into_iter()
            .filter_map(|peer| {
                let told = peer.knows_devices() && !peer.is_lost();
                let sent = told && socket::send(&peer.socket, &message, &[]).is_ok();
                sent.then(|| (peer.tell(), peer))
            })
            .collect();
        for (count, peer) in told {
            if !peer.wait_let_go(count, deadline) {
                log!(
                    Level::WARN,
                    "{} still has region {} open, whose memory the GPU keeps until it lets go",
                    peer.name,
                    region.0
                );
            }
        }
    }
}

impl Backend for Shm {
    type Peer = Outbound;
    type Progress = Progress;

    fn instance(&self) -> &Instance<Outbound, Progress> {
        &self.core.instance
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        let region = if memory.kind == MemoryKind::VRAM {
            let device = self.core.devices.get(memory.device).map_err(|why| no_device(&why))?;
            self.use_devices()?;
            let region = self.core.regions.add_on(&device, memory)?;
            self.core.pin();
            for peer in self.core.instance.peers.all().iter().filter(|peer| !peer.knows_devices()) {
                log!(Level::WARN, "{}", handshake::too_old(&peer.name, handshake::SENT).message);
            }
            region
        } else {
            let region = self.core.regions.add(memory)?;
            if *locked(&self.device_thread) {
                self.core.pin();
            }
            region
        };
        Ok(region)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.core.regions.kill(region)?;
        let deadline = self.deadline();
        // Copies of this instance may read the region, copies of peers may write it.
        let fenced = self.core.wait_own_copies(deadline)
            && self.core.inbounds().iter().all(|peer| peer.wait(deadline));
        if !fenced {
            return Err(unproven(&format!("to region {}", region.0), "its pages"));
        }
        if self.core.regions.is_on_device(region) {
            self.have_closed(region, deadline);
        }
        self.core.regions.remove(region);
        Ok(())
    }

    fn endpoint(&self) -> Result<Vec<u8>> {
        Ok(self.core.endpoint.encode())
    }

    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        let endpoint = Endpoint::decode(endpoint)?;
        let welcomed = handshake::say_hello(&self.core, name, &endpoint)?;
        let id = PeerId(self.next_peer.fetch_add(1, Ordering::Relaxed));
        let (instance, own_name) = (endpoint.instance, endpoint.name);
        let handover = Handover { id, name: name.to_owned(), own_name, instance, welcomed };
        let peer = Arc::new(Outbound::new(handover, &self.core.devices)?);
        if peer.devices().next().is_some() {
            self.use_devices()?;
        }
        let peers = self.core.instance.peers.all();
        for lost in peers.iter().filter(|old| old.name == name && old.is_closed()) {
            service::lose(&self.core, lost);
        }
        let replaced = |old: &Outbound| old.is_gone() && old.name == name;
        if !self.core.instance.peers.add(peer, MAX_PEERS, replaced) {
            let text = format!("{MAX_PEERS} peers are connected, disconnect one first");
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        }
        if *locked(&self.device_thread) {
            self.core.pin();
        }
        log!(Level::INFO, "connected to {name} as peer {}", id.0);
        self.core.wake.signal();
        Ok(id)
    }

    fn disconnect(&self, id: PeerId) -> Result<()> {
        let instance = &self.core.instance;
        let peer = instance.peers.get(id).ok_or_else(|| unknown_peer(id))?;
        let deadline = self.deadline();
        peer.set_gone();
        let theirs = self.core.connections_of(peer.instance);
        for inbound in &theirs {
            inbound.close();
        }
        let fenced = instance.queue.wait_idle(id, deadline)
            && self.core.wait_own_copies(deadline)
            && theirs.iter().all(|inbound| inbound.fence(deadline));
        if !fenced {
            return Err(unproven(&format!("from {}", peer.name), "pages it may write"));
        }
        for inbound in &theirs {
            inbound.finish();
            // The peer sees the end. A peer that is gone already need not be told.
            let _gone = shutdown(&inbound.socket, Shutdown::Both);
        }
        let _gone = shutdown(&peer.socket, Shutdown::Both);
        instance.peers.remove(id);
        self.core.wake.signal();
        Ok(())
    }

    fn misfit(&self, peer: &Outbound, writes: &[Write]) -> Option<usize> {
        // Most writes are between the same two regions.
        let mut between: Option<Between> = None;
        writes.iter().position(|write| {
            if !between.as_ref().is_some_and(|known| known.is_of(write)) {
                between = Between::regions_of(&self.core, peer, write);
            }
            let places = between.as_ref().and_then(|known| known.places(write));
            write.length == 0 || places.is_none()
        })
    }

    fn start(&self, peer: &Arc<Outbound>, index: u32) -> bool {
        let first = self.core.instance.queue.content(index).write(0);
        let by_device = first.is_some_and(|write| self.core.is_by_device(peer, &write));
        let ready = if by_device { &self.core.device_ready } else { &self.core.ready };
        ready.push(index);
        true
    }

    fn notifications(&self, to: &mut [Notification]) -> usize {
        self.core.take_notifications(to)
    }

    fn has_notifications(&self) -> bool {
        self.core.has_notifications()
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        let deadline = Instant::now() + Duration::from_millis(deadline_ms.min(3_600_000));
        self.core.stop();
        let inbound = self.core.inbounds();
        for peer in &inbound {
            peer.close();
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
            // The thread caught its own panics.
            let _ended = thread.join();
        }
        if !fenced {
            return Err(unproven("from a peer", "all pages"));
        }
        for peer in &inbound {
            let _gone = shutdown(&peer.socket, Shutdown::Both);
        }
        for peer in self.core.instance.peers.all() {
            let _gone = shutdown(&peer.socket, Shutdown::Both);
        }
        Ok(())
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        // No caller is left to hear that a peer could not be fenced. The mappings that the peer holds outlive this instance.
        let _unfenced = self.shutdown(1000);
    }
}
