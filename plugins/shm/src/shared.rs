//! The state that an instance's threads share.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use host_plugin_api::{Level, Result, TransferLimits, log};
use host_transfer_kit::{Event, Instance, Random, locked, random};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use crate::config::Config;
use crate::control::{LINES, Line};
use crate::cuda::{Devices, Refused};
use crate::inbound::Inbound;
use crate::outbound::Outbound;
use crate::progress::Progress;
use crate::ready::Ready;
use crate::regions::Regions;
use crate::wire::Endpoint;

/// Copies of 256 bytes and more are as fast as collecting them first. See docs/benchmarks.md.
const SHORT_WRITES: u64 = 256;

/// Most connections in each direction.
pub const MAX_PEERS: usize = 256;
/// The shared state of one instance.
pub struct Core {
    pub config: Config,
    pub endpoint: Endpoint,
    /// Its notifications are of peers that are gone and had no connection to this instance.
    pub instance: Instance<Outbound, Progress>,
    pub regions: Regions,
    pub ready: Ready,
    /// Busy marks of this instance's copies, for its own fences.
    pub holds: [Line; LINES],
    pub devices: Devices,
    pinning: Mutex<()>,
    /// Submissions that wait for the thread that copies by devices.
    pub device_ready: Ready,
    /// Readable once this process is gone, for peers that devices of this instance write to.
    pub process: Option<OwnedFd>,
    pub inbound: Mutex<Vec<Arc<Inbound>>>,
    /// Wakes the service thread.
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
            // Linux before 5.3 has no such descriptor.
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

    /// Pins host memory that takes part in copies with devices. Without this these copies work, but are slower.
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

    /// The connections that an instance made to this one.
    pub fn connections_of(&self, instance: Random) -> Vec<Arc<Inbound>> {
        locked(&self.inbound).iter().filter(|i| i.instance == instance).cloned().collect()
    }

    /// Waits until every copy of this instance that began before this call has ended.
    pub fn wait_own_copies(&self, deadline: Instant) -> bool {
        self.holds.iter().all(|line| line.wait(deadline, || false))
    }
}
