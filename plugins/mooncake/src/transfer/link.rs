//! A connection on which this instance is the sender: an engine of its own, and the thread that feeds it.
//!
//! A submission becomes runs, of which no more than `max_outstanding` are with Mooncake at a time. When every run is in
//! the peer's memory, the peer is told. When the peer has acknowledged that, the submission completes. The first
//! failure ends the link: Mooncake goes on with runs that it was given. Only the end of the engine stops them on this
//! side, and the end of the inbound endpoint on the other.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode};
use host_transfer_kit::{Peer as _, RegionDescriptor, locked, reading};

use super::mailbox::rest;
use super::message_sender::MessageSender;
use super::runs::join;
use super::shared::{Event, Link, Shared};
use super::wire::Body;
use crate::engine::{Engine, Range, Run, State, Target, Ticket};

/// Runs that Mooncake is given in one call, between two looks at what is done.
const CHUNK: usize = 32;
/// Pause between two looks at Mooncake's work: Mooncake gives nothing to wait on.
const FLYING: Duration = Duration::from_micros(20);
/// For this long after the last progress the thread looks without a pause.
const KEEN: Duration = Duration::from_micros(100);
/// How long the thread sleeps when nothing is in flight.
const IDLE: Duration = Duration::from_millis(500);

/// A submission that Mooncake works on.
struct Flight {
    index: u32,
    runs: Vec<Run>,
    posted: usize,
    /// In the order in which they were posted.
    tickets: VecDeque<Ticket>,
    bytes: u64,
    /// Regions of this instance that it reads.
    used: Vec<RegionDescriptor>,
    cancelled: bool,
}

/// The thread's side. See the module.
pub struct Runner {
    shared: Arc<Shared>,
    link: Arc<Link>,
    sender: Arc<MessageSender>,
    engine: Box<dyn Engine>,
    target: Target,
    waiting: VecDeque<u32>,
    flights: VecDeque<Flight>,
    /// Submissions that are written, with the number of the message that told the peer.
    told: VecDeque<(u64, u32, u64)>,
    outstanding: usize,
    lively: Instant,
}

/// Runs a link on this thread, from its engine's start to its end. The end of the instance waits for the link only after it
/// has found the inbound endpoint. Before that, a stopped peer may hold the link up, but its engine knows no memory.
pub fn run(shared: Arc<Shared>, link: Arc<Link>, sender: Arc<MessageSender>, to: &str) {
    let made = shared.driver.engine().and_then(|engine| engine.open(to).map(|target| (engine, target)));
    let (engine, target) = match made {
        Ok(made) => made,
        Err(why) => {
            let text = format!(
                "the engine of {} cannot be reached: {why}; if it is on another machine, its local_hostname in \
                 [plugin.mooncake] must be an address that this one reaches",
                link.peer.name
            );
            let opened = Err(Error::new(ErrorCode::PEER_LOST, text));
            return shared.tell(Event::LinkOpened { link, opened });
        }
    };
    let _waited_for = shared.count();
    if shared.instance().is_stopping() {
        return;
    }
    shared.tell(Event::LinkOpened { link: link.clone(), opened: Ok(()) });
    let mut runner = Runner {
        shared,
        link,
        sender,
        engine,
        target,
        waiting: VecDeque::new(),
        flights: VecDeque::new(),
        told: VecDeque::new(),
        outstanding: 0,
        lively: Instant::now(),
    };
    let why = loop {
        if let Err(why) = runner.turn() {
            break why;
        }
    };
    runner.end(why);
}

impl Runner {
    /// Takes new submissions, posts runs, and looks at runs that are done.
    ///
    /// # Errors
    /// Why the link has to end.
    fn turn(&mut self) -> Result<(), String> {
        if self.link.peer.is_gone() {
            return Err("it was disconnected".to_owned());
        }
        self.link.peer.mailbox.take(&mut self.waiting);
        let mut busy = false;
        while self.outstanding < self.shared.config.max_outstanding as usize
            && let Some(index) = self.waiting.pop_front()
        {
            busy = true;
            self.start(index)?;
            self.post()?;
        }
        busy |= self.post()?;
        busy |= self.advance()?;
        self.finish_told();
        self.forget_regions()?;
        if busy {
            self.lively = Instant::now();
            self.shared.instance().announce();
        } else if self.flights.is_empty() {
            // The service wakes this thread when the peer has answered.
            rest(&self.link.peer, IDLE);
        } else if self.lively.elapsed() > KEEN {
            rest(&self.link.peer, FLYING);
        } else {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn start(&mut self, index: u32) -> Result<(), String> {
        let queue = &self.shared.instance().queue;
        if queue.is_cancelled(index) {
            queue.finish(index, ErrorCode::CANCELLED.0, 0, None);
            return Ok(());
        }
        // A region may have gone since the submission was taken. While this guard is held, no region goes.
        let regions = reading(&self.shared.linked.regions);
        let joined = join(queue.content(index).writes(0), regions.alive(), &self.link.peer.regions);
        let Some((runs, used)) = joined else {
            queue.finish(index, ErrorCode::INVALID_ARGUMENT.0, 0, None);
            return Ok(());
        };
        let new: Vec<RegionDescriptor> =
            used.iter().filter(|region| !self.link.knows(region.id)).copied().collect();
        // Noted before the guard is dropped, so that a deregistration waits for this link.
        locked(&self.link.registered).extend(&new);
        drop(regions);
        let tickets = VecDeque::new();
        self.flights.push_back(Flight { index, runs, posted: 0, tickets, bytes: 0, used, cancelled: false });
        new.iter().try_for_each(|region| self.engine.register(&[Range::of(region)]))
    }

    /// Gives Mooncake as many runs as it may have.
    fn post(&mut self) -> Result<bool, String> {
        let most = self.shared.config.max_outstanding as usize;
        let mut any = false;
        while self.outstanding < most
            && let Some(flight) = self.flights.iter_mut().find(|f| !f.cancelled && f.posted < f.runs.len())
        {
            if self.shared.instance().queue.is_cancelled(flight.index) {
                flight.cancelled = true;
                continue;
            }
            any = true;
            let rest = &flight.runs[flight.posted..];
            let chunk = &rest[..rest.len().min(CHUNK).min(most - self.outstanding)];
            let mut tickets = Vec::with_capacity(chunk.len());
            let submitted = self.engine.submit(&self.target, chunk, &mut tickets);
            let given: usize = tickets.iter().map(|ticket| ticket.runs as usize).sum();
            flight.posted += chunk.len();
            flight.bytes += chunk.iter().map(|run| run.length).sum::<u64>();
            flight.tickets.extend(tickets);
            self.outstanding += given;
            self.shared.counts.outstanding.add(given as u64);
            submitted?;
            // A long submission must not keep the thread from runs that are done.
            if rest.len() > CHUNK {
                break;
            }
        }
        Ok(any)
    }

    /// Looks at the runs that Mooncake has done, oldest first.
    fn advance(&mut self) -> Result<bool, String> {
        let mut any = false;
        while let Some(flight) = self.flights.front_mut() {
            while let Some(ticket) = flight.tickets.front_mut() {
                let state = self.engine.poll(ticket);
                if state == State::Running {
                    return Ok(any);
                }
                any = true;
                let runs = ticket.runs as usize;
                flight.tickets.pop_front();
                self.outstanding -= runs;
                self.shared.counts.outstanding.sub(runs as u64);
                if state == State::Failed {
                    return Err("a write failed".to_owned());
                }
            }
            if !flight.cancelled && flight.posted < flight.runs.len() {
                return Ok(any);
            }
            any = true;
            let (index, bytes, cancelled) = (flight.index, flight.bytes, flight.cancelled);
            self.flights.pop_front();
            if cancelled {
                self.shared.instance().queue.finish(index, ErrorCode::CANCELLED.0, 0, None);
                continue;
            }
            let payload = self.shared.instance().queue.content(index).notification().to_vec();
            if payload.is_empty() {
                self.shared.instance().succeed(index, bytes);
            } else {
                let number = self.sender.say(self.link.peer.id.0.into(), Body::Arrived { payload });
                self.told.push_back((number, index, bytes));
            }
        }
        Ok(any)
    }

    /// Completes submissions that the peer has acknowledged.
    fn finish_told(&mut self) {
        let acknowledged = self.sender.acknowledged();
        let mut any = false;
        while let Some(&(_, index, bytes)) = self.told.front().filter(|(number, ..)| *number <= acknowledged)
        {
            self.told.pop_front();
            self.shared.instance().succeed(index, bytes);
            any = true;
        }
        if any {
            self.shared.instance().announce();
        }
    }

    /// Unregisters regions from the engine that the host has deregistered and that nothing in flight reads.
    fn forget_regions(&mut self) -> Result<(), String> {
        let mut registered = locked(&self.link.registered);
        if registered.is_empty() {
            return Ok(());
        }
        let regions = reading(&self.shared.linked.regions);
        let alive = |region: &RegionDescriptor| regions.alive().iter().any(|other| other.id == region.id);
        let read = |region: &RegionDescriptor| self.flights.iter().any(|flight| flight.used.contains(region));
        let gone: Vec<RegionDescriptor> =
            registered.iter().filter(|region| !alive(region) && !read(region)).copied().collect();
        for region in gone {
            self.engine.unregister(&[Range::of(&region)])?;
            registered.retain(|other| *other != region);
        }
        Ok(())
    }

    /// Completes everything as lost, and ends the engine.
    fn end(mut self, why: String) {
        let (shared, link) = (self.shared.clone(), self.link.clone());
        let queue = &shared.instance().queue;
        let peer = &link.peer;
        peer.set_gone();
        peer.mailbox.close(&mut self.waiting);
        let posted = |flight: &Flight| flight.posted > 0;
        let unsettled = !self.told.is_empty() || self.flights.iter().any(posted);
        for index in self.waiting.drain(..) {
            queue.finish(index, ErrorCode::PEER_LOST.0, 0, None);
        }
        for flight in self.flights.drain(..) {
            let peer = posted(&flight).then_some(peer.id);
            queue.finish(flight.index, ErrorCode::PEER_LOST.0, 0, peer);
        }
        for (_, index, _) in self.told.drain(..) {
            queue.finish(index, ErrorCode::PEER_LOST.0, 0, Some(peer.id));
        }
        shared.counts.outstanding.sub(self.outstanding as u64);
        let id = peer.id.0;
        shared.tell(Event::LinkFailed { id, why });
        shared.instance().announce();
        // From here on nothing of this instance's memory is read.
        drop(self.engine);
        locked(&link.registered).clear();
        shared.tell(Event::LinkEnded { id, unsettled });
    }
}
