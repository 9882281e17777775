//! What the host's threads, the service, the links and the message senders share.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use host_plugin_api::{Counter, Gauge, RegionId, Result, TransferLimits, host};
use host_transfer_kit::connections::Connection;
use host_transfer_kit::{Instance, LinkedInstance, Random, RegionDescriptor, Request, locked, start_thread};

use super::mailbox::{Inbox, Peer};
use crate::config::Config;
use crate::engine::{Driver, Engine};

/// From so many notifications on, what arrives is not acknowledged, so that senders wait for a host that does not take what
/// came.
const NOTIFICATIONS: usize = 4096;

/// Requests to the service, and reports to it. Callers wait for their answers, and each link, inbound endpoint and message
/// sender has no more than a few events, so the list stays short.
pub enum Event {
    /// A request of the host.
    Connections(Request),
    /// A link has its engine and has found the inbound endpoint, or not.
    LinkOpened {
        link: Arc<Link>,
        opened: Result<()>,
    },
    /// A link failed, and takes its engine down.
    LinkFailed {
        id: u32,
        why: String,
    },
    /// A link's engine is gone. Something may have been in flight.
    LinkEnded {
        id: u32,
        unsettled: bool,
    },
    InboundOpened {
        connection: Connection,
        opened: std::result::Result<Box<dyn Engine>, String>,
    },
    /// An inbound endpoint's engine is gone: nothing lands through it.
    InboundClosed {
        connection: Connection,
    },
    /// Nothing listens at an instance's address.
    Refused {
        instance: Random,
    },
}

/// A link, as the service and its thread know it.
pub struct Link {
    pub peer: Arc<Peer>,
    /// Our regions that the engine knows.
    pub registered: Mutex<Vec<RegionDescriptor>>,
}

impl Link {
    pub fn new(peer: Arc<Peer>) -> Self {
        Self { peer, registered: Mutex::default() }
    }

    /// Whether the engine knows a region.
    pub fn knows(&self, region: RegionId) -> bool {
        locked(&self.registered).iter().any(|known| known.id == region)
    }
}

/// What the host shows of us, beside what it shows of all.
pub struct Counts {
    /// Messages that were sent again.
    pub repeated: Counter,
    pub links_failed: Counter,
    pub peers_lost: Counter,
    /// Connections that kept others from our engines.
    pub idle_connections: Counter,
    /// Writes that Mooncake works on.
    pub outstanding: Gauge,
}

#[derive(Default)]
struct Events {
    waiting: VecDeque<Event>,
    /// Nothing reads them any more.
    closed: bool,
}

/// See the module.
pub struct Shared {
    pub counts: Counts,
    pub config: Config,
    pub linked: Arc<LinkedInstance<Inbox>>,
    /// Our identity.
    pub id: Random,
    /// Address of our front.
    pub session: String,
    pub driver: Box<dyn Driver>,
    events: Mutex<Events>,
    came: Condvar,
    /// Threads, other than the service's.
    threads: Mutex<usize>,
    none_left: Condvar,
}

impl Shared {
    pub fn new(
        config: Config,
        name: &str,
        (id, session): (Random, String),
        driver: Box<dyn Driver>,
    ) -> Result<Self> {
        let Config { max_writes, max_submissions, short_writes, .. } = config;
        let limits = TransferLimits { short_writes, ..TransferLimits::new(max_writes, max_submissions) };
        let instance = Instance::new(name, limits, NOTIFICATIONS)?;
        let counter = |name| host().counter(name);
        Ok(Self {
            counts: Counts {
                repeated: counter("messages_repeated")?,
                links_failed: counter("links_failed")?,
                peers_lost: counter("peers_lost")?,
                idle_connections: counter("sitters_shut")?,
                outstanding: host().gauge("writes_outstanding")?,
            },
            linked: Arc::new(LinkedInstance::new(instance, false)),
            events: Mutex::default(),
            came: Condvar::new(),
            threads: Mutex::new(0),
            none_left: Condvar::new(),
            config,
            id,
            session,
            driver,
        })
    }

    pub fn instance(&self) -> &Instance<Peer> {
        &self.linked.instance
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

    /// Tells the service to end.
    pub fn stop(&self) {
        self.instance().stop();
        let _events = locked(&self.events);
        self.came.notify_all();
    }

    /// The service has ended. Threads that wait for an answer get none.
    pub fn set_ended(&self) {
        let left = {
            let mut events = locked(&self.events);
            events.closed = true;
            std::mem::take(&mut events.waiting)
        };
        drop(left);
        self.linked.set_ended();
    }

    /// Waits for the end of the service and of all other threads. False when the deadline came first.
    pub fn wait_ended(&self, deadline: Instant) -> bool {
        self.linked.wait_ended(deadline) && self.wait_for_threads(deadline)
    }

    fn wait_for_threads(&self, deadline: Instant) -> bool {
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
        let broken = self.clone();
        start_thread(name, run, move || broken.instance().set_broken()).map(drop)
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
