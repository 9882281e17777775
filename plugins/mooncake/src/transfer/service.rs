//! The service thread: it reads the messages of the other instances, and keeps the books of connections. It makes no
//! call into Mooncake that could take long.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Level, log};
use host_transfer_kit::connections::{Connection, Settings};
use host_transfer_kit::wire::Message;
use host_transfer_kit::{Connections, Random};

use super::engines::{Engines, MAX_PEERS};
use super::shared::{Event, Shared};
use super::wire::{Body, Frame};
use crate::engine::Engine;
use crate::engine::idle_connections::Watch;

/// How often a peer that has taken the request is told again to close an inbound endpoint.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// How often the service looks for messages at first, and until how long after one came.
const KEEN: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(5));
/// How often it looks after that, and until how long after one came.
const LIVELY: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(200));
/// How often it looks when nothing happens.
const DROWSY: Duration = Duration::from_millis(1);
/// How often work that waits for a time is looked at.
const TICK: Duration = Duration::from_millis(1);
/// How often the service looks for idle connections to the engines of this instance.
const WATCH: Duration = Duration::from_millis(250);
/// Most strangers that are turned away at the same time. More are left without an answer.
const ANSWERS: usize = 8;
/// How long goodbyes may take.
const FAREWELL: Duration = Duration::from_millis(500);

/// The state of the service thread.
pub struct Service {
    shared: Arc<Shared>,
    connections: Connections<Engines>,
    answering: Arc<AtomicUsize>,
    lively: Instant,
    ticked: Instant,
    idle_connections: Watch,
    watched: Instant,
}

impl Service {
    pub fn new(shared: Arc<Shared>, front: Arc<dyn Engine>, token: Random) -> Self {
        let now = Instant::now();
        let settings = Settings {
            max_peers: MAX_PEERS,
            connect_timeout: shared.config.connect_timeout(),
            fence_timeout: shared.config.fence_timeout(),
            ask_again: ASK_AGAIN,
        };
        let engines = Engines::new(shared.clone(), front);
        let connections = Connections::new(engines, shared.linked.clone(), settings, token);
        let (answering, idle_connections) = (Arc::default(), Watch::default());
        Self { shared, connections, answering, lively: now, ticked: now, idle_connections, watched: now }
    }

    /// Runs until the instance is shut down.
    pub fn run(mut self) {
        while !self.shared.instance().is_stopping() {
            let quiet = self.lively.elapsed();
            let wait = match () {
                () if quiet < KEEN.1 => KEEN.0,
                () if quiet < LIVELY.1 => LIVELY.0,
                () => DROWSY,
            };
            let events = self.shared.events(wait);
            let texts = self.connections.transport.front.messages();
            if !events.is_empty() || !texts.is_empty() {
                self.lively = Instant::now();
            }
            for event in events {
                self.take(event);
            }
            for text in texts {
                match Frame::decode(&text) {
                    Ok(frame) => self.hear(frame),
                    // Any process can send anything to this instance.
                    Err(error) => log!(Level::DEBUG, "a message was dropped: {error}"),
                }
            }
            if self.ticked.elapsed() >= TICK {
                self.ticked = Instant::now();
                self.keep_time();
            }
            self.close_idle_connections();
            self.shared.instance().announce();
        }
        self.close();
    }

    fn take(&mut self, event: Event) {
        let connections = &mut self.connections;
        match event {
            Event::Connections(request) => connections.request(request),
            Event::LinkOpened { link, opened } => {
                let id = link.peer.id;
                connections.link_opened(id.0, opened);
                // Unless the link is not wanted any more.
                if self.shared.instance().peers.get(id).is_some() {
                    connections.transport.links.insert(id.0, link);
                }
            }
            Event::LinkFailed { id, why } => connections.link_failed(id, &why),
            Event::LinkEnded { id, unsettled } => connections.link_ended(id, unsettled),
            Event::InboundOpened { connection, opened: Ok(engine) } => {
                let address = engine.session().as_bytes().to_vec();
                connections.transport.inbound.insert(connection, engine);
                connections.inbound_opened(connection, Ok(address));
            }
            Event::InboundOpened { connection, opened: Err(why) } => {
                connections.inbound_opened(connection, Err(Error::new(ErrorCode::IO, why)));
            }
            Event::InboundClosed { connection } => connections.inbound_closed(connection),
            Event::Refused { instance } => connections.lose(instance, "no process listens at its address"),
        }
    }

    /// Handles a frame: in order, once, and from known instances only.
    fn hear(&mut self, frame: Frame) {
        let stranger = frame.to != self.shared.id;
        let hello = matches!(frame.body, Body::Connection(Message::Hello { .. }));
        if frame.body == Body::Stranger {
            // It is addressed to this instance, or to an earlier one at this address that is gone.
            if !stranger {
                self.connections.lose(frame.from, "it does not know us any more");
            }
            return;
        }
        if stranger || (!hello && !self.connections.transport.fronts.contains_key(&frame.from)) {
            if frame.number > 0 {
                self.turn_away(&frame);
            }
            return;
        }
        self.notice_new_beginning(&frame, hello);
        if !self.connections.transport.fronts.contains_key(&frame.from) {
            // Inbound endpoints of a connection that the peer has lost are reported as closed before the next
            // connection begins. The peer asks again. If the peer cannot be answered, its call times out.
            let closing = self.connections.has_inbound_of(frame.from);
            if !hello
                || closing
                || self.connections.transport.learn_front(frame.from, &frame.session).is_err()
            {
                return;
            }
        }
        // Whether an arrival cannot be taken now: the sender then repeats it, or hears that the inbound endpoint is closed.
        let connection = Connection { instance: frame.from, number: frame.connection };
        let ending = || self.connections.is_inbound_open(connection) == Some(false);
        let untaken = matches!(frame.body, Body::Arrived { .. })
            && (self.shared.instance().notifications.is_full() || ending());
        let engines = &mut self.connections.transport;
        let Some(front) = engines.fronts.get_mut(&frame.from) else { return };
        front.spoke = Instant::now();
        if front.sender.note_acknowledged(frame.heard) {
            engines.wake_links_to(frame.from);
        }
        let Some(front) = engines.fronts.get_mut(&frame.from) else { return };
        if frame.number > 0 {
            let (stream, last) = front.heard;
            // A stream that is new to this entry may have begun before this instance, or this entry, did.
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
            front.sender.note_heard(front.heard);
            if !expected {
                return;
            }
        }
        self.handle(frame);
    }

    /// Loses an instance that has lost this one and begins anew. It may have seen silence, or a refusal, that this
    /// instance did not see. It would not know how the old stream goes on.
    fn notice_new_beginning(&mut self, frame: &Frame, hello: bool) {
        let fronts = &self.connections.transport.fronts;
        let Some((stream, _)) = fronts.get(&frame.from).map(|front| front.heard) else { return };
        // Without a connection to the instance nothing is lost: it may only have forgotten this one.
        if stream > 0 && frame.stream > stream && (hello || self.connections.is_concerned_with(frame.from)) {
            self.connections.lose(frame.from, "it has lost us, and begins anew");
        }
    }

    fn handle(&mut self, frame: Frame) {
        let Frame { from, connection: number, body, .. } = frame;
        match body {
            Body::Connection(message) => self.connections.hear(from, number, message),
            Body::Arrived { payload } => {
                let connection = Connection { instance: from, number };
                // Arrivals through a closed inbound endpoint do not count: they were taken back from the sender.
                let open = self.connections.is_inbound_open(connection) == Some(true);
                if let Some(sender) = self.connections.sender(connection).filter(|_| open) {
                    self.shared.instance().notifications.arrived(sender, &payload);
                }
            }
            Body::Ping | Body::Heard | Body::Stranger => {}
        }
    }

    /// Tells the sender of a frame that it means another instance, or relies on state that this instance has forgotten.
    fn turn_away(&self, frame: &Frame) {
        // The sender's writes may still come through an inbound endpoint until that is closed. The sender asks again.
        if self.connections.has_inbound_of(frame.from) {
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
        let (front, session) = (self.connections.transport.front.clone(), frame.session.clone());
        let answering = self.answering.clone();
        answering.fetch_add(1, Ordering::SeqCst);
        let spawned = self.shared.spawn_alone("mooncake-answer", move || {
            // A failure is ignored: a sender without the answer asks again, or is gone.
            let _told = front.notify(&session, &answer.encode(), true).is_ok();
            answering.fetch_sub(1, Ordering::SeqCst);
        });
        if spawned.is_err() {
            self.answering.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn keep_time(&mut self) {
        self.connections.keep_time();
        for instance in self.connections.transport.silent() {
            let concerned = self.connections.is_concerned_with(instance);
            self.connections.transport.ask_or_forget(instance, concerned);
        }
    }

    /// Closes idle connections to the engines of this instance, which would keep all others out.
    fn close_idle_connections(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.watched) < WATCH {
            return;
        }
        self.watched = now;
        let closed = self.idle_connections.look(&self.connections.transport.ports(), now);
        if closed > 0 {
            self.shared.counts.idle_connections.add(closed as u64);
            log!(
                Level::WARN,
                "{closed} connections to our engines said nothing and kept others out, and were shut"
            );
        }
    }

    /// Ends everything, and says goodbye.
    fn close(mut self) {
        self.connections.close();
        // A goodbye says that nothing of the peer lands here any more, so the inbound endpoints are closed first.
        self.wait_until(self.shared.config.fence_timeout(), |connections| !connections.has_inbound());
        let proven = !self.connections.has_inbound();
        for front in self.connections.transport.fronts.values() {
            if proven {
                front.sender.say_once(Body::Connection(Message::Bye));
            }
            front.sender.stop();
        }
        self.wait_until(FAREWELL, |connections| {
            connections.transport.fronts.values().all(|front| front.sender.has_ended())
        });
    }

    /// Handles only events, until `done` is true or the time is over.
    fn wait_until(&mut self, patience: Duration, done: impl Fn(&Connections<Engines>) -> bool) {
        let deadline = Instant::now() + patience;
        while !done(&self.connections) && Instant::now() < deadline {
            for event in self.shared.events(Duration::from_millis(1)) {
                self.take(event);
            }
        }
    }
}
