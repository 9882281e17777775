//! The thread that decides: it reads the messages of the other instances, and keeps the books of links, doors and couriers.
//! It makes no call into Mooncake that could take long.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Level, log};

use super::connecting::Connecting;
use super::courier::Courier;
use super::door::{Door, Stage};
use super::fencing::{Deregistration, Fence};
use super::link::Link;
use super::shared::{Connection, Event, Shared};
use super::wire::{Body, Frame, Random};
use crate::engine::Engine;
use crate::engine::sitters::{self, Watch};

/// Most connections in each direction. Each is an engine, with two of the two thousand ports that Mooncake takes from.
pub const MAX_PEERS: usize = 128;
/// How often the service looks for messages, for as long after one came,
const KEEN: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(5));
/// for as long after that,
const LIVELY: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(200));
/// and when nothing happens.
const DROWSY: Duration = Duration::from_millis(1);
/// How often what waits for time is looked at.
const TICK: Duration = Duration::from_millis(1);
/// How often it is looked after connections to our engines that keep others out.
const WATCH: Duration = Duration::from_millis(250);
/// Most strangers that are turned away at the same time; more are left without an answer.
const ANSWERS: usize = 8;
/// How long goodbyes may take.
const FAREWELL: Duration = Duration::from_millis(500);

/// Another instance.
pub struct Front {
    pub courier: Arc<Courier>,
    /// Its stream to us, and the last message of it that came in order.
    pub heard: (u64, u64),
    /// When something of it last came, or it was asked whether it is there.
    pub spoke: Instant,
}

/// A link, with what the service knows of it.
pub struct Known {
    pub link: Arc<Link>,
    /// Its engine is there.
    pub running: bool,
    /// The peer says that the door is closed, or is gone.
    pub shut: bool,
    /// When the peer was last asked to close the door.
    pub asked: Option<Instant>,
    /// The host knows that the link has ended.
    pub told: bool,
}

/// See the module.
pub struct Service {
    pub shared: Arc<Shared>,
    pub front: Arc<dyn Engine>,
    pub token: Random,
    pub fronts: HashMap<Random, Front>,
    pub streams: u64,
    pub links: BTreeMap<u32, Known>,
    pub doors: Vec<Door>,
    pub last_link: u32,
    pub connecting: Vec<Connecting>,
    pub fences: Vec<Fence>,
    pub deregistrations: Vec<Deregistration>,
    answering: Arc<AtomicUsize>,
    lively: Instant,
    ticked: Instant,
    sitters: Watch,
    watched: Instant,
}

impl Service {
    pub fn new(shared: Arc<Shared>, front: Arc<dyn Engine>, token: Random) -> Self {
        let now = Instant::now();
        Self {
            shared,
            front,
            token,
            fronts: HashMap::new(),
            streams: 0,
            links: BTreeMap::new(),
            doors: Vec::new(),
            last_link: 0,
            connecting: Vec::new(),
            fences: Vec::new(),
            deregistrations: Vec::new(),
            answering: Arc::default(),
            lively: now,
            ticked: now,
            sitters: Watch::default(),
            watched: now,
        }
    }

    /// Runs until the instance is shut down.
    pub fn run(mut self) {
        while !self.shared.is_stopping() {
            let quiet = self.lively.elapsed();
            let wait = match () {
                () if quiet < KEEN.1 => KEEN.0,
                () if quiet < LIVELY.1 => LIVELY.0,
                () => DROWSY,
            };
            let events = self.shared.events(wait);
            let texts = self.front.messages();
            if !events.is_empty() || !texts.is_empty() {
                self.lively = Instant::now();
            }
            for event in events {
                self.take(event);
            }
            for text in texts {
                match Frame::decode(&text) {
                    Ok(frame) => self.hear(frame),
                    // Anybody can send us anything.
                    Err(error) => log!(Level::DEBUG, "a message was dropped: {error}"),
                }
            }
            if self.ticked.elapsed() >= TICK {
                self.ticked = Instant::now();
                self.keep_time();
            }
            self.send_sitters_away();
            self.shared.announce();
        }
        self.close();
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Connect { name, endpoint, reply } => self.connect(name, endpoint, reply),
            Event::Disconnect { peer, reply } => self.disconnect(peer, reply),
            Event::Deregister { region, reply } => self.deregister(region, reply),
            Event::LinkOpened { id, opened } => self.link_opened(id, opened),
            Event::LinkFailed { id, why } => self.link_failed(id, &why),
            Event::LinkEnded { id } => {
                if let Some(known) = self.links.get_mut(&id) {
                    known.running = false;
                }
                self.settle(id);
            }
            Event::DoorOpened { connection, opened } => self.door_opened(connection, opened),
            Event::DoorClosed { connection } => self.door_closed(connection),
            Event::Refused { instance } => self.lose(instance, "nobody listens at its address"),
        }
    }

    /// Takes a frame in: in order, once, and from those whom we know.
    fn hear(&mut self, frame: Frame) {
        let stranger = frame.to != self.shared.instance;
        let hello = matches!(frame.body, Body::Hello { .. });
        if frame.body == Body::Stranger {
            // It was said to us about us, or to somebody who is gone.
            if !stranger {
                self.lose(frame.from, "it does not know us any more");
            }
            return;
        }
        if stranger || (!hello && !self.fronts.contains_key(&frame.from)) {
            if frame.number > 0 {
                self.turn_away(&frame);
            }
            return;
        }
        self.notice_new_beginning(&frame, hello);
        if !self.fronts.contains_key(&frame.from) {
            // Doors of a connection that it has lost are said to be closed before the next one begins. It asks again.
            let closing = self.doors.iter().any(|door| door.connection.instance == frame.from);
            // Without a way to answer, the caller's time runs out.
            if !hello || closing || self.learn_front(frame.from, &frame.session).is_err() {
                return;
            }
        }
        // Not taken: the sender repeats it, or hears that the door is shut.
        let connection = Connection { instance: frame.from, number: frame.connection };
        let ending = || self.doors.iter().any(|door| door.connection == connection && !door.is_open());
        let untaken =
            matches!(frame.body, Body::Arrived { .. }) && (self.shared.notices.is_full() || ending());
        let Some(front) = self.fronts.get_mut(&frame.from) else { return };
        front.spoke = Instant::now();
        let news = front.courier.note_acknowledged(frame.heard);
        if news {
            for known in self.links.values().filter(|k| k.link.peer.instance == frame.from) {
                known.link.peer.nudge();
            }
        }
        let Some(front) = self.fronts.get_mut(&frame.from) else { return };
        if frame.number > 0 {
            let (stream, last) = front.heard;
            // A stream that we see for the first time may have begun before we, or this entry, did.
            let expected = match stream {
                stream if stream == frame.stream => last.checked_add(1) == Some(frame.number),
                stream => frame.stream > stream && (hello || frame.number == 1),
            };
            if expected && untaken {
                return;
            }
            if expected {
                front.heard = (frame.stream, frame.number);
            }
            front.courier.note_heard(front.heard);
            if !expected {
                return;
            }
        }
        self.handle(frame);
    }

    /// Loses an instance that has lost us and begins anew: it may have seen silence, or a refusal, where we saw nothing, and
    /// would not know what the old stream goes on with.
    fn notice_new_beginning(&mut self, frame: &Frame, hello: bool) {
        let Some((stream, _)) = self.fronts.get(&frame.from).map(|front| front.heard) else { return };
        // Of an instance with which there was nothing, only the other side may have been forgotten.
        if stream > 0 && frame.stream > stream && (hello || self.is_concerned_with(frame.from)) {
            self.lose(frame.from, "it has lost us, and begins anew");
        }
    }

    fn handle(&mut self, frame: Frame) {
        let Frame { from, connection: number, body, .. } = frame;
        match body {
            Body::Hello { token, name } => self.hello(Connection { instance: from, number }, token, name),
            Body::Welcome { door, regions } => self.welcome(from, number, Ok((door, regions))),
            Body::Refused { code, reason } => {
                self.welcome(from, number, Err(Error::new(ErrorCode(code), reason)));
            }
            Body::Arrived { payload } => {
                let connection = Connection { instance: from, number };
                // What came through a door that is closed was taken back from the sender.
                let door = self.doors.iter().find(|door| door.connection == connection && door.is_open());
                if let Some(door) = door {
                    self.shared.notices.arrived(&door.peer_name, &payload);
                }
            }
            Body::Cut => self.cut(Connection { instance: from, number }),
            Body::CutDone | Body::Closed => self.door_is_shut(from, number),
            Body::Bye => self.lose(from, "it said goodbye"),
            Body::Ping | Body::Heard | Body::Stranger => {}
        }
    }

    /// Tells another instance something, now or as soon as it listens.
    pub fn say(&mut self, to: Random, connection: u64, body: Body) {
        if let Some(front) = self.fronts.get(&to) {
            front.courier.say(connection, body);
        }
    }

    /// Tells whoever means somebody else, or counts on what we have forgotten.
    fn turn_away(&self, frame: &Frame) {
        // Its writes may still come through a door of ours until that is shut. It asks again.
        if self.doors.iter().any(|door| door.connection.instance == frame.from) {
            return;
        }
        if self.answering.load(Ordering::SeqCst) >= ANSWERS {
            return;
        }
        let answer = Frame {
            from: frame.to,
            to: frame.from,
            session: self.shared.session.clone(),
            stream: 0,
            number: 0,
            heard: (0, 0),
            connection: 0,
            body: Body::Stranger,
        };
        let (front, session) = (self.front.clone(), frame.session.clone());
        let answering = self.answering.clone();
        answering.fetch_add(1, Ordering::SeqCst);
        let spawned = self.shared.spawn_alone("mooncake-answer", move || {
            // Whoever does not get it asks again, or cannot be helped.
            let _told = front.notify(&session, &answer.encode(), true).is_ok();
            answering.fetch_sub(1, Ordering::SeqCst);
        });
        if spawned.is_err() {
            self.answering.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Whoever opens a connection to an engine of ours and says nothing would keep all others out.
    fn send_sitters_away(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.watched) < WATCH {
            return;
        }
        self.watched = now;
        let doors = self.doors.iter().filter_map(|door| match &door.stage {
            Stage::Open(engine) => sitters::port(engine.session()),
            Stage::Opening | Stage::Closing => None,
        });
        let ports: Vec<u16> = sitters::port(self.front.session()).into_iter().chain(doors).collect();
        let away = self.sitters.look(&ports, now);
        if away > 0 {
            self.shared.counts.sitters.add(away as u64);
            log!(
                Level::WARN,
                "{away} connections to our engines said nothing and kept others out, and were shut"
            );
        }
    }

    /// Ends everything, and says goodbye.
    fn close(mut self) {
        for known in self.links.values() {
            known.link.peer.set_gone();
        }
        for connecting in std::mem::take(&mut self.connecting) {
            connecting.fail(Error::new(ErrorCode::CLOSED, "the instance was shut down"));
        }
        for door in &mut self.doors {
            door.close(&self.shared);
        }
        // A goodbye says that nothing of theirs lands here any more, so the doors come first.
        self.wait_until(self.shared.config.fence_timeout(), |service| service.doors.is_empty());
        let proven = self.doors.is_empty();
        for front in self.fronts.values() {
            if proven {
                front.courier.say_aside(Body::Bye);
            }
            front.courier.stop();
        }
        self.wait_until(FAREWELL, |service| service.fronts.values().all(|f| f.courier.has_ended()));
    }

    /// Goes on with events alone, until something is so or the time is over.
    fn wait_until(&mut self, patience: Duration, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + patience;
        while !done(self) && Instant::now() < deadline {
            for event in self.shared.events(Duration::from_millis(1)) {
                self.take(event);
            }
        }
    }
}
