//! The state that the host's threads, the service, the links and the message senders share.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use host_plugin_api::{Counter, Gauge, RegionId, Result, TransferLimits, host};
use host_transfer_kit::connections::Connection;
use host_transfer_kit::{Instance, LinkedInstance, Random, RegionDescriptor, Request, locked, start_thread};

use super::mailbox::{Inbox, Peer};
use crate::config::Config;
use crate::engine::{Driver, Engine};

/// With this many waiting notifications, further arrivals are not acknowledged. Senders then wait for a host that does
/// not fetch its notifications.
const NOTIFICATIONS: usize = 4096;

/// Requests to the service, and reports to it. Callers wait for their answers, and each link, inbound endpoint and message
/// sender has no more than a few events, so the list stays short.
pub enum Event {
    /// A request of the host.
    Connections(Request),
    /// A link has its engine and has found the inbound endpoint, or has failed to.
    LinkOpened {
        link: Arc<Link>,
        opened: Result<()>,
    },
    /// A link failed, and ends its engine.
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
    /// Regions of this instance that the engine knows.
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

/// Metrics of this plugin, beside those that all transfer backends have.
pub struct Counts {
    /// Messages that were sent again.
    pub repeated: Counter,
    pub links_failed: Counter,
    pub peers_lost: Counter,
    /// Idle connections that kept others from this instance's engines.
    pub idle_connections: Counter,
    /// Writes that Mooncake works on.
    pub outstanding: Gauge,
}

#[derive(Default)]
struct Events {
    waiting: VecDeque<Event>,
    /// Whether nothing reads the events any more.
    closed: bool,
}

/// The shared state of one instance.
pub struct Shared {
    pub counts: Counts,
    pub config: Config,
    pub linked: Arc<LinkedInstance<Inbox>>,
    /// Identity of this instance.
    pub id: Random,
    /// Address of this instance's front.
    pub session: String,
    pub driver: Box<dyn Driver>,
    events: Mutex<Events>,
    came: Condvar,
    /// Number of threads, without the service's.
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
                idle_connections: counter("idle_connections_closed")?,
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

    /// Sends an event to the service. After the service's end the event is dropped, and an engine in it ends here.
    pub fn tell(&self, event: Event) {
        let mut events = locked(&self.events);
        if !events.closed {
            events.waiting.push_back(event);
            self.came.notify_all();
        }
    }

    /// For the service: takes the events that came. Waits for `wait` at most.
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

    /// Notes that the service has ended. Threads that wait for an answer get none.
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

    /// Runs a closure on a thread of its own. The end of the instance waits for it. A panic breaks the instance.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn spawn(self: &Arc<Self>, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        // Counted down when the closure is dropped, also when it panics, or never ran.
        let over = self.count();
        let counted = move || {
            let _over = over;
            run();
        };
        self.spawn_alone(name, counted)
    }

    /// Counts this thread among those that the end of the instance waits for, until the guard is dropped.
    pub fn count(self: &Arc<Self>) -> Over {
        *locked(&self.threads) += 1;
        Over(self.clone())
    }

    /// As [`spawn`](Self::spawn), but the end does not wait for the thread: a stopped peer may hold it up, and it
    /// touches no memory of the host's.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn spawn_alone(self: &Arc<Self>, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let broken = self.clone();
        start_thread(name, run, move || broken.instance().set_broken()).map(drop)
    }
}

/// A thread that the end of the instance waits for.
pub struct Over(Arc<Shared>);

impl Drop for Over {
    fn drop(&mut self) {
        *locked(&self.0.threads) -= 1;
        self.0.none_left.notify_all();
    }
}
