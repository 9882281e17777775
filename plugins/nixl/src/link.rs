//! A connection on which we are the sender, as the driver sees it.

use std::collections::VecDeque;
use std::ffi::CString;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use host_plugin_api::{ErrorCode, Write};

use crate::capi::{Agent, Progress, Ranges, Refusal, Request};
use crate::regions::{Card, source, target};
use crate::shared::{Peer, Shared};

/// A submission that NIXL works on.
struct Flight {
    index: u32,
    /// Its place in the order of starts.
    number: u64,
    bytes: u64,
    request: Request,
}

/// See the module.
pub struct Link {
    pub peer: Arc<Peer>,
    /// Name of the door's agent.
    door: CString,
    /// `None` from the first failure on.
    agent: Option<Agent>,
    /// In order of their starts, which is about the order in which they end.
    flights: VecDeque<Flight>,
    started: u64,
    /// Something was in flight when the agent ended: the peer must say that the door is closed.
    pub unsettled: bool,
    /// When the peer was last asked to close the door.
    pub asked: Option<Instant>,
    /// The host knows that the link has ended.
    pub told: bool,
}

/// What became of a start.
enum Start {
    Begun(Request, Progress),
    /// There was nothing to write.
    Done,
    /// A write leaves its region.
    Refused,
    /// The link is of no use any more; nothing was started.
    Failed,
}

/// A run of bytes: where from, where to, how many.
type Run = (u64, u64, usize);

impl Link {
    pub fn new(peer: Arc<Peer>, door: CString, agent: Agent) -> Self {
        let flights = VecDeque::new();
        Self {
            peer,
            door,
            agent: Some(agent),
            flights,
            started: 0,
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

    /// Starts a submission; one without writes is done when its notification is handed over. False when the link failed and has to be ended; nothing is left to do for the submission.
    pub fn start(&mut self, shared: &Shared, index: u32, lists: &mut (Ranges, Ranges)) -> bool {
        let content = shared.queue.content(index);
        let bytes = content.writes.iter().map(|write| u64::from(write.length)).sum();
        let message = &content.submission.notification[..content.submission.notification_length as usize];
        let started = match &mut self.agent {
            None => Start::Failed,
            Some(agent) if content.writes.is_empty() => match message.is_empty() {
                false if agent.notify(&self.door, message).is_err() => Start::Failed,
                _ => Start::Done,
            },
            Some(agent) => {
                // A region may have gone since the submission was taken. While we look, none goes.
                let regions = shared.regions.read().unwrap_or_else(PoisonError::into_inner);
                match describe(agent, regions.alive(), &self.peer.regions, &content.writes, lists) {
                    Ok(false) => Start::Refused,
                    Ok(true) => match agent.write(&lists.0, &lists.1, &self.door, message) {
                        Ok((request, progress)) => Start::Begun(request, progress),
                        Err(_disconnected) => Start::Failed,
                    },
                    Err(_out_of_memory) => Start::Failed,
                }
            }
        };
        drop(content);
        match (started, &mut self.agent) {
            (Start::Begun(request, Progress::Done), Some(agent)) => {
                agent.release(request);
                shared.finish(index, bytes);
            }
            (Start::Begun(request, progress), _) => {
                self.started += 1;
                self.flights.push_back(Flight { index, number: self.started, bytes, request });
                return progress == Progress::Running;
            }
            (Start::Done, _) => shared.finish(index, 0),
            (Start::Refused, _) => shared.queue.finish(index, ErrorCode::INVALID_ARGUMENT.0, 0, None),
            (Start::Failed, _) => {
                shared.queue.finish(index, ErrorCode::PEER_LOST.0, 0, None);
                return false;
            }
        }
        true
    }

    /// Drives progress, and finishes what is done: how many, or nothing when the link failed.
    pub fn advance(&mut self, shared: &Shared) -> Option<usize> {
        let mut finished = 0;
        while let (Some(flight), Some(agent)) = (self.flights.front(), &mut self.agent) {
            match agent.progress(&flight.request) {
                Progress::Running => break,
                Progress::Failed => return None,
                Progress::Done => {}
            }
            if let Some(flight) = self.flights.pop_front() {
                agent.release(flight.request);
                shared.finish(flight.index, flight.bytes);
                finished += 1;
            }
        }
        // Also when nothing is in flight: a notification may still be on its way out. Nobody sends to this agent.
        if let Some(agent) = &mut self.agent
            && agent.received(|_| {}).is_err()
        {
            return None;
        }
        Some(finished)
    }

    /// Ends the link on this side: nothing more is read from our memory, and everything in flight completes as lost. The
    /// peer's kernel may still have bytes that were sent; they settle when its door is closed.
    pub fn end(&mut self, shared: &Shared) {
        self.peer.set_gone();
        self.unsettled |= self.has_flights();
        for flight in self.flights.drain(..) {
            if let Some(agent) = &mut self.agent {
                agent.release(flight.request);
            }
            shared.queue.finish(flight.index, ErrorCode::PEER_LOST.0, 0, Some(self.peer.id));
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

    /// Takes a region back from the agent.
    pub fn forget_region(&mut self, region: u32) -> Result<(), Refusal> {
        self.agent.as_mut().map_or(Ok(()), |agent| agent.deregister(region))
    }
}

/// Puts the writes into the two lists, neighbours joined; false when one leaves its region.
fn describe(
    agent: &mut Agent,
    ours: &[Card],
    theirs: &[Card],
    writes: &[Write],
    (local, remote): &mut (Ranges, Ranges),
) -> Result<bool, Refusal> {
    local.clear()?;
    remote.clear()?;
    let mut add = |(from, to, length): Run| local.add(from, length).and_then(|()| remote.add(to, length));
    let mut open: Option<Run> = None;
    let mut regions = (0, 0);
    for write in writes {
        if write.source_region != regions.0 {
            // An agent learns of a region when it first sends from it.
            let card = ours.iter().find(|card| card.id == write.source_region);
            if let Some(card) = card.filter(|card| !agent.has_registered(card.id)) {
                agent.register(card.id, card.address, card.length)?;
            }
        }
        let (Some(from), Some(to)) = (source(ours, write), target(theirs, write)) else { return Ok(false) };
        let length = write.length as usize;
        // Regions that touch by accident are two to NIXL.
        let same = regions == (write.source_region, write.target_region);
        regions = (write.source_region, write.target_region);
        match &mut open {
            Some(run) if same && run.0 + run.2 as u64 == from && run.1 + run.2 as u64 == to => {
                run.2 += length;
            }
            _ => {
                if let Some(run) = open.replace((from, to, length)) {
                    add(run)?;
                }
            }
        }
    }
    open.map_or(Ok(true), |run| add(run).map(|()| true))
}
