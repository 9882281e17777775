//! NIXL's agents, as the books of connections use them: the front, one for each link, one for each inbound endpoint.

use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, RegionId, Result};
use host_transfer_kit::connections::{Connection, Transport};
use host_transfer_kit::wire::Message;
use host_transfer_kit::{Notifications, Random, RegionDescriptor};

use crate::capi::{Agent, Library, Refusal};
use crate::link::Link;
use crate::pieces::place;
use crate::presence::{Inquiry, Presence};
use crate::shared::{Peer, Shared};
use crate::wire::{Body, Frame};

/// Most connections in each direction.
pub const MAX_PEERS: usize = 256;
/// How often a peer gets a ping, so that a broken connection shows.
const PING: Duration = Duration::from_millis(500);
/// After this many pings without an answer, how often it gets one: it may be stopped, and messages to it pile up.
const PATIENT: (u32, Duration) = (20, Duration::from_secs(10));
/// How long after a broken connection to another instance's front the next one is tried: at first, and at most.
const CONNECT_AGAIN: Duration = Duration::from_millis(200);
const CONNECT_SELDOM: Duration = Duration::from_secs(10);
/// How often callers that ask whether this instance lives, and answers of others, are looked for: while they are expected,
/// and otherwise.
const LOOKS: Duration = Duration::from_millis(1);
const LOOKS_SELDOM: Duration = Duration::from_millis(20);
/// How long a thread of NIXL's sleeps at most until it looks for bytes. It wakes up when bytes come.
const THREAD_LOOKS: Duration = Duration::from_millis(10);

/// What is needed to make an agent.
pub struct Maker {
    pub library: Arc<Library>,
    pub backend: CString,
    pub parameters: Vec<(CString, CString)>,
    /// The names of this instance's agents start with it. No other instance's names do.
    pub prefix: String,
}

impl Maker {
    /// Makes an agent. The driver drives its progress, or a thread of NIXL's own with `has_thread`.
    ///
    /// # Errors
    /// When NIXL refuses.
    pub fn agent(&self, name: &str, has_thread: bool) -> std::result::Result<Agent, Refusal> {
        // The name has no zero byte in it: others are refused earlier.
        let name = CString::new(format!("{}/{name}", self.prefix)).unwrap_or_default();
        Agent::new(&self.library, &name, &self.backend, &self.parameters, has_thread.then_some(THREAD_LOOKS))
    }
}

/// Another instance.
struct Front {
    /// Name of its front's agent.
    agent: CString,
    /// The metadata of its front's agent.
    metadata: Vec<u8>,
    /// When a new connection to it is tried. `None` while the one there is works.
    connect_again: Option<Instant>,
    /// Connections that broke since it last answered a ping.
    broken: u32,
    /// Whether its process lives.
    inquiry: Inquiry,
    /// When the last ping was sent.
    pinged: Instant,
    /// Pings not answered.
    unanswered: u32,
}

/// The inbound endpoint of one peer's writes: an agent that one sender knows. Dropping it closes its connections and
/// takes its keys back. From then on nothing that was sent to it lands, whatever the sender does.
struct Inbound {
    connection: Connection,
    /// The name under which the sender was opened.
    peer_name: String,
    agent: Agent,
    /// Whether a thread of NIXL's drives progress.
    has_thread: bool,
}

impl Inbound {
    /// Drives progress unless a thread does, and takes notifications that came. True if any came.
    fn look(&mut self, notifications: &Notifications) -> std::result::Result<bool, Refusal> {
        let mut any = false;
        let name = &self.peer_name;
        self.agent.received(|message| {
            any = true;
            notifications.arrived(name, message);
        })?;
        Ok(any)
    }
}

/// All agents of one instance.
pub struct Agents {
    pub shared: Arc<Shared>,
    pub maker: Maker,
    pub front: Agent,
    pub links: BTreeMap<u32, Link>,
    instance: Random,
    fronts: HashMap<Random, Front>,
    inbound: Vec<Inbound>,
    inbound_made: u64,
    /// Instances to which a message could not be sent.
    suspects: Vec<Random>,
    /// Links that open as soon as an address of their peer is proven, or at that time.
    pub opening: Vec<(Link, Instant)>,
    /// When callers were last answered, and when the ends of others were last looked for.
    answered: Instant,
    looked: Instant,
    /// Dropped after the inbound endpoints: its end proves to peers that nothing lands any more.
    presence: Presence,
}

/// Turns a refusal of NIXL's into an error of the trait.
pub fn io(refusal: Refusal) -> Error {
    Error::new(ErrorCode::IO, refusal.to_string())
}

impl Agents {
    pub fn new(shared: Arc<Shared>, maker: Maker, front: Agent, instance: Random) -> Self {
        Self {
            presence: Presence::open(&shared.config.devices, instance, 2 * MAX_PEERS),
            answered: Instant::now(),
            looked: Instant::now(),
            opening: Vec::new(),
            shared,
            maker,
            front,
            links: BTreeMap::new(),
            instance,
            fronts: HashMap::new(),
            inbound: Vec::new(),
            inbound_made: 0,
            suspects: Vec::new(),
        }
    }

    /// Makes another instance known that has said hello, or how it can be reached, by the metadata of its front. False
    /// when that fails.
    pub fn meet_caller(&mut self, instance: Random, front: &[u8]) -> bool {
        let room = self.fronts.contains_key(&instance) || self.fronts.len() < 2 * MAX_PEERS;
        room && self.learn_front(instance, front).is_ok()
    }

    /// Takes the addresses at which another instance answers that it lives.
    pub fn note_addresses(&mut self, instance: Random, addresses: Vec<SocketAddr>) {
        if let Some(front) = self.fronts.get_mut(&instance) {
            front.inquiry.offer(addresses, Instant::now());
        }
    }

    /// Connects to the front of another instance, unless there is a connection that works.
    fn learn_front(&mut self, instance: Random, metadata: &[u8]) -> std::result::Result<(), Refusal> {
        let known = self.fronts.get_mut(&instance);
        if known.as_ref().is_some_and(|front| front.connect_again.is_none()) {
            return Ok(());
        }
        let agent = self.front.learn(metadata)?;
        let (now, metadata) = (Instant::now(), metadata.to_vec());
        match known {
            Some(front) => {
                (front.agent, front.metadata, front.connect_again) = (agent, metadata, None);
                // A ping is due at once.
                (front.pinged, front.unanswered) = (now.checked_sub(PING).unwrap_or(now), 0);
            }
            None => {
                let inquiry = Inquiry::new(now);
                let (connect_again, pinged) = (None, now);
                let front =
                    Front { agent, metadata, connect_again, broken: 0, inquiry, pinged, unanswered: 0 };
                self.fronts.insert(instance, front);
            }
        }
        Ok(())
    }

    /// Notes that the connection to another instance's front is broken. True if it is the first one since the instance
    /// last answered a ping.
    pub fn note_broken(&mut self, instance: Random) -> bool {
        let Some(front) = self.fronts.get_mut(&instance).filter(|front| front.connect_again.is_none()) else {
            return false;
        };
        self.front.forget(&front.agent);
        let now = Instant::now();
        let wait = CONNECT_AGAIN * 2_u32.saturating_pow(front.broken.min(8));
        front.connect_again = Some(now + wait.min(CONNECT_SELDOM));
        front.broken += 1;
        front.broken == 1
    }

    /// Whether it can be found out that the process of an instance is gone.
    pub fn has_proven(&self, instance: Random) -> bool {
        self.fronts.get(&instance).is_some_and(|front| front.inquiry.has_proven())
    }

    /// The instances to which the connection is broken.
    pub fn unreachable(&self) -> Vec<Random> {
        let broken = |(instance, front): (&Random, &Front)| front.connect_again.map(|_| *instance);
        self.fronts.iter().filter_map(broken).collect()
    }

    /// Connects anew to the fronts whose time has come.
    pub fn connect_again(&mut self) {
        let now = Instant::now();
        let due = |front: &Front| front.connect_again.is_some_and(|at| now >= at);
        let due: Vec<_> = self.fronts.iter().filter(|(_, front)| due(front)).collect();
        let due: Vec<_> =
            due.into_iter().map(|(instance, front)| (*instance, front.metadata.clone())).collect();
        for (instance, metadata) in due {
            if self.learn_front(instance, &metadata).is_err()
                && let Some(front) = self.fronts.get_mut(&instance)
            {
                front.connect_again = Some(now + CONNECT_SELDOM);
            }
        }
    }

    /// Answers callers that ask whether this instance lives. `lively`: something happened a moment ago.
    pub fn answer_callers(&mut self, lively: bool) {
        let now = Instant::now();
        if now.duration_since(self.answered) >= if lively { LOOKS } else { LOOKS_SELDOM } {
            self.answered = now;
            self.presence.answer(now);
        }
    }

    /// Returns the instances whose process is gone. `expecting`: calls of the host wait for other instances.
    pub fn look_for_the_dead(&mut self, expecting: bool) -> Vec<Random> {
        let now = Instant::now();
        if now.duration_since(self.looked) < if expecting { LOOKS } else { LOOKS_SELDOM } {
            return Vec::new();
        }
        self.looked = now;
        let mut gone = Vec::new();
        for (instance, front) in &mut self.fronts {
            if front.inquiry.look(*instance, now) {
                gone.push(*instance);
            }
        }
        gone
    }

    /// Takes the links that need not wait any longer to open.
    pub fn take_opening(&mut self) -> Vec<Link> {
        let now = Instant::now();
        let fronts = &self.fronts;
        let ready = |(link, at): &mut (Link, Instant)| {
            let inquiry = fronts.get(&link.peer.instance).map(|front| &front.inquiry);
            now >= *at || inquiry.is_none_or(|inquiry| inquiry.has_proven() || inquiry.is_hopeless())
        };
        self.opening.extract_if(.., ready).map(|(link, _)| link).collect()
    }

    /// Sends a message to another instance. If that fails, contact with the instance is lost a moment later. Nothing is
    /// sent while the connection to it is broken.
    pub fn tell(&mut self, to: Random, connection: u64, body: Body) {
        let Some(front) = self.fronts.get(&to).filter(|front| front.connect_again.is_none()) else { return };
        let frame = Frame { instance: self.instance, connection, body };
        if self.front.notify(&front.agent, &frame.encode()).is_err() {
            self.suspects.push(to);
        }
    }

    /// Takes the instances to which a message could not be sent.
    pub fn suspects(&mut self) -> Vec<Random> {
        std::mem::take(&mut self.suspects)
    }

    /// Says how this instance can be reached. `front`: the metadata of its front.
    fn introduce(&mut self, to: Random, connection: u64, front: Vec<u8>) {
        let addresses = self.presence.addresses();
        self.tell(to, connection, Body::Introduction { front, addresses });
    }

    /// Notes that an instance has answered a ping.
    pub fn note_pong(&mut self, instance: Random) {
        if let Some(front) = self.fronts.get_mut(&instance) {
            (front.unanswered, front.broken) = (0, 0);
        }
    }

    /// Sends pings to the instances whose time has come.
    pub fn ping(&mut self) {
        let now = Instant::now();
        let due = |front: &Front| {
            let every = if front.unanswered < PATIENT.0 { PING } else { PATIENT.1 };
            now.duration_since(front.pinged) >= every
        };
        let mut due_now = Vec::new();
        let mut metadata = None;
        let works = |front: &Front| front.connect_again.is_none();
        for (instance, front) in self.fronts.iter_mut().filter(|(_, front)| works(front) && due(front)) {
            front.pinged = now;
            front.unanswered += 1;
            due_now.push((*instance, front.broken > 0 || front.unanswered > PATIENT.0));
        }
        for (instance, introduces) in due_now {
            // An instance that has lost contact drops the pings of a stranger.
            if introduces {
                let front = metadata.get_or_insert_with(|| self.front.metadata().unwrap_or_default()).clone();
                self.introduce(instance, 0, front);
            }
            self.tell(instance, 0, Body::Ping);
        }
    }

    /// Says goodbye to all.
    pub fn say_goodbye(&mut self) {
        let fronts: Vec<Random> = self.fronts.keys().copied().collect();
        for instance in fronts {
            self.say(instance, 0, Message::Bye);
        }
    }

    /// Takes notifications that came in. True if any came.
    pub fn look_at_inbound(&mut self) -> bool {
        let notifications = &self.shared.instance().notifications;
        let mut any = false;
        for inbound in &mut self.inbound {
            // Senders wait here for a host that does not fetch its notifications.
            if notifications.is_full() {
                break;
            }
            // A refusal leaves the agent as it is. The cause shows at the front.
            any |= inbound.look(notifications).unwrap_or(false);
        }
        any
    }
}

impl Transport for Agents {
    type Mailbox = ();

    fn meet(&mut self, instance: Random, name: &str, address: &[u8]) -> Result<()> {
        self.learn_front(instance, address).map_err(|refusal| {
            let text = format!(
                "{name} cannot be reached over devices = {:?}; if it is on another machine, set devices in \
                 [plugin.nixl] to a network that both are on: {refusal}",
                self.shared.config.devices
            );
            Error::new(ErrorCode::PEER_LOST, text)
        })
    }

    fn forget(&mut self, instance: Random) -> bool {
        let Some(front) = self.fronts.remove(&instance) else { return false };
        if front.connect_again.is_none() {
            self.front.forget(&front.agent);
        }
        true
    }

    fn say(&mut self, to: Random, connection: u64, message: Message) {
        let hello = matches!(message, Message::Hello { .. });
        // A receiver that has lost contact must know how to answer. A sender needs the addresses while it is connected.
        let introduces = matches!(message, Message::Welcome { .. } | Message::Cut);
        let front = if hello || introduces { self.front.metadata() } else { Ok(Vec::new()) };
        let Ok(mut front) = front else {
            self.suspects.push(to);
            return;
        };
        if introduces {
            self.introduce(to, connection, std::mem::take(&mut front));
        }
        self.tell(to, connection, Body::Connection { message, front });
    }

    fn mailbox(&self) {}

    fn open_inbound(
        &mut self,
        connection: Connection,
        peer_name: &str,
        regions: &[RegionDescriptor],
    ) -> Result<Option<Vec<u8>>> {
        self.inbound_made += 1;
        let with_thread = self.inbound.iter().filter(|inbound| inbound.has_thread).count();
        let threads = self.shared.config.progress_threads;
        let has_thread = threads.next_has_one(self.inbound.len(), with_thread);
        let mut agent =
            self.maker.agent(&format!("inbound-{}", self.inbound_made), has_thread).map_err(io)?;
        for region in regions {
            agent.register(region.id.0, place(region)).map_err(io)?;
        }
        let metadata = agent.metadata().map_err(io)?;
        self.inbound.push(Inbound { connection, peer_name: peer_name.to_owned(), agent, has_thread });
        Ok(Some(metadata))
    }

    fn close_inbound(&mut self, connection: Connection) -> bool {
        self.inbound.retain(|inbound| inbound.connection != connection);
        true
    }

    fn open_link(&mut self, peer: Arc<Peer>, address: Vec<u8>) -> Result<bool> {
        let id = peer.id.0;
        let mut agent = self.maker.agent(&format!("link-{id}"), false).map_err(io)?;
        let to = agent.learn(&address).map_err(io)?;
        let link = Link::new(peer, to, agent, self.shared.config.finishes_in_order());
        // The connect must not run into its own deadline.
        self.opening.push((link, Instant::now() + self.shared.config.connect_timeout() / 2));
        Ok(false)
    }

    fn end_link(&mut self, id: u32) -> Option<bool> {
        Some(self.links.get_mut(&id).is_some_and(|link| link.end(self.shared.instance())))
    }

    fn remove_link(&mut self, id: u32) {
        self.links.remove(&id);
    }

    fn let_go(&mut self, region: RegionId) {
        self.links.values_mut().for_each(|link| link.let_go(region));
    }

    fn has_let_go(&mut self, region: RegionId) -> Result<bool> {
        let mut all = true;
        for link in self.links.values_mut() {
            all &= link.has_let_go(region).map_err(io)?;
        }
        Ok(all)
    }

    fn may_ask_again(&self, instance: Random) -> bool {
        let answers = |front: &Front| front.connect_again.is_none() && front.unanswered < PATIENT.0;
        self.fronts.get(&instance).is_some_and(answers)
    }
}
