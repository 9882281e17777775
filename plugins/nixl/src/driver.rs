//! The thread that makes all calls into NIXL.

use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::set_current_timer_slack;

use crate::capi::{Agent, Library, Refusal};
use crate::connecting::Connecting;
use crate::door::Door;
use crate::fencing::{Deregistration, Fence};
use crate::link::{Failed, Link};
use crate::lists::List;
use crate::pieces::Scratch;
use crate::regions::Card;
use crate::shared::{Command, Shared, clear, signal};
use crate::wire::{Body, Message, Random};

/// Most connections in each direction.
pub const MAX_PEERS: usize = 256;
/// Submissions started before the driver looks at anything else.
const STARTS: usize = 16;
/// NIXL has nothing to wait on, so the driver looks: without a pause for as long as [`KEEN`] after something happened,
const KEEN: Duration = Duration::from_micros(50);
/// at this interval for as long as [`BRISK`], or until nothing of ours is in flight: a kernel's buffer of 128 KiB fills
/// within a moment, but what is fetched in larger pieces costs less,
const FLYING: Duration = Duration::from_micros(20);
const BRISK: Duration = Duration::from_millis(10);
/// at this one for as long as [`LIVELY`],
const WAKEFUL: Duration = Duration::from_micros(100);
const LIVELY: Duration = Duration::from_millis(50);
/// and at this one when nothing does.
const DROWSY: Duration = Duration::from_millis(1);

/// How long a thread of NIXL's sleeps at most until it looks whether bytes came; it wakes up when some do.
const THREAD_LOOKS: Duration = Duration::from_millis(10);

/// What is needed to make an agent.
pub struct Maker {
    pub library: Arc<Library>,
    pub backend: CString,
    pub parameters: Vec<(CString, CString)>,
    /// Starts the names of our agents; no other instance's do.
    pub prefix: String,
}

impl Maker {
    /// An agent behind which the driver drives progress, or a thread of NIXL's own.
    ///
    /// # Errors
    /// When NIXL refuses.
    pub fn agent(&self, name: &str, has_thread: bool) -> std::result::Result<Agent, Refusal> {
        // A name of ours has no zero byte in it, or it was refused.
        let name = CString::new(format!("{}/{name}", self.prefix)).unwrap_or_default();
        Agent::new(&self.library, &name, &self.backend, &self.parameters, has_thread.then_some(THREAD_LOOKS))
    }
}

/// Another instance.
pub struct Front {
    /// Name of its front's agent.
    pub agent: CString,
    pub asked: Instant,
    /// Pings not answered.
    pub unanswered: u32,
}

/// See the module.
pub struct Driver {
    pub shared: Arc<Shared>,
    pub maker: Maker,
    pub front: Agent,
    pub instance: Random,
    pub token: Random,
    pub fronts: HashMap<Random, Front>,
    pub links: BTreeMap<u32, Link>,
    pub doors: Vec<Door>,
    pub doors_made: u64,
    pub last_link: u32,
    pub connecting: Vec<Connecting>,
    pub fences: Vec<Fence>,
    pub deregistrations: Vec<Deregistration>,
    scratch: Scratch,
    /// Instances whose front could not be told something.
    pub suspects: Vec<Random>,
    /// When something last happened.
    lively: Instant,
}

/// Starts the thread. It says through `started` when it can be asked, with the metadata of its first agent, or why not.
///
/// # Errors
/// When no thread can be started.
pub fn start(
    shared: Arc<Shared>,
    maker: Maker,
    instance: Random,
    token: Random,
    started: SyncSender<Result<Vec<u8>>>,
) -> Result<JoinHandle<()>> {
    let run = move || {
        let body = || {
            let driver = Driver::new(shared.clone(), maker, instance, token);
            let front = driver.and_then(|driver| {
                let refused = |refusal: Refusal| Error::new(ErrorCode::IO, refusal.to_string());
                driver.front.metadata().map_err(refused).map(|front| (driver, front))
            });
            let (driver, answer) = match front {
                Ok((driver, front)) => (Some(driver), Ok(front)),
                Err(error) => (None, Err(error)),
            };
            if started.try_send(answer).is_ok()
                && let Some(driver) = driver
            {
                driver.run();
            }
        };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(body)) {
            // Its drop may panic, and nobody is above us to catch that.
            std::mem::forget(payload);
            shared.set_broken();
        }
        shared.set_ended();
    };
    let thread = std::thread::Builder::new().name("nixl-driver".to_owned()).spawn(run);
    thread.map_err(|e| Error::new(ErrorCode::IO, format!("cannot start a thread: {e}")))
}

impl Driver {
    /// Makes the front. To be called on the thread that will run it.
    ///
    /// # Errors
    /// `IO` when NIXL refuses.
    pub fn new(shared: Arc<Shared>, maker: Maker, instance: Random, token: Random) -> Result<Self> {
        let refused = |refusal: Refusal| {
            let config = &shared.config;
            let text = format!(
                "{refusal}; the library is {}, backend = {:?}, transports = {:?}, devices = {:?}",
                maker.library.path().display(),
                config.backend,
                config.transports,
                config.devices
            );
            Error::new(ErrorCode::IO, text)
        };
        let front = maker.agent("front", false).map_err(refused)?;
        let scratch = Scratch::new(&maker.library).map_err(refused)?;
        Ok(Self {
            shared,
            maker,
            front,
            instance,
            token,
            fronts: HashMap::new(),
            links: BTreeMap::new(),
            doors: Vec::new(),
            doors_made: 0,
            last_link: 0,
            connecting: Vec::new(),
            fences: Vec::new(),
            deregistrations: Vec::new(),
            scratch,
            suspects: Vec::new(),
            lively: Instant::now(),
        })
    }

    /// Runs until the instance is shut down.
    pub fn run(mut self) {
        // By default the kernel adds 50 µs to each sleep. Without the right to change that, it does.
        let _left_as_it_is = set_current_timer_slack(NonZeroU64::new(1000)).is_err();
        while !self.shared.is_stopping() {
            let mut busy = self.take_commands();
            busy |= self.start_submissions();
            busy |= self.advance_links();
            busy |= self.look_behind_doors();
            busy |= self.take_messages();
            self.keep_time();
            if busy {
                self.lively = Instant::now();
                if !self.shared.nothing_waits() {
                    signal(&self.shared.event);
                }
            } else {
                self.rest();
            }
        }
        self.close();
    }

    fn take_commands(&mut self) -> bool {
        let mut any = false;
        while let Some(command) = self.shared.next_command() {
            any = true;
            match command {
                Command::Connect { name, endpoint, reply } => self.connect(name, endpoint, reply),
                Command::Disconnect { peer, reply } => self.disconnect(peer, reply),
                Command::Try { card, reply } => {
                    let _gone = reply.try_send(self.try_memory(&card)).is_err();
                }
                Command::Prepare { list, reply } => self.prepare(list, &reply),
                Command::Release { list, reply } => self.release(&list, &reply),
                Command::Deregister { region, reply } => self.deregister(region, reply),
            }
        }
        any
    }

    /// Registers memory with an agent of its own, which ends right away.
    fn try_memory(&self, card: &Card) -> Result<()> {
        let refused = |refusal: Refusal| Error::new(ErrorCode::UNSUPPORTED, refusal.to_string());
        let mut agent = self.maker.agent("trial", false).map_err(refused)?;
        agent.register(card.id, card.place()).map_err(refused)
    }

    fn prepare(&mut self, list: Arc<List>, reply: &SyncSender<Result<()>>) {
        let regions = self.shared.regions.read().unwrap_or_else(PoisonError::into_inner);
        let refused = |refusal: Refusal| Error::new(ErrorCode::IO, refusal.to_string());
        let prepared = match self.links.get_mut(&list.peer.id.0) {
            Some(link) => link.prepare(regions.alive(), list, &mut self.scratch).map_err(refused),
            None => Err(Error::new(ErrorCode::PEER_LOST, format!("{} is gone", list.peer.name))),
        };
        // Whoever asked has given up when nobody takes the answer.
        let _gone = reply.try_send(prepared).is_err();
    }

    fn release(&mut self, list: &List, reply: &SyncSender<Result<()>>) {
        if let Some(link) = self.links.get_mut(&list.peer.id.0) {
            link.release(list.id);
        }
        let _gone = reply.try_send(Ok(())).is_err();
    }

    fn start_submissions(&mut self) -> bool {
        for started in 0..STARTS {
            let Some((index, cancelled)) = self.shared.queue.next() else { return started > 0 };
            let peer = self.shared.queue.content(index).submission.peer;
            if cancelled {
                self.shared.queue.finish(index, ErrorCode::CANCELLED.0, 0, None);
                continue;
            }
            match self.links.get_mut(&peer.0).filter(|link| link.is_open()) {
                None => self.shared.queue.finish(index, ErrorCode::PEER_LOST.0, 0, None),
                Some(link) => {
                    if link.take(&self.shared, index).is_err() {
                        self.end_link(peer.0);
                    }
                }
            }
        }
        true
    }

    fn advance_links(&mut self) -> bool {
        let mut any = false;
        let mut failed = Vec::new();
        for (id, link) in &mut self.links {
            let posted = link.post(&self.shared, &mut self.scratch);
            match posted.and_then(|posted| Ok((posted, link.advance(&self.shared)?))) {
                Ok((posted, finished)) => any |= posted || finished > 0,
                Err(Failed) => failed.push(*id),
            }
        }
        for id in failed {
            any = true;
            self.end_link(id);
        }
        any
    }

    fn look_behind_doors(&mut self) -> bool {
        let mut any = false;
        for door in &mut self.doors {
            // Senders to a host that does not take what came wait at the door.
            if self.shared.notices.is_full() {
                break;
            }
            // A refusal leaves the door as it is; what it stands for shows at the front.
            any |= door.look(&self.shared.notices).unwrap_or(false);
        }
        any
    }

    fn take_messages(&mut self) -> bool {
        let mut messages = Vec::new();
        // What is no message of ours is nobody's.
        let refused = self.front.received(|bytes| messages.extend(Message::decode(bytes))).is_err();
        let any = !messages.is_empty() && !refused;
        for message in messages {
            self.handle(message);
        }
        any
    }

    fn handle(&mut self, message: Message) {
        let Message { instance, connection, body } = message;
        match body {
            Body::Hello { token, name, front } => self.hello(instance, connection, token, name, &front),
            Body::Welcome { door, regions } => self.welcome(instance, connection, Ok((door, regions))),
            Body::Refused { code, reason } => {
                let error = Error::new(ErrorCode(code), reason);
                self.welcome(instance, connection, Err(error));
            }
            Body::Cut => self.cut(instance, connection),
            Body::CutDone | Body::Closed => self.door_is_closed(instance, connection),
            Body::Bye => self.lose(instance),
            Body::Ping => self.say(instance, 0, Body::Pong),
            Body::Pong => {
                if let Some(front) = self.fronts.get_mut(&instance) {
                    front.unanswered = 0;
                }
            }
        }
    }

    /// Tells another instance something. If it cannot be told, it is lost, a moment later.
    pub fn say(&mut self, to: Random, connection: u64, body: Body) {
        let message = Message { instance: self.instance, connection, body };
        let said = match self.fronts.get(&to) {
            Some(front) => self.front.notify(&front.agent, &message.encode()).is_ok(),
            None => false,
        };
        if !said {
            self.suspects.push(to);
        }
    }

    /// Sleeps until somebody asks for something, or it is time to look again.
    fn rest(&mut self) {
        let quiet = self.lively.elapsed();
        if quiet < KEEN {
            std::thread::yield_now();
            return;
        }
        let flying = self.links.values().any(Link::has_flights);
        let expecting = !self.connecting.is_empty() || !self.fences.is_empty();
        let wait = match () {
            () if flying || quiet < BRISK => FLYING,
            () if expecting || quiet < LIVELY => WAKEFUL,
            () => DROWSY,
        };
        let shared = &self.shared;
        shared.sleeping.store(true, std::sync::atomic::Ordering::SeqCst);
        // Whoever comes after this sees that we sleep, and whoever came before is seen here.
        if !shared.queue.has_ready() && !shared.has_commands() {
            let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
            // Interrupted or not, the loop looks again.
            let _awake = poll(&mut [PollFd::new(&shared.wake, PollFlags::IN)], Some(&timeout)).is_ok();
        }
        shared.sleeping.store(false, std::sync::atomic::Ordering::SeqCst);
        clear(&shared.wake);
    }

    /// Ends everything, and says goodbye.
    fn close(mut self) {
        for link in self.links.values_mut() {
            link.end(&self.shared);
        }
        self.links.clear();
        self.connecting.clear();
        self.doors.clear();
        let fronts: Vec<Random> = self.fronts.keys().copied().collect();
        for instance in fronts {
            self.say(instance, 0, Body::Bye);
        }
        // A goodbye that does not get through is a connection that ends, which says the same.
        for _ in 0..64 {
            if self.front.received(|_| {}).is_err() {
                break;
            }
            std::thread::yield_now();
        }
    }
}
