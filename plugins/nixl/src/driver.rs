//! The thread that makes all calls into NIXL.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Level, Result, log};
use host_transfer_kit::connections::{Settings, Transport};
use host_transfer_kit::wire::Message;
use host_transfer_kit::{Connections, Random, RegionDescriptor, answer, start_thread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::set_current_timer_slack;

use crate::agents::{Agents, MAX_PEERS, Maker, io};
use crate::capi::Refusal;
use crate::link::{Failed, Link};
use crate::pieces::{Scratch, place};
use crate::shared::{Command, Shared};
use crate::wire::{Body, Frame};

/// How often a peer is told again to close an inbound endpoint.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// Submissions started before the driver looks at anything else.
const STARTS: usize = 16;
/// NIXL has nothing to wait on, so the driver looks for work. For as long as [`KEEN`] after something happened, it does not pause.
const KEEN: Duration = Duration::from_micros(50);
/// The driver's pause while writes of this instance are in flight, and for as long as [`BRISK`] after something
/// happened. A kernel's buffer of 128 KiB fills within a moment, but fetching bytes in larger pieces costs less.
const FLYING: Duration = Duration::from_micros(20);
const BRISK: Duration = Duration::from_millis(10);
/// The driver's pause while calls of the host wait for other instances, and for as long as [`LIVELY`] after something happened.
const WAKEFUL: Duration = Duration::from_micros(100);
const LIVELY: Duration = Duration::from_millis(50);
/// The driver's pause otherwise.
const DROWSY: Duration = Duration::from_millis(1);

/// The state of the thread that calls NIXL.
struct Driver {
    shared: Arc<Shared>,
    connections: Connections<Agents>,
    scratch: Scratch,
    /// When something last happened.
    lively: Instant,
}

/// Starts the thread. It says through `started` when it takes requests, with the metadata of its first agent, or why not.
/// `identity`: the instance's, and the secret in its endpoint.
///
/// # Errors
/// When no thread can be started.
pub fn start(
    shared: Arc<Shared>,
    maker: Maker,
    identity: (Random, Random),
    started: SyncSender<Result<Vec<u8>>>,
) -> Result<JoinHandle<()>> {
    /// Tells threads that wait of the end, also when the driver panics.
    struct Ended(Arc<Shared>);
    impl Drop for Ended {
        fn drop(&mut self) {
            self.0.set_ended();
        }
    }
    let (ended, broken) = (Ended(shared.clone()), shared.clone());
    let run = move || {
        let _ended = ended;
        let made = Driver::new(shared, maker, identity).and_then(|driver| {
            let front = driver.connections.transport.front.metadata().map_err(io)?;
            Ok((driver, front))
        });
        let (driver, front) = match made {
            Ok((driver, front)) => (Some(driver), Ok(front)),
            Err(error) => (None, Err(error)),
        };
        if started.try_send(front).is_ok()
            && let Some(driver) = driver
        {
            driver.run();
        }
    };
    start_thread("nixl-driver", run, move || broken.instance().set_broken())
}

impl Driver {
    /// Makes the front. To be called on the thread that will run it.
    ///
    /// # Errors
    /// `IO` when NIXL refuses.
    fn new(shared: Arc<Shared>, maker: Maker, (instance, token): (Random, Random)) -> Result<Self> {
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
        let settings = Settings {
            max_peers: MAX_PEERS,
            connect_timeout: shared.config.connect_timeout(),
            fence_timeout: shared.config.fence_timeout(),
            ask_again: ASK_AGAIN,
        };
        let agents = Agents::new(shared.clone(), maker, front, instance);
        let connections = Connections::new(agents, shared.linked.clone(), settings, token);
        Ok(Self { shared, connections, scratch, lively: Instant::now() })
    }

    /// Runs until the instance is shut down.
    fn run(mut self) {
        // By default the kernel adds 50 µs to each sleep. If this process may not change that, sleeps stay longer.
        let _left_as_it_is = set_current_timer_slack(NonZeroU64::new(1000)).is_err();
        while !self.shared.instance().is_stopping() {
            let mut busy = self.take_commands();
            busy |= self.start_submissions();
            busy |= self.advance_links();
            busy |= self.connections.transport.look_at_inbound();
            busy |= self.take_messages();
            self.keep_time();
            if busy {
                self.lively = Instant::now();
                self.shared.instance().announce();
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
                Command::Connections(request) => self.connections.request(request),
                Command::Try { region, reply } => answer(&reply, self.try_memory(&region)),
            }
        }
        any
    }

    /// Tries to register memory, with an agent of its own that ends right away.
    fn try_memory(&self, region: &RegionDescriptor) -> Result<()> {
        let refused = |refusal: Refusal| Error::new(ErrorCode::UNSUPPORTED, refusal.to_string());
        let mut agent = self.connections.transport.maker.agent("trial", false).map_err(refused)?;
        agent.register(region.id.0, place(region)).map_err(refused)
    }

    fn start_submissions(&mut self) -> bool {
        let shared = self.shared.clone();
        let queue = &shared.instance().queue;
        for started in 0..STARTS {
            let Some(index) = shared.next_ready() else { return started > 0 };
            if queue.is_cancelled(index) {
                queue.finish(index, ErrorCode::CANCELLED.0, 0, None);
                continue;
            }
            let peer = queue.content(index).submission.peer.0;
            match self.connections.transport.links.get_mut(&peer).filter(|link| link.is_open()) {
                None => queue.finish(index, ErrorCode::PEER_LOST.0, 0, None),
                Some(link) => {
                    if let Err(Failed(why)) = link.take(shared.instance(), index) {
                        self.connections.link_failed(peer, &why);
                    }
                }
            }
        }
        true
    }

    fn advance_links(&mut self) -> bool {
        let mut any = false;
        let mut failed = Vec::new();
        for (id, link) in &mut self.connections.transport.links {
            let posted = link.post(&self.shared.linked, &mut self.scratch);
            let advanced = posted.and_then(|posted| Ok((posted, link.advance(self.shared.instance())?)));
            match advanced {
                Ok((posted, finished)) => any |= posted || finished > 0,
                Err(Failed(why)) => failed.push((*id, why)),
            }
        }
        for (id, why) in failed {
            any = true;
            self.connections.link_failed(id, &why);
        }
        any
    }

    fn take_messages(&mut self) -> bool {
        let mut frames = Vec::new();
        // Messages that are not frames of this plugin are dropped.
        let front = &mut self.connections.transport.front;
        let refused = front.received(|bytes| frames.extend(Frame::decode(bytes))).is_err();
        let any = !frames.is_empty() && !refused;
        for frame in frames {
            self.handle(frame);
        }
        any
    }

    fn handle(&mut self, Frame { instance, connection, body }: Frame) {
        let agents = &mut self.connections.transport;
        match body {
            Body::Connection { message, front } => {
                let hello = matches!(message, Message::Hello { .. });
                // If the caller cannot be answered, its call times out.
                if !hello || agents.meet_caller(instance, &front) {
                    self.connections.hear(instance, connection, message);
                }
            }
            Body::Introduction { front, addresses } => {
                // A stranger cannot make this process connect to addresses.
                if agents.meet_caller(instance, &front) && self.connections.sends_to(instance) {
                    self.connections.transport.note_addresses(instance, addresses);
                }
            }
            Body::Ping => agents.tell(instance, 0, Body::Pong),
            Body::Pong => agents.note_pong(instance),
        }
    }

    fn keep_time(&mut self) {
        for instance in self.connections.transport.suspects() {
            let first = self.connections.transport.note_broken(instance);
            let unproven = self.connections.lose_contact(instance, "it cannot be reached");
            if let Some(name) = unproven.filter(|_| first)
                && !self.connections.transport.has_proven(instance)
            {
                log!(
                    Level::WARN,
                    "{name} cannot be reached, and none of the addresses at which its process answers could be connected \
                     to before: fences of it time out until it is reached again. If a firewall is between the workers, \
                     allow all TCP ports between them"
                );
            }
            self.shared.instance().announce();
        }
        let expecting = self.connections.is_expecting();
        self.connections.transport.answer_callers(expecting || self.lively.elapsed() < LIVELY);
        for instance in self.connections.transport.look_for_the_dead(expecting) {
            self.connections.lose(instance, "its process is gone");
            self.shared.instance().announce();
        }
        for instance in self.connections.transport.unreachable() {
            // It introduces itself if it comes back and has questions.
            if !self.connections.is_concerned_with(instance) {
                self.connections.transport.forget(instance);
            }
        }
        self.connections.transport.connect_again();
        self.open_links();
        self.connections.keep_time();
        self.connections.transport.ping();
    }

    fn open_links(&mut self) {
        for link in self.connections.transport.take_opening() {
            let id = link.peer.id;
            self.connections.link_opened(id.0, Ok(()));
            // Unless it is not wanted any more.
            if self.shared.instance().peers.get(id).is_some() {
                self.connections.transport.links.insert(id.0, link);
            }
        }
    }

    /// Sleeps until a request comes, or it is time to look again.
    fn rest(&mut self) {
        let quiet = self.lively.elapsed();
        if quiet < KEEN {
            std::thread::yield_now();
            return;
        }
        let flying = self.connections.transport.links.values().any(Link::has_flights);
        let wait = match () {
            () if flying || quiet < BRISK => FLYING,
            () if self.connections.is_expecting() || quiet < LIVELY => WAKEFUL,
            () => DROWSY,
        };
        let shared = &self.shared;
        shared.sleeping.store(true, Ordering::SeqCst);
        // A caller that comes after this sees that the driver sleeps. Work of a caller that came before is seen here.
        if !shared.has_work() {
            let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
            // Interrupted or not, the loop looks again.
            let _awake = poll(&mut [PollFd::new(&shared.wake, PollFlags::IN)], Some(&timeout)).is_ok();
        }
        shared.sleeping.store(false, Ordering::SeqCst);
        shared.wake.clear();
    }

    /// Ends everything, and says goodbye.
    fn close(mut self) {
        self.connections.close();
        let agents = &mut self.connections.transport;
        agents.opening.clear();
        agents.links.clear();
        agents.say_goodbye();
        // A goodbye that does not get through does no harm: the end of the presence tells the peer the same.
        for _ in 0..64 {
            if agents.front.received(|_| {}).is_err() {
                break;
            }
            std::thread::yield_now();
        }
    }
}
