//! Keeps routers informed that a worker is there, how busy it is, and that it ends.

use std::time::Duration;

use host_wire::endpoint::{Address, Credentials, channel, reason};
use host_wire::proto::registry_client::RegistryClient;
use host_wire::proto::{HeartbeatRequest, LeaveRequest, Load, RegisterRequest, WorkerInfo};
use host_wire::protocol::{self, Range, Version};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::transport::Channel;

use crate::Handle;

/// The time between two heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// The same while the router sends no requests yet. It is short, so that the worker soon knows that it is ready.
const WARMING_HEARTBEAT: Duration = Duration::from_millis(200);
/// How long one call may take.
const CALL: Duration = Duration::from_secs(2);

/// The state of this worker as a router knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Nothing,
    /// The router sends no requests yet.
    Warming,
    Registered,
    /// The router sends no requests, or its version of the protocol cannot be told to send none. Then its requests are
    /// refused, and go to other workers.
    Draining,
}

/// The relation of this worker and a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing {
    known: Known,
    /// The version that the last registration agreed on.
    protocol: Option<Version>,
}

impl Standing {
    /// Whether the router can be told that this worker drains and leaves.
    fn knows_draining(self) -> bool {
        self.protocol.is_some_and(Version::knows_draining)
    }
}

impl Known {
    fn may_send(self) -> bool {
        matches!(self, Known::Warming | Known::Registered)
    }
}

/// The registrations of one worker, each kept alive by a task of its own. They end when this is dropped.
#[derive(Debug)]
pub struct Registrations {
    instance: u64,
    routers: Vec<(RegistryClient<Channel>, watch::Receiver<Standing>)>,
    draining: watch::Sender<bool>,
    _tasks: JoinSet<()>,
}

/// Whether a worker takes requests, for its own `/health/ready`.
#[derive(Clone, Debug)]
pub struct Readiness {
    routers: Vec<watch::Receiver<Standing>>,
}

impl Readiness {
    /// Whether a router sends requests.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.routers.iter().any(|standing| standing.borrow().known == Known::Registered)
    }
}

impl Readiness {
    /// Resolves when a router sends requests.
    pub async fn until_ready(self) {
        let mut routers = JoinSet::new();
        for mut standing in self.routers {
            routers.spawn(async move {
                standing.wait_for(|standing| standing.known == Known::Registered).await.is_ok()
            });
        }
        while let Some(ready) = routers.join_next().await {
            if matches!(ready, Ok(true)) {
                return;
            }
        }
        // The worker ends, and its registrations with it.
        std::future::pending().await
    }
}

impl Registrations {
    /// Registers with all routers, at once or as soon as they are there.
    ///
    /// # Errors
    /// When the credentials are not for an address.
    pub fn start(
        worker: &Handle,
        info: &WorkerInfo,
        routers: Vec<Address>,
        credentials: &Credentials,
    ) -> anyhow::Result<Self> {
        let (draining, drains) = watch::channel(false);
        let (mut all, mut tasks) = (Vec::new(), JoinSet::new());
        for address in routers {
            let client = RegistryClient::new(channel(&address, credentials)?);
            let (standing, stands) = watch::channel(Standing { known: Known::Nothing, protocol: None });
            let registration = Registration {
                worker: worker.clone(),
                info: info.clone(),
                client: client.clone(),
                standing,
                draining: drains.clone(),
            };
            tasks.spawn(registration.keep(address));
            all.push((client, stands));
        }
        Ok(Self { instance: info.instance, routers: all, draining, _tasks: tasks })
    }

    /// Tells whether the worker takes requests, now and later.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        Readiness { routers: self.routers.iter().map(|(_, standing)| standing.clone()).collect() }
    }

    /// Tells all routers that the worker drains, and waits until they know, at most for one call's time.
    pub async fn drain(&mut self) {
        self.draining.send_replace(true);
        let all_know = async {
            for (_, standing) in &mut self.routers {
                // An error means that the registration has ended.
                drop(standing.wait_for(|standing| !standing.known.may_send()).await);
            }
        };
        if timeout(CALL, all_know).await.is_err() {
            tracing::warn!("a router did not hear in time that this worker drains");
        }
    }

    /// Removes the worker from the registries of all routers that can be told so. The other routers soon take it for
    /// dead.
    pub async fn leave(self) {
        let instance = self.instance;
        let mut calls = JoinSet::new();
        for (mut client, standing) in self.routers {
            // A router whose answer was lost may know the worker.
            if standing.borrow().protocol.is_some_and(|protocol| !protocol.knows_draining()) {
                continue;
            }
            calls.spawn(async move {
                // A router that does not hear it notices the silence.
                let _heard = timeout(CALL, client.leave(LeaveRequest { instance })).await;
            });
        }
        calls.join_all().await;
    }
}

/// The registration with one router.
struct Registration {
    worker: Handle,
    info: WorkerInfo,
    client: RegistryClient<Channel>,
    standing: watch::Sender<Standing>,
    draining: watch::Receiver<bool>,
}

impl Registration {
    /// Registers with the router at `address` and keeps the registration alive, for ever.
    async fn keep(mut self, address: Address) {
        // What was logged last: the same trouble is told once.
        let mut logged = String::new();
        loop {
            let trouble = match self.session(&mut logged).await {
                Ok(never) => match never {},
                Err(trouble) => trouble,
            };
            self.is(Known::Nothing);
            // A router that ends together with its workers needs no warning.
            if trouble != logged && !*self.draining.borrow() {
                tracing::warn!(router = %address, %trouble, "not registered with the router; trying again");
                logged = trouble;
            }
            tokio::time::sleep(HEARTBEAT).await;
        }
    }

    fn is(&self, known: Known) {
        self.standing.send_modify(|standing| standing.known = known);
    }

    async fn session(&mut self, logged: &mut String) -> Result<std::convert::Infallible, String> {
        // A worker that drains sends heartbeats until its last request has ended, and registers with no router.
        if !*self.draining.borrow() {
            self.register(logged).await?;
        }
        loop {
            let drains = *self.draining.borrow();
            if !drains {
                // An error means that the process ends.
                let is_warming = self.standing.borrow().known == Known::Warming;
                let pause = if is_warming { WARMING_HEARTBEAT } else { HEARTBEAT };
                drop(timeout(pause, self.draining.wait_for(|drains| *drains)).await);
            } else if self.standing.borrow().known == Known::Draining {
                tokio::time::sleep(HEARTBEAT).await;
            }
            let draining = *self.draining.borrow();
            let told = draining && self.standing.borrow().knows_draining();
            let load = Load { draining: told, ..load(&self.worker) };
            let request = HeartbeatRequest { instance: self.info.instance, load: Some(load) };
            let reply =
                timeout(CALL, self.client.heartbeat(request)).await.map_err(|elapsed| elapsed.to_string())?;
            let reply = reply.map_err(|status| reason(&status))?.into_inner();
            if !reply.known && draining {
                // The router has no requests for this worker.
                self.is(Known::Nothing);
                std::future::pending::<()>().await;
            }
            if !reply.known {
                return Err("the router does not know this worker any more".into());
            }
            self.is(match (draining, reply.warming) {
                (true, _) => Known::Draining,
                (false, true) => Known::Warming,
                (false, false) => Known::Registered,
            });
        }
    }

    async fn register(&mut self, logged: &mut String) -> Result<(), String> {
        let request = RegisterRequest { worker: Some(self.info.clone()), load: Some(load(&self.worker)) };
        let reply =
            timeout(CALL, self.client.register(request)).await.map_err(|elapsed| elapsed.to_string())?;
        let reply = reply.map_err(|status| reason(&status))?.into_inner();
        if !reply.accepted {
            return Err(reply.message);
        }
        let protocol = protocol::of_router(Range::of(&self.info), &reply)?;
        logged.clear();
        self.standing.send_replace(Standing { known: Known::Warming, protocol: Some(protocol) });
        match reply.message.as_str() {
            "" => tracing::info!(%protocol, "registered with the router"),
            note => tracing::warn!(note, %protocol, "registered with the router"),
        }
        Ok(())
    }
}

fn load(worker: &Handle) -> Load {
    let stats = worker.stats();
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Load {
        queued: count(stats.queued),
        running: count(stats.active),
        pages_free: count(stats.pool.free),
        pages_held: count(stats.pool.held),
        pages_quarantined: count(stats.pool.quarantined),
        pages_cached: count(stats.pool.cached),
        draining: false,
    }
}
