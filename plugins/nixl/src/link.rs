//! A connection on which this instance is the sender, as the driver sees it.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString};
use std::sync::Arc;
use std::time::{Duration, Instant};

use host_plugin_api::{ErrorCode, NOTIFICATION_BYTES, RegionId};
use host_transfer_kit::{Instance, LinkedInstance, reading};

use crate::capi::{Agent, Progress, Refusal, Request};
use crate::pieces::{RANGES, Scratch};
use crate::shared::Peer;

/// A message that is no notification. It tells the peer's driver, which may look for work only seldom, that data are on
/// their way. Data do not show by themselves before their end.
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
    requests: VecDeque<Request>,
    /// How it ends, once nothing more of it is posted.
    end: Option<i32>,
}

/// A connection to a receiver.
pub struct Link {
    pub peer: Arc<Peer>,
    /// Name of the agent that is the peer's inbound endpoint.
    to: CString,
    /// `None` from the first failure on.
    agent: Option<Agent>,
    /// Whether the end of a request proves that those before it are done, too.
    in_order: bool,
    /// In order of their starts, which is the order in which they are reported.
    flights: VecDeque<Flight>,
    started: u64,
    hinted: Option<Instant>,
    /// Regions to deregister, each once all submissions before a start have ended.
    letting_go: HashMap<RegionId, u64>,
}

/// Why the link is of no use any more.
pub struct Failed(pub String);

impl From<Refusal> for Failed {
    fn from(refusal: Refusal) -> Self {
        Self(refusal.to_string())
    }
}

impl Failed {
    fn write() -> Self {
        Self("a write failed".to_owned())
    }
}

impl Link {
    pub fn new(peer: Arc<Peer>, to: CString, agent: Agent, in_order: bool) -> Self {
        Self {
            peer,
            to,
            in_order,
            agent: Some(agent),
            flights: VecDeque::new(),
            started: 0,
            hinted: None,
            letting_go: HashMap::new(),
        }
    }

    pub fn is_open(&self) -> bool {
        self.agent.is_some()
    }

    pub fn has_flights(&self) -> bool {
        !self.flights.is_empty()
    }

    /// Takes a submission. A submission without writes is done when its notification is handed over. Of others nothing
    /// is posted yet.
    ///
    /// # Errors
    /// When the link has to be ended. Then nothing is left to do for the submission.
    pub fn take(&mut self, instance: &Instance<Peer>, index: u32) -> Result<(), Failed> {
        let content = instance.queue.content(index);
        if content.is_empty() {
            let message = content.notification();
            let said = match &mut self.agent {
                Some(_) if message.is_empty() => Ok(()),
                Some(agent) => agent.notify(&self.to, message).map_err(Failed::from),
                None => Err(Failed("it has ended".to_owned())),
            };
            drop(content);
            match said {
                Ok(()) => instance.succeed(index, 0),
                Err(_) => instance.queue.finish(index, ErrorCode::PEER_LOST.0, 0, None),
            }
            return said;
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

    /// Posts the next request of the oldest submission that has more to post. False when there is none.
    ///
    /// # Errors
    /// When the link has to be ended.
    pub fn post(&mut self, linked: &LinkedInstance<()>, scratch: &mut Scratch) -> Result<bool, Failed> {
        let queue = &linked.instance.queue;
        let Self { flights, agent: Some(agent), peer, to, in_order, hinted, .. } = self else {
            return Ok(false);
        };
        // The notification goes with the last request, and must not overtake the others.
        let next = |f: &&mut Flight| f.end.is_none() && (*in_order || f.requests.is_empty());
        let Some(flight) = flights.iter_mut().find(next) else { return Ok(false) };
        if queue.is_cancelled(flight.index) {
            flight.end = Some(ErrorCode::CANCELLED.0);
            return Ok(true);
        }
        let content = queue.content(flight.index);
        // A region may have gone since the submission was taken. While this guard is held, no region goes.
        let regions = reading(&linked.regions);
        let places = (regions.alive(), peer.regions.as_slice());
        let Some(piece) = scratch.describe(agent, places, content.writes(flight.writes), RANGES)? else {
            flight.end = Some(ErrorCode::INVALID_ARGUMENT.0);
            return Ok(true);
        };
        flight.writes += piece.writes;
        flight.bytes += piece.bytes;
        hint(agent, to, hinted, piece.bytes);
        let last = flight.writes == content.len();
        let message = if last { content.notification() } else { &[] };
        let (local, remote) = scratch.of(&piece);
        let (request, progress) = agent.write(local, remote, to, message)?;
        if last {
            flight.end = Some(0);
        }
        flight.requests.push_back(request);
        if progress == Progress::Failed { Err(Failed::write()) } else { Ok(true) }
    }

    /// Drives progress, and finishes submissions that are done. Returns how many.
    ///
    /// # Errors
    /// When the link has to be ended.
    pub fn advance(&mut self, instance: &Instance<Peer>) -> Result<usize, Failed> {
        let mut finished = 0;
        let Self { flights, agent: Some(agent), to, hinted, .. } = self else { return Ok(0) };
        if flights.front().is_some_and(|flight| !flight.requests.is_empty()) {
            hint(agent, to, hinted, HINTED);
        }
        while let Some(flight) = flights.front_mut() {
            while let Some(oldest) = flight.requests.front() {
                match agent.progress(oldest) {
                    Progress::Running => break,
                    Progress::Failed => return Err(Failed::write()),
                    Progress::Done => {}
                }
                if let Some(done) = flight.requests.pop_front() {
                    agent.release(done);
                }
            }
            let Some(status) = flight.end.filter(|_| flight.requests.is_empty()) else { break };
            match status {
                0 => instance.succeed(flight.index, flight.bytes),
                code => instance.queue.finish(flight.index, code, 0, None),
            }
            flights.pop_front();
            finished += 1;
        }
        // No peer sends to this agent, but a notification may still be on its way out. While a request is in flight,
        // polling it drives the notification as well.
        if flights.is_empty() {
            agent.received(|_| {})?;
        }
        Ok(finished)
    }

    /// Ends the link on this side: nothing more is read from this instance's memory, and everything in flight completes as lost.
    /// The answer says whether the peer's kernel may still have bytes that were sent. They settle when the peer's end is closed.
    pub fn end(&mut self, instance: &Instance<Peer>) -> bool {
        let agent = &mut self.agent;
        let mut any_posted = false;
        for flight in self.flights.drain(..) {
            let posted = flight.writes > 0;
            any_posted |= posted;
            for request in flight.requests {
                if let Some(agent) = agent {
                    agent.release(request);
                }
            }
            let unsettled = posted.then_some(self.peer.id);
            instance.queue.finish(flight.index, ErrorCode::PEER_LOST.0, 0, unsettled);
        }
        self.agent = None;
        any_posted
    }

    /// Marks a region for deregistration once all submissions that were started until now have ended. Later submissions
    /// cannot name it.
    pub fn let_go(&mut self, region: RegionId) {
        self.letting_go.insert(region, self.started + 1);
    }

    /// Deregisters a marked region from the agent, if it is time. False if it is not yet.
    ///
    /// # Errors
    /// When NIXL refuses.
    pub fn has_let_go(&mut self, region: RegionId) -> Result<bool, Refusal> {
        let Some(mark) = self.letting_go.get(&region) else { return Ok(true) };
        if self.flights.front().is_some_and(|flight| flight.number < *mark) {
            return Ok(false);
        }
        if let Some(agent) = &mut self.agent {
            agent.deregister(region.0)?;
        }
        self.letting_go.remove(&region);
        Ok(true)
    }
}

/// Hints to the peer that bytes are on their way, if they are many and no hint was sent a moment ago.
fn hint(agent: &mut Agent, to: &CStr, hinted: &mut Option<Instant>, bytes: u64) {
    if bytes >= HINTED && hinted.is_none_or(|at| at.elapsed() >= HINT_EVERY) {
        *hinted = Some(Instant::now());
        // A failure is ignored: the writes that follow fail, too, and report it.
        let _broken = agent.notify(to, &HINT).is_err();
    }
}
