//! A connection on which we are the sender, as the driver sees it.

mod prepared;

use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use host_plugin_api::{ErrorCode, NOTIFICATION_BYTES};
use prepared::{OfList, PreparedLists};

use crate::capi::{Agent, Progress, Refusal, Request};
use crate::lists::List;
use crate::pieces::{Piece, RANGES, Scratch};
use crate::regions::Card;
use crate::shared::{Peer, Shared};

/// A message that is no notification: it tells the peer's driver, which may be drowsy, that data are on their way. They do
/// not show by themselves before their end.
const HINT: [u8; NOTIFICATION_BYTES + 1] = [0; NOTIFICATION_BYTES + 1];
/// Requests of fewer bytes fit into the kernel's buffers, and their own notification says enough.
const HINTED: u64 = 64 << 10;
/// How long a hint is good for.
const HINT_EVERY: Duration = Duration::from_millis(5);

/// A submission that NIXL works on, request by request.
struct Flight {
    index: u32,
    /// Its place in the order of starts.
    number: u64,
    /// Writes that were posted, and their bytes.
    writes: usize,
    bytes: u64,
    /// In the order of their posts, which is the order in which they end.
    requests: VecDeque<Posted>,
    /// How it ends, once nothing more of it is posted.
    end: Option<i32>,
}

/// A request that runs.
struct Posted {
    request: Request,
    /// The prepared list it was made of, and the places in it.
    made_of: Option<(u64, Box<[i32]>)>,
}

/// What the next request is made of.
enum Next<'a> {
    Listed(OfList<'a>, &'a [i32]),
    Described(Piece),
}

/// See the module.
pub struct Link {
    pub peer: Arc<Peer>,
    /// Name of the door's agent.
    door: CString,
    /// `None` from the first failure on.
    agent: Option<Agent>,
    /// A request that is done says that those before it are, too.
    in_order: bool,
    /// In order of their starts, which is the order in which they are reported.
    flights: VecDeque<Flight>,
    started: u64,
    prepared: PreparedLists,
    hinted: Option<Instant>,
    /// Something was in flight when the agent ended: the peer must say that the door is closed.
    pub unsettled: bool,
    /// When the peer was last asked to close the door.
    pub asked: Option<Instant>,
    /// The host knows that the link has ended.
    pub told: bool,
}

/// The link is of no use any more.
pub struct Failed;

impl From<Refusal> for Failed {
    fn from(_: Refusal) -> Self {
        Self
    }
}

impl Link {
    pub fn new(peer: Arc<Peer>, door: CString, agent: Agent, in_order: bool) -> Self {
        Self {
            peer,
            door,
            in_order,
            agent: Some(agent),
            flights: VecDeque::new(),
            started: 0,
            prepared: PreparedLists::default(),
            hinted: None,
            unsettled: false,
            asked: None,
            told: false,
        }
    }

    pub fn is_open(&self) -> bool {
        self.agent.is_some()
    }

    pub fn has_flights(&self) -> bool {
        !self.flights.is_empty()
    }

    /// Takes a submission. One without writes is done when its notification is handed over; of others nothing is posted
    /// yet.
    ///
    /// # Errors
    /// When the link has to be ended; nothing is left to do for the submission.
    pub fn take(&mut self, shared: &Shared, index: u32) -> Result<(), Failed> {
        let content = shared.queue.content(index);
        if content.is_empty() {
            let message = content.message();
            let said = match &mut self.agent {
                Some(agent) => message.is_empty() || agent.notify(&self.door, message).is_ok(),
                None => false,
            };
            drop(content);
            if !said {
                shared.queue.finish(index, ErrorCode::PEER_LOST.0, 0, None);
                return Err(Failed);
            }
            shared.finish(index, 0);
            return Ok(());
        }
        drop(content);
        self.started += 1;
        let requests = VecDeque::with_capacity(4);
        self.flights.push_back(Flight {
            index,
            number: self.started,
            writes: 0,
            bytes: 0,
            requests,
            end: None,
        });
        Ok(())
    }

    /// Posts the next request of the oldest submission that has more to post; false when there is none.
    ///
    /// # Errors
    /// When the link has to be ended.
    pub fn post(&mut self, shared: &Shared, scratch: &mut Scratch) -> Result<bool, Failed> {
        let Self { flights, agent: Some(agent), prepared, peer, door, in_order, hinted, .. } = self else {
            return Ok(false);
        };
        // The notification goes with the last request, and must not overtake the others.
        let next = |f: &&mut Flight| f.end.is_none() && (*in_order || f.requests.is_empty());
        let Some(flight) = flights.iter_mut().find(next) else { return Ok(false) };
        if shared.queue.is_cancelled(flight.index) {
            flight.end = Some(ErrorCode::CANCELLED.0);
            return Ok(true);
        }
        let content = shared.queue.content(flight.index);
        // A region may have gone since the submission was taken. While we look, none goes.
        let regions = shared.regions.read().unwrap_or_else(PoisonError::into_inner);
        let next = match content.list.as_ref().and_then(|list| prepared.of(list.id)) {
            Some(list) => {
                let places = &content.places[flight.writes..];
                let places = &places[..places.len().min(RANGES)];
                let bytes = list.bytes(places, regions.alive());
                bytes.map(|bytes| (places.len(), bytes, Next::Listed(list, places)))
            }
            None => {
                let cards = (regions.alive(), peer.regions.as_slice());
                let piece = scratch.describe(agent, cards, content.writes(flight.writes), (RANGES, true))?;
                piece.map(|piece| (piece.writes, piece.bytes, Next::Described(piece)))
            }
        };
        let Some((writes, bytes, next)) = next else {
            flight.end = Some(ErrorCode::INVALID_ARGUMENT.0);
            return Ok(true);
        };
        flight.writes += writes;
        flight.bytes += bytes;
        hint(agent, door, hinted, bytes);
        let last = flight.writes == content.len();
        let message = if last { content.message() } else { &[] };
        let (posted, progress) = match next {
            Next::Listed(list, places) => list.post(agent, places, message)?,
            Next::Described(piece) => {
                let (local, remote) = scratch.of(&piece);
                let (request, progress) = agent.write(local, remote, door, message)?;
                (Posted { request, made_of: None }, progress)
            }
        };
        if last {
            flight.end = Some(0);
        }
        flight.requests.push_back(posted);
        if progress == Progress::Failed { Err(Failed) } else { Ok(true) }
    }

    /// Drives progress, and finishes what is done: how many.
    ///
    /// # Errors
    /// When the link has to be ended.
    pub fn advance(&mut self, shared: &Shared) -> Result<usize, Failed> {
        let mut finished = 0;
        let Self { flights, agent: Some(agent), prepared, door, hinted, .. } = self else { return Ok(0) };
        if flights.front().is_some_and(|flight| !flight.requests.is_empty()) {
            hint(agent, door, hinted, HINTED);
        }
        while let Some(flight) = flights.front_mut() {
            while let Some(oldest) = flight.requests.front() {
                match agent.progress(&oldest.request) {
                    Progress::Running => break,
                    Progress::Failed => return Err(Failed),
                    Progress::Done => {}
                }
                if let Some(posted) = flight.requests.pop_front() {
                    prepared.keep(agent, posted);
                }
            }
            let Some(status) = flight.end.filter(|_| flight.requests.is_empty()) else { break };
            match status {
                0 => shared.finish(flight.index, flight.bytes),
                code => shared.queue.finish(flight.index, code, 0, None),
            }
            flights.pop_front();
            finished += 1;
        }
        // Nobody sends to this agent, but a notification may still be on its way out. While something is in flight, asking
        // after it drives that as well.
        if flights.is_empty() {
            agent.received(|_| {})?;
        }
        Ok(finished)
    }

    /// Has NIXL look a list up, for requests that are made of it. One that mixes kinds of memory stays as it is, and is
    /// described each time that it is posted.
    ///
    /// # Errors
    /// When NIXL refuses, which is about this list and no more.
    pub fn prepare(&mut self, ours: &[Card], list: Arc<List>, scratch: &mut Scratch) -> Result<(), Refusal> {
        let Some(agent) = &mut self.agent else { return Ok(()) };
        let cards = (ours, self.peer.regions.as_slice());
        let described = scratch.describe(agent, cards, list.writes.iter().copied(), (usize::MAX, false))?;
        let Some(piece) = described.filter(|p| p.writes > 0 && p.writes == list.writes.len()) else {
            return Ok(());
        };
        let (local, remote) = scratch.of(&piece);
        let local = agent.prepare(None, local)?;
        match agent.prepare(Some(&self.door), remote) {
            Ok(remote) => {
                self.prepared.insert(list, local, remote);
                Ok(())
            }
            Err(refusal) => {
                agent.release_prepared(local);
                Err(refusal)
            }
        }
    }

    /// Forgets a prepared list. What runs of it goes on.
    pub fn release(&mut self, list: u64) {
        if let Some(agent) = &mut self.agent {
            self.prepared.remove(agent, list);
        }
    }

    /// Ends the link on this side: nothing more is read from our memory, and everything in flight completes as lost. The
    /// peer's kernel may still have bytes that were sent; they settle when its door is closed.
    pub fn end(&mut self, shared: &Shared) {
        self.peer.set_gone();
        let agent = &mut self.agent;
        for flight in self.flights.drain(..) {
            let posted = flight.writes > 0;
            self.unsettled |= posted;
            for Posted { request, .. } in flight.requests {
                if let Some(agent) = agent {
                    agent.release(request);
                }
            }
            let unsettled = posted.then_some(self.peer.id);
            shared.queue.finish(flight.index, ErrorCode::PEER_LOST.0, 0, unsettled);
        }
        if let Some(agent) = agent {
            self.prepared.clear(agent);
        }
        self.agent = None;
    }

    /// Nothing of ours can land at the peer any more.
    pub fn settle(&mut self, shared: &Shared) {
        self.unsettled = false;
        shared.queue.settle(self.peer.id);
    }

    /// The number that the next start gets; see [`has_ended_before`](Self::has_ended_before).
    pub fn mark(&self) -> u64 {
        self.started + 1
    }

    /// Whether everything that was started before a mark has ended.
    pub fn has_ended_before(&self, mark: u64) -> bool {
        self.flights.front().is_none_or(|flight| flight.number >= mark)
    }

    /// Takes a region back from the agent, with what was prepared of it.
    pub fn forget_region(&mut self, region: u32) -> Result<(), Refusal> {
        let Some(agent) = &mut self.agent else { return Ok(()) };
        self.prepared.remove_reading(agent, region);
        agent.deregister(region)
    }
}

/// Says that so many bytes are on their way, unless that was said a moment ago.
fn hint(agent: &mut Agent, door: &CStr, hinted: &mut Option<Instant>, bytes: u64) {
    if bytes >= HINTED && hinted.is_none_or(|at| at.elapsed() >= HINT_EVERY) {
        *hinted = Some(Instant::now());
        // A connection that does not take it does not take what follows, which says so.
        let _broken = agent.notify(door, &HINT).is_err();
    }
}
