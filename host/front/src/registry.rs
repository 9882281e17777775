//! The workers that have registered, and which of them may work together.
//!
//! [`table`] decides (no clock, no sockets), [`service`] answers the workers' calls, and [`Registry`] is the router's handle: it
//! picks routes, counts requests under way, and reports when a worker is gone.

mod admission;
mod follow;
pub mod role;
pub mod service;
mod table;

use std::sync::Arc;

use host_core::radix::NamespaceKey;
use host_core::routing::BlockKey;
use host_core::{Instance, Room};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tonic::transport::Channel;

pub use admission::MAX_TEXT;
pub use host_core::routing::{CacheCounts, Chain, Policy};
use host_wire::clock::{self, Instant};
use host_wire::endpoint::{self, Address, BadAddress, Credentials};
use host_wire::proto::{HeartbeatReply, Load, WorkerInfo};
use host_wire::protocol::Version;
pub use role::Role;
pub use table::{Abilities, Decisions, Following, Need, NoRoute, Snapshot, Terms, WorkerState};
use table::{Denied, NotNow, Picked, WorkerTable};

/// A worker as the router calls it. The connection is opened on first use and shared by all requests.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// Identifies this process of the worker.
    pub instance: Instance,
    /// Its name, for logs and answers.
    pub name: String,
    /// Its control address.
    pub address: String,
    /// Longest prompt + answer that it holds.
    pub max_tokens: u32,
    /// Tokens of one of its KV pages.
    pub page_tokens: u32,
    /// The version of the control protocol that was agreed with the worker.
    pub protocol: Version,
    /// Whether the worker takes requests with a grammar.
    pub grammars: bool,
    /// Whether the worker finds log probabilities of prompts.
    pub scores: bool,
    /// Its connection.
    pub channel: Channel,
}

/// A worker that was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// The version of the control protocol that is spoken with it.
    pub protocol: Version,
    /// The pairs that were refused, as sentences. Empty if there are none.
    pub refused_pairs: String,
}

/// The workers of one try of a request. It counts as load on them until dropped.
#[derive(Debug)]
pub struct Route {
    /// Absent when `decode` is an aggregated worker.
    pub prefill: Option<Chosen>,
    /// The decode worker, or an aggregated one.
    pub decode: Chosen,
    /// Tokens of the prompt that a worker of the route is expected to have cached.
    pub expected: u64,
    room: Room,
    registry: Registry,
}

impl Route {
    /// Longest prompt + answer that every worker of this route holds.
    #[must_use]
    pub fn max_tokens(&self) -> u32 {
        self.prefill.as_ref().map_or(u32::MAX, |worker| worker.max_tokens).min(self.decode.max_tokens)
    }

    /// Tokens of a KV page of the route's decode worker.
    #[must_use]
    pub fn page_tokens(&self) -> u32 {
        self.decode.page_tokens
    }

    /// Whether all workers of the route can do what a request needs.
    #[must_use]
    pub fn has(&self, abilities: Abilities) -> bool {
        let scores = !abilities.scores || self.prefill.as_ref().unwrap_or(&self.decode).scores;
        let others = Abilities { scores: false, ..abilities };
        scores && self.prefill.iter().chain([&self.decode]).all(|worker| others.are_had_by(worker))
    }

    /// Leaves the worker that computes prompts in the route, alone.
    pub fn keep_prefill(&mut self) {
        if let Some(prefill) = self.prefill.take() {
            let decode = std::mem::replace(&mut self.decode, prefill);
            self.registry.lock().left_out(self.room, decode.instance);
        }
    }

    /// The name of a worker of the route that takes no requests with a grammar, if there is one.
    #[must_use]
    pub fn without_grammars(&self) -> Option<&str> {
        self.prefill
            .iter()
            .chain([&self.decode])
            .find(|worker| !worker.grammars)
            .map(|worker| worker.name.as_str())
    }

    /// The room of the try.
    #[must_use]
    pub fn room(&self) -> Room {
        self.room
    }

    /// The workers' instances.
    pub fn instances(&self) -> impl Iterator<Item = Instance> {
        self.prefill.iter().chain([&self.decode]).map(|worker| worker.instance)
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        let instances: Vec<Instance> = self.instances().collect();
        self.registry.lock().done(self.room, &instances, clock::now());
    }
}

/// The registry, shared by the router, the HTTP API and the gRPC service.
#[derive(Clone, Debug)]
pub struct Registry {
    table: Arc<Mutex<WorkerTable>>,
    /// Counts changes of the set of workers. Waiting requests try again when it changes.
    changes: Arc<watch::Sender<u64>>,
}

impl Registry {
    /// An empty registry.
    #[must_use]
    pub fn new(terms: Terms) -> Self {
        Self {
            table: Arc::new(Mutex::new(WorkerTable::new(terms))),
            changes: Arc::new(watch::Sender::new(0)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, WorkerTable> {
        // No method of the table panics, and even a panic would leave the table consistent.
        self.table.lock()
    }

    /// Adds or replaces a worker.
    ///
    /// If another worker has the same name, the new one is accepted when the address of the other refuses connections.
    ///
    /// # Errors
    /// The reason why the worker is not accepted.
    pub async fn register(&self, worker: WorkerInfo) -> Result<Accepted, String> {
        let again = worker.clone();
        let instance = Instance(worker.instance);
        let known = self.lock().knows(instance);
        let mut accepted = self.lock().register(worker, clock::now());
        if let Err(Denied::NameTaken { holder, holder_address, .. }) = &accepted
            && is_unused(holder_address).await
        {
            self.suspect(*holder, "its address refuses connections");
            accepted = self.lock().register(again, clock::now());
        }
        if accepted.is_ok()
            && !known
            && let Some(channel) = self.lock().channel_to_follow(instance)
        {
            tokio::spawn(follow::follow(self.clone(), instance, channel));
        }
        self.changed();
        accepted.map_err(|denied| denied.to_string())
    }

    /// Notes that a worker lives.
    pub fn heartbeat(&self, instance: Instance, load: Load) -> HeartbeatReply {
        let heard = self.lock().heartbeat(instance, load, clock::now());
        if heard.is_change {
            self.changed();
        }
        HeartbeatReply { known: heard.known, warming: heard.is_warming }
    }

    /// Forgets a worker that ends.
    pub fn leave(&self, instance: Instance) {
        if self.lock().leave(instance) {
            tracing::info!(%instance, "worker left");
        }
        self.changed();
    }

    /// Notes that a call to this worker broke. The worker is not chosen until it is heard of again.
    pub fn suspect(&self, instance: Instance, why: &str) {
        if self.lock().suspect(instance, why, clock::now()) {
            tracing::warn!(%instance, why, "worker suspected");
        }
        self.changed();
    }

    /// Whether a call to a worker other than `than` broke at `since` or later.
    #[must_use]
    pub fn another_broke(&self, since: Instant, than: &[Instance]) -> bool {
        self.lock().another_broke(since, than)
    }

    /// Picks a route and counts it as load at once. Takes the instances in `avoid` only if there are no others.
    ///
    /// # Errors
    /// The reason why there is no route.
    pub fn pick(&self, need: Need<'_>, avoid: &[Instance]) -> Result<Route, NoRoute> {
        let Picked { prefill, decode, expected } = self.lock().pick(need, avoid, clock::now())?;
        Ok(Route { prefill, decode, expected, room: need.room, registry: self.clone() })
    }

    /// Takes the workers that came since the last call and must serve a dummy request first.
    #[must_use]
    pub fn take_cold(&self) -> Vec<Instance> {
        self.lock().take_cold()
    }

    /// Picks a route for a dummy request through this worker. Partners in `failed`, with which an earlier one failed, come last.
    /// Returns `Ok(None)` when the worker needs no dummy request any more.
    ///
    /// # Errors
    /// The reason why there is no route now.
    pub fn pick_with(
        &self,
        instance: Instance,
        failed: &[Instance],
        room: Room,
    ) -> Result<Option<Route>, String> {
        let picked = self.lock().pick_with(instance, failed, clock::now());
        match picked {
            Ok(Picked { prefill, decode, expected }) => {
                Ok(Some(Route { prefill, decode, expected, room, registry: self.clone() }))
            }
            Err(NotNow::Never) => Ok(None),
            Err(NotNow::Later(why)) => Err(why),
        }
    }

    /// Notes that these workers have served a dummy request.
    pub fn warmed(&self, instances: &[Instance]) {
        self.lock().warmed(instances);
        self.changed();
    }

    /// Notes why a worker has not served yet. Returns whether the reason is new.
    pub fn not_warm(&self, instance: Instance, why: &str) -> bool {
        self.lock().not_warm(instance, why)
    }

    /// The names of a prompt's pages, for each kind of worker whose cache may hold them. Hashes the whole prompt.
    #[must_use]
    pub fn chains(&self, namespace: &NamespaceKey, prompt: &[u32]) -> Vec<Chain> {
        let identities = self.lock().identities(clock::now());
        let chain = |(identity, page_tokens): (host_core::radix::PageHash, u32)| Chain {
            identity,
            keys: BlockKey::chain(&identity.namespace(namespace), prompt, page_tokens as usize),
        };
        identities.into_iter().map(chain).collect()
    }

    /// Notes that a request's prompt was computed.
    pub fn computed(&self, room: Room) {
        self.lock().computed(room);
    }

    /// Notes that a request's answer is complete. Its prefill worker may not have released the request yet.
    pub fn answered(&self, room: Room) {
        self.lock().answered(room);
    }

    /// Resolves when the set of workers may have changed since the returned future was made.
    pub fn change(&self) -> impl Future<Output = ()> + use<> {
        let mut changes = self.changes.subscribe();
        async move {
            if changes.changed().await.is_err() {
                // The registry ends with the server. Every waiting request has a deadline.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Resolves, with the reason, when this worker has been silent for longer than [`Terms::lost_after`] or was replaced.
    pub fn gone(&self, instance: Instance) -> impl Future<Output = String> + use<> {
        let registry = self.clone();
        async move {
            loop {
                let change = registry.change();
                let until: Instant = match registry.lock().lost(instance, clock::now()) {
                    Ok(until) => until,
                    Err(why) => return why,
                };
                tokio::select! {
                    () = change => {}
                    () = clock::sleep_until(until) => {}
                }
            }
        }
    }

    /// Every worker, including suspected ones.
    #[must_use]
    pub fn workers(&self) -> Vec<(Chosen, Role)> {
        self.lock().workers()
    }

    /// Longest prompt + answer over all routes that can be used now. Absent if there is no route.
    #[must_use]
    pub fn max_tokens(&self) -> Option<u32> {
        self.lock().largest(clock::now())
    }

    /// Why no request can be served now, or `None` if some can.
    #[must_use]
    pub fn unusable(&self) -> Option<String> {
        self.lock().unusable(clock::now())
    }

    /// The table's state, for `/health` and metrics.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.lock().snapshot(clock::now())
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }
}

/// A connection that opens when it is first used.
fn channel(address: &str, credentials: &Credentials) -> Result<Channel, String> {
    let wrong = |error| {
        format!(
            "worker address {address:?} {error}; give it as http://host:port, https://host:port or unix:path"
        )
    };
    let address: Address = address.parse().map_err(|error: BadAddress| wrong(error))?;
    endpoint::channel(&address, credentials).map_err(|mismatch| mismatch.to_string())
}

/// Whether no process listens at a worker's address.
async fn is_unused(address: &str) -> bool {
    match address.parse::<Address>() {
        Ok(address) => address.is_unused().await,
        Err(_wrong) => false,
    }
}
