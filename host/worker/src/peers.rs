//! A worker's messages to other workers: one task per peer, which also notices when the peer is gone.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use host_core::{Event, Instance};
use host_wire::convert;
use host_wire::endpoint::{Address, BadAddress, Credentials, channel, reason};
use host_wire::pairs::compatible;
use host_wire::proto::worker_client::WorkerClient;
use host_wire::proto::{ControlMessage, DeliverRequest, HandshakeRequest, WorkerInfo};
use host_wire::protocol::{self, Version};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::transport::Channel;

use crate::link::not_cut_off;
use crate::{Handle, Outgoing};

/// Messages that may wait for one peer. More are dropped, and the core repeats them.
const WAITING: usize = 1024;
/// Messages in one call.
const PER_CALL: usize = 64;
/// How long one call may take.
const CALL: Duration = Duration::from_secs(2);
/// An idle peer is asked for a sign of life this often.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);
/// Calls that fail in a row before the peer counts as lost.
const FAILURES: u32 = 3;
/// Wait after a failed call.
const AFTER_FAILURE: Duration = Duration::from_millis(200);
/// How long a handshake may take. After each handshake that took longer, the next one with the same peer may take twice as long:
/// a plugin may need more time to connect on a machine that is busy.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// The longest that a handshake may take.
const LONGEST_HANDSHAKE: Duration = Duration::from_secs(20);
/// Peers whose late handshakes are remembered.
const MOST_LATE: usize = 1024;

/// Peers whose last handshakes took too long, and how many of them in a row.
#[derive(Debug, Default)]
struct LateHandshakes(Mutex<HashMap<Instance, u32>>);

impl LateHandshakes {
    /// How long the next handshake with a peer may take.
    fn allowed(&self, peer: Instance) -> Duration {
        let late = self.0.lock().get(&peer).copied().unwrap_or(0);
        (HANDSHAKE * 2_u32.pow(late.min(8))).min(LONGEST_HANDSHAKE)
    }

    /// Notes a handshake that took too long.
    fn late(&self, peer: Instance) {
        let mut late = self.0.lock();
        if late.len() >= MOST_LATE {
            late.clear();
        }
        let count = late.entry(peer).or_default();
        *count = count.saturating_add(1);
    }

    /// Notes a handshake that was answered.
    fn answered(&self, peer: Instance) {
        self.0.lock().remove(&peer);
    }
}

struct Queued {
    floor: u64,
    message: ControlMessage,
}

/// The queue of messages to one peer, for as long as one connection lasts.
struct Line {
    queue: mpsc::Sender<Queued>,
    /// The connection that it belongs to.
    session: u64,
    /// The version of the control protocol that both speak.
    protocol: Version,
}

/// The peers that we send to.
#[derive(Clone)]
pub struct Peers {
    worker: Handle,
    credentials: Credentials,
    lines: Arc<Mutex<HashMap<Instance, Line>>>,
    late: Arc<LateHandshakes>,
}

impl Peers {
    /// A set without peers. All peers that come are called with these credentials.
    #[must_use]
    pub fn new(worker: Handle, credentials: Credentials) -> Self {
        Self { worker, credentials, lines: Arc::default(), late: Arc::default() }
    }

    fn client(&self, address: &str) -> Result<WorkerClient<Channel>, String> {
        let wrong = |error: BadAddress| format!("the address {address:?} {error}");
        let address: Address = address.parse().map_err(wrong)?;
        channel(&address, &self.credentials).map(WorkerClient::new).map_err(|mismatch| mismatch.to_string())
    }

    /// Starts sending to a peer at an address. This line replaces an earlier one to the same peer.
    pub fn add(&self, peer: Instance, (session, protocol): (u64, Version), address: &str) {
        let (queue, receive) = mpsc::channel(WAITING);
        self.lines.lock().insert(peer, Line { queue, session, protocol });
        match self.client(address) {
            Ok(client) => {
                tokio::spawn(speak(self.clone(), (peer, session), client, receive));
            }
            Err(error) => tracing::error!(%peer, %error, "a peer cannot be sent messages"),
        }
    }

    /// Peers that are connected, by the version of the control protocol that is spoken with them.
    #[must_use]
    pub fn protocols(&self) -> BTreeMap<Version, usize> {
        let mut peers = BTreeMap::new();
        for line in self.lines.lock().values() {
            *peers.entry(line.protocol).or_default() += 1;
        }
        peers
    }

    /// Whether this line is the one in use.
    fn is_current(&self, peer: Instance, session: u64) -> bool {
        self.lines.lock().get(&peer).is_some_and(|line| line.session == session)
    }

    /// Carries out the actions of the scheduler until it stops.
    pub async fn run(self, info: WorkerInfo, mut outgoing: mpsc::Receiver<Outgoing>) {
        while let Some(next) = outgoing.recv().await {
            match next {
                Outgoing::Message { to, floor, message } => {
                    let message = convert::write_message(&message);
                    let queued = Queued { floor, message };
                    let sent = self.lines.lock().get(&to).map(|line| line.queue.try_send(queued).is_ok());
                    if sent != Some(true) {
                        tracing::debug!(%to, "a control message was dropped; it will be repeated");
                    }
                }
                Outgoing::Connect { peer, floor } => {
                    let (peers, info) = (self.clone(), info.clone());
                    tokio::spawn(async move {
                        let instance = peer.instance;
                        let event = match peers.shake_hands(&info, &peer.address, instance, floor).await {
                            Ok(session) => Event::PeerReady { peer: instance, floor: 0, session },
                            Err(message) => {
                                tracing::warn!(peer = %instance, %message, "handshake failed");
                                Event::PeerRefused { peer: instance, message }
                            }
                        };
                        peers.worker.event(event).await;
                    });
                }
                Outgoing::Fence { peer, session } => {
                    if self.is_current(peer, session) {
                        self.lines.lock().remove(&peer);
                    }
                    let peers = self.clone();
                    tokio::spawn(async move { peers.fence(peer, session).await });
                }
            }
        }
    }

    async fn shake_hands(
        &self,
        info: &WorkerInfo,
        address: &str,
        instance: Instance,
        floor: u64,
    ) -> Result<u64, String> {
        // Fenced before the peer connects anew, because a later fence would cut that connection too.
        let links = self.worker.links().clone();
        match tokio::task::spawn_blocking(move || links.fence_all(instance)).await {
            Ok(fenced) => {
                fenced.map_err(|error| format!("an earlier connection could not be fenced: {error}"))?;
            }
            Err(panic) => return Err(format!("the transfer plugin failed: {panic}")),
        }
        let mut client = self.client(address)?;
        let attempt = async {
            let request = HandshakeRequest { from: Some(info.clone()), floor, to: instance.0 };
            let reply = client.handshake(request).await.map(tonic::Response::into_inner);
            let unreachable = |why| format!("the prefill worker at {address} cannot be reached: {why}");
            reply.map_err(|status| unreachable(reason(&status)))
        };
        let allowed = self.late.allowed(instance);
        let Ok(reply) = timeout(allowed, attempt).await else {
            self.late.late(instance);
            return Err(format!(
                "the prefill worker at {address} does not answer a handshake within {} s: it hangs, or its transfer plugin is slow \
                 to connect, of which its log names the call",
                allowed.as_secs()
            ));
        };
        self.late.answered(instance);
        let reply = reply?;
        if !reply.accepted {
            return Err(reply.message);
        }
        let peer = reply.worker.clone().ok_or("the prefill worker's answer does not describe the worker")?;
        if peer.instance != instance.0 {
            return Err(format!("the prefill worker at {address} was restarted"));
        }
        fits(info, &peer)?;
        let protocol = protocol::of_peer(&reply, &peer)?;
        let session = connect(&self.worker, &peer).await?;
        tracing::info!(name = %peer.name, %instance, %protocol, "peer connected");
        self.add(instance, (session, protocol), address);
        Ok(session)
    }

    async fn fence(&self, peer: Instance, session: u64) {
        let links = self.worker.links().clone();
        let event = match tokio::task::spawn_blocking(move || links.fence(peer, session)).await {
            Ok(Ok(())) => Event::PeerLost { peer, session, fenced: true },
            Ok(Err(error)) => {
                tracing::warn!("{}", not_cut_off(self.worker.links().plugin_name(), peer, &error));
                Event::FenceFailed { peer, session }
            }
            Err(panic) => {
                tracing::error!(%peer, %panic, "the transfer plugin failed to fence a peer");
                Event::FenceFailed { peer, session }
            }
        };
        self.worker.event(event).await;
    }
}

/// Sends to one peer until the peer is lost, the line is replaced, or no sender is left.
async fn speak(
    peers: Peers,
    (peer, session): (Instance, u64),
    mut client: WorkerClient<Channel>,
    mut queue: mpsc::Receiver<Queued>,
) {
    let from = peers.worker.instance().0;
    let mut failures = 0;
    let mut floor = 0;
    loop {
        let mut messages = Vec::new();
        match timeout(SIGN_OF_LIFE, queue.recv()).await {
            Ok(Some(first)) => {
                floor = floor.max(first.floor);
                messages.push(first.message);
                while messages.len() < PER_CALL
                    && let Ok(next) = queue.try_recv()
                {
                    floor = floor.max(next.floor);
                    messages.push(next.message);
                }
            }
            Ok(None) => return,
            Err(_idle) => {}
        }
        let request = DeliverRequest { from, to: peer.0, floor, messages };
        let trouble = match timeout(CALL, client.deliver(request)).await {
            Ok(Ok(reply)) if reply.get_ref().wrong_instance => {
                failures = FAILURES;
                "another worker answers at its address".to_owned()
            }
            Ok(Ok(reply)) if reply.get_ref().not_connected => {
                failures = FAILURES;
                "it has cut this worker off".to_owned()
            }
            Ok(Ok(_)) => {
                failures = 0;
                continue;
            }
            // A peer that is too busy is alive.
            Ok(Err(status)) if status.code() == tonic::Code::ResourceExhausted => continue,
            Ok(Err(status)) => reason(&status),
            Err(_elapsed) => format!("no answer in {CALL:?}"),
        };
        failures += 1;
        if failures >= FAILURES {
            // A failure of an earlier line says nothing about the line in use.
            if peers.is_current(peer, session) {
                tracing::warn!(%peer, trouble, "a peer is lost");
                peers.worker.event(Event::PeerLost { peer, session, fenced: false }).await;
            }
            return;
        }
        tokio::time::sleep(AFTER_FAILURE).await;
    }
}

/// The version of the control protocol in which two workers speak that can exchange KV, or why they cannot.
pub(super) fn fits(ours: &WorkerInfo, theirs: &WorkerInfo) -> Result<Version, String> {
    let pair = (ours.role.as_str(), theirs.role.as_str());
    if !matches!(pair, ("prefill", "decode") | ("decode", "prefill")) {
        return Err(format!(
            "{} is a {} worker and {} a {} worker: KV goes from prefill to decode",
            ours.name, ours.role, theirs.name, theirs.role
        ));
    }
    let protocol = protocol::agree(theirs)?;
    let (prefill, decode) = if ours.role == "prefill" { (ours, theirs) } else { (theirs, ours) };
    compatible(prefill, decode)?;
    Ok(protocol)
}

/// Cuts off what is left of an earlier connection of the transfer plugin to a peer and makes a new one, off the async threads.
/// Returns the session.
pub(super) async fn connect(worker: &Handle, peer: &WorkerInfo) -> Result<u64, String> {
    let (links, peer) = (worker.links().clone(), peer.clone());
    tokio::task::spawn_blocking(move || links.connect(&peer))
        .await
        .unwrap_or_else(|panic| Err(format!("the transfer plugin failed: {panic}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_was_late_gets_more_time_until_it_answers() {
        let (late, peer, other) = (LateHandshakes::default(), Instance(1), Instance(2));
        let allowed = [5, 10, 20, 20].map(|seconds| {
            let allowed = late.allowed(peer);
            late.late(peer);
            (allowed, Duration::from_secs(seconds))
        });
        assert!(allowed.iter().all(|(is, expected)| is == expected), "{allowed:?}");
        assert_eq!(late.allowed(other), HANDSHAKE);
        late.answered(peer);
        assert_eq!(late.allowed(peer), HANDSHAKE);
        (0..5000).for_each(|peer| late.late(Instance(peer)));
        assert!(late.0.lock().len() <= MOST_LATE);
    }
}
