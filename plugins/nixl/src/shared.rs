//! What the host's threads and the driver share.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::Instant;

use host_plugin_api::{Counter, Error, ErrorCode, PeerId, RegionId, Result, host};
use rustix::event::{EventfdFlags, eventfd};

use crate::config::Config;
use crate::lists::List;
use crate::notices::Notices;
use crate::queue::{Queue, locked};
use crate::regions::{Card, Regions};
use crate::wire::{Endpoint, Random};

/// A connection on which we are the sender, as the hot calls see it.
pub struct Peer {
    pub id: PeerId,
    /// What the host called the peer.
    pub name: String,
    /// The name it was opened under.
    pub own_name: String,
    pub instance: Random,
    /// What lies behind its door.
    pub regions: Vec<Card>,
    gone: AtomicBool,
}

impl Peer {
    pub fn new(id: PeerId, name: String, own_name: String, instance: Random, regions: Vec<Card>) -> Self {
        Self { id, name, own_name, instance, regions, gone: AtomicBool::new(false) }
    }

    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// Says that nothing more is sent; true the first time.
    pub fn set_gone(&self) -> bool {
        !self.gone.swap(true, Ordering::SeqCst)
    }
}

/// What the host's threads ask of the driver. Each is answered once; a caller waits for its answer, so there are no more
/// than threads that call.
pub enum Command {
    Connect {
        name: String,
        endpoint: Endpoint,
        reply: SyncSender<Result<PeerId>>,
    },
    Disconnect {
        peer: PeerId,
        reply: SyncSender<Result<()>>,
    },
    /// Try whether NIXL takes this memory.
    Try {
        card: Card,
        reply: SyncSender<Result<()>>,
    },
    Prepare {
        list: Arc<List>,
        reply: SyncSender<Result<()>>,
    },
    Release {
        list: Arc<List>,
        reply: SyncSender<Result<()>>,
    },
    Deregister {
        region: RegionId,
        reply: SyncSender<Result<()>>,
    },
}

/// What the host shows of us.
pub struct Written {
    pub submissions: Counter,
    pub bytes: Counter,
}

/// See the module.
pub struct Shared {
    /// What reached peers.
    pub written: Written,
    pub config: Config,
    /// The name we were opened under.
    pub name: String,
    pub queue: Queue,
    pub notices: Notices,
    pub regions: RwLock<Regions>,
    pub peers: RwLock<HashMap<u32, Arc<Peer>>>,
    commands: Mutex<VecDeque<Command>>,
    /// Readable while something waits for the host.
    pub event: OwnedFd,
    /// Makes the driver look around.
    pub wake: OwnedFd,
    /// The driver is about to sleep, or does.
    pub sleeping: AtomicBool,
    stopping: AtomicBool,
    broken: AtomicBool,
    ended: Mutex<bool>,
    end: Condvar,
}

impl Shared {
    pub fn new(config: Config, name: String) -> Result<Self> {
        let new = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let io = |e| Error::new(ErrorCode::IO, format!("cannot create an eventfd: {e}"));
        Ok(Self {
            written: Written {
                submissions: host().counter("submissions_written")?,
                bytes: host().counter("bytes_written")?,
            },
            queue: Queue::new(config.max_submissions, config.max_writes),
            notices: Notices::new(),
            regions: RwLock::default(),
            peers: RwLock::default(),
            commands: Mutex::default(),
            event: new().map_err(io)?,
            wake: new().map_err(io)?,
            sleeping: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            ended: Mutex::new(false),
            end: Condvar::new(),
            config,
            name,
        })
    }

    /// Driver: a submission ended well.
    pub fn finish(&self, index: u32, bytes: u64) {
        self.written.submissions.add(1);
        self.written.bytes.add(bytes);
        self.queue.finish(index, 0, bytes, None);
    }

    pub fn peer(&self, id: PeerId) -> Option<Arc<Peer>> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner).get(&id.0).cloned()
    }

    pub fn add_peer(&self, peer: Arc<Peer>) {
        self.peers.write().unwrap_or_else(PoisonError::into_inner).insert(peer.id.0, peer);
    }

    pub fn remove_peer(&self, id: PeerId) {
        self.peers.write().unwrap_or_else(PoisonError::into_inner).remove(&id.0);
    }

    /// Our regions as they are now.
    pub fn cards(&self) -> Vec<Card> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner).alive().to_vec()
    }

    pub fn ask(&self, command: Command) {
        locked(&self.commands).push_back(command);
        self.wake();
    }

    pub fn next_command(&self) -> Option<Command> {
        locked(&self.commands).pop_front()
    }

    pub fn has_commands(&self) -> bool {
        !locked(&self.commands).is_empty()
    }

    /// Wakes the driver if it sleeps. One that is about to looks again after it has said so.
    pub fn wake(&self) {
        if self.sleeping.load(Ordering::SeqCst) {
            signal(&self.wake);
        }
    }

    pub fn nothing_waits(&self) -> bool {
        !self.queue.has_done() && self.notices.is_empty()
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Tells the driver to end; true the first time.
    pub fn stop(&self) -> bool {
        let first = !self.stopping.swap(true, Ordering::SeqCst);
        signal(&self.wake);
        first
    }

    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    /// The driver panicked.
    pub fn set_broken(&self) {
        self.broken.store(true, Ordering::SeqCst);
        signal(&self.event);
    }

    /// The driver has ended. Whoever waits for an answer gets none.
    pub fn set_ended(&self) {
        locked(&self.commands).clear();
        *locked(&self.ended) = true;
        self.end.notify_all();
    }

    /// Waits for the driver's end; false when the deadline came first.
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

/// Makes an eventfd readable. It already is when it cannot take more.
pub fn signal(event: impl AsFd) {
    let _already_readable = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Makes an eventfd not readable.
pub fn clear(event: impl AsFd) {
    let _nothing_to_clear = rustix::io::read(event, &mut [0u8; 8]);
}

/// Random bytes from the kernel.
pub fn random() -> Result<Random> {
    let mut bytes = Random::default();
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(16) => Ok(bytes),
        other => Err(Error::new(ErrorCode::IO, format!("the system gave no random bytes: {other:?}"))),
    }
}
