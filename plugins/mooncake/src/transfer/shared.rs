//! What the host's threads, the service, the links and the couriers share.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use host_plugin_api::{Counter, Error, ErrorCode, Gauge, PeerId, RegionId, Result, host};
use rustix::event::{EventfdFlags, eventfd};

use super::notices::Notices;
use super::peer::Peer;
use super::queue::{Queue, locked};
use super::regions::{Card, Regions};
use super::wire::{Endpoint, Random};
use crate::config::Config;
use crate::engine::{Driver, Engine};

/// A connection, as the side that sends on it numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    /// The sender.
    pub instance: Random,
    pub number: u64,
}

/// What the service is asked, and what it is told. Callers wait for their answers, and each link, door and courier has no more
/// than a few events, so the list stays short.
pub enum Event {
    Connect {
        name: String,
        endpoint: Endpoint,
        reply: SyncSender<Result<PeerId>>,
    },
    Disconnect {
        peer: PeerId,
        reply: SyncSender<Result<()>>,
    },
    Deregister {
        region: RegionId,
        reply: SyncSender<Result<()>>,
    },
    /// A link has its engine and has found the door, or not.
    LinkOpened {
        id: u32,
        opened: std::result::Result<(), String>,
    },
    /// A link failed, and takes its engine down.
    LinkFailed {
        id: u32,
        why: String,
    },
    /// A link's engine is gone.
    LinkEnded {
        id: u32,
    },
    DoorOpened {
        connection: Connection,
        opened: std::result::Result<Box<dyn Engine>, String>,
    },
    /// A door's engine is gone: nothing lands through it.
    DoorClosed {
        connection: Connection,
    },
    /// Nobody listens at an instance's address.
    Refused {
        instance: Random,
    },
}

/// What the host shows of us.
pub struct Counts {
    pub submissions: Counter,
    pub bytes: Counter,
    /// Messages that were sent again.
    pub repeated: Counter,
    pub links_failed: Counter,
    pub peers_lost: Counter,
    /// Connections that kept others from our engines.
    pub sitters: Counter,
    /// Writes that Mooncake works on.
    pub outstanding: Gauge,
}

#[derive(Default)]
struct Events {
    waiting: VecDeque<Event>,
    /// Nobody reads them any more.
    closed: bool,
}

/// See the module.
pub struct Shared {
    pub counts: Counts,
    pub config: Config,
    /// The name we were opened under.
    pub name: String,
    pub instance: Random,
    /// Address of our front.
    pub session: String,
    pub driver: Box<dyn Driver>,
    pub queue: Queue,
    pub notices: Notices,
    pub regions: RwLock<Regions>,
    pub peers: RwLock<HashMap<u32, Arc<Peer>>>,
    events: Mutex<Events>,
    came: Condvar,
    /// Readable while something waits for the host.
    pub event: OwnedFd,
    stopping: AtomicBool,
    broken: AtomicBool,
    ended: Mutex<bool>,
    end: Condvar,
    /// Threads, other than the service's.
    threads: Mutex<usize>,
    none_left: Condvar,
}

impl Shared {
    pub fn new(
        config: Config,
        name: String,
        (instance, session): (Random, String),
        driver: Box<dyn Driver>,
    ) -> Result<Self> {
        let io = |e| Error::new(ErrorCode::IO, format!("cannot create an eventfd: {e}"));
        let counter = |name| host().counter(name);
        Ok(Self {
            counts: Counts {
                submissions: counter("submissions_written")?,
                bytes: counter("bytes_written")?,
                repeated: counter("messages_repeated")?,
                links_failed: counter("links_failed")?,
                peers_lost: counter("peers_lost")?,
                sitters: counter("sitters_shut")?,
                outstanding: host().gauge("writes_outstanding")?,
            },
            queue: Queue::new(config.max_submissions, config.max_writes),
            notices: Notices::new(),
            regions: RwLock::default(),
            peers: RwLock::default(),
            events: Mutex::default(),
            came: Condvar::new(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io)?,
            stopping: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            ended: Mutex::new(false),
            end: Condvar::new(),
            threads: Mutex::new(0),
            none_left: Condvar::new(),
            config,
            name,
            instance,
            session,
            driver,
        })
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

    /// Tells the service something. After its end that goes nowhere, and an engine in it ends here.
    pub fn tell(&self, event: Event) {
        let mut events = locked(&self.events);
        if !events.closed {
            events.waiting.push_back(event);
            self.came.notify_all();
        }
    }

    /// Service: what came, after some time at the latest.
    pub fn events(&self, wait: Duration) -> VecDeque<Event> {
        let mut events = locked(&self.events);
        if events.waiting.is_empty() {
            events = self.came.wait_timeout(events, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
        std::mem::take(&mut events.waiting)
    }

    pub fn nothing_waits(&self) -> bool {
        !self.queue.has_done() && self.notices.is_empty()
    }

    /// Tells the host's poller that something waits.
    pub fn announce(&self) {
        if !self.nothing_waits() {
            signal(&self.event);
        }
    }

    /// Keeps the event level-triggered: cleared once nothing waits, set again when something came meanwhile.
    pub fn settle_event(&self) {
        if self.nothing_waits() {
            clear(&self.event);
            self.announce();
        }
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Tells the service to end.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        let _events = locked(&self.events);
        self.came.notify_all();
    }

    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    /// One of our threads panicked.
    pub fn set_broken(&self) {
        self.broken.store(true, Ordering::SeqCst);
        signal(&self.event);
    }

    /// The service has ended. Whoever waits for an answer gets none.
    pub fn set_ended(&self) {
        let left = {
            let mut events = locked(&self.events);
            events.closed = true;
            std::mem::take(&mut events.waiting)
        };
        drop(left);
        *locked(&self.ended) = true;
        self.end.notify_all();
    }

    /// Waits for the end of the service and of all other threads; false when the deadline came first.
    pub fn wait_ended(&self, deadline: Instant) -> bool {
        let mut ended = locked(&self.ended);
        while !*ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            ended = self.end.wait_timeout(ended, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(ended);
        self.wait_for_threads(deadline)
    }

    /// Waits until no thread is left; false when the deadline came first.
    pub fn wait_for_threads(&self, deadline: Instant) -> bool {
        let mut threads = locked(&self.threads);
        while *threads > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            threads = self.none_left.wait_timeout(threads, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Runs something on a thread of its own, which is waited for at the end. A panic breaks the instance.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn spawn(self: &Arc<Self>, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        // Counted down when the closure goes, also when it panics, or never ran.
        let over = self.count();
        let counted = move || {
            let _over = over;
            run();
        };
        self.spawn_alone(name, counted)
    }

    /// Counts this thread among those that are waited for, until the guard goes.
    pub fn count(self: &Arc<Self>) -> Over {
        *locked(&self.threads) += 1;
        Over(self.clone())
    }

    /// As [`spawn`](Self::spawn), and is not waited for: it may be kept by a peer that is stopped, and touches no memory of
    /// the host's.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn spawn_alone(self: &Arc<Self>, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let shared = self.clone();
        let body = move || {
            if let Err(payload) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
                // Its drop may panic, and nobody is above us to catch that.
                std::mem::forget(payload);
                shared.set_broken();
            }
        };
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(body);
        spawned
            .map(drop)
            .map_err(|error| Error::new(ErrorCode::IO, format!("cannot start a thread: {error}")))
    }
}

/// A thread that is waited for at the end.
pub struct Over(Arc<Shared>);

impl Drop for Over {
    fn drop(&mut self) {
        *locked(&self.0.threads) -= 1;
        self.0.none_left.notify_all();
    }
}

/// Makes an eventfd readable. It already is when it cannot take more.
pub fn signal(event: impl AsFd) {
    let _already_readable = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Makes an eventfd not readable.
fn clear(event: impl AsFd) {
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
