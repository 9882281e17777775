//! The rank barrier: makes one answer of the answers of all ranks.
//!
//! The transfer threads of a worker report here, one thread per rank. Their reports become events for the scheduler,
//! which knows no ranks.
//!
//! | Event | when |
//! | --- | --- |
//! | a write has settled | on every rank |
//! | a part of a room has arrived | every lane (one rank of prefill's to one of ours) has brought all its fragments |
//! | a room's pages are verified | every rank has checked its pages |
//! | a room is closed | every rank has closed it |
//!
//! Each fragment has a number, so a fragment that is reported twice counts once, whatever reports come in between.

use std::collections::{BTreeMap, BTreeSet};

use crate::aux_row::AUX_ROW_BYTES;
use crate::heads::HeadLane;
use crate::ids::{Instance, Room};
use crate::integrity::{FoundData, LaneSum};
use crate::notice::{LaneNotice, Notice};
use crate::scheduler::{Event, RoomOpening};
use crate::transfer::Tag;

/// Most fragments of one lane in a part. A lane with more fragments is a contradiction.
const FRAGMENTS: u32 = 1 << 16;

/// A report of a rank's transfer thread.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// Nothing of a write is in flight on the rank any more.
    Settled {
        /// Which rank.
        rank: usize,
        /// Which write.
        tag: Tag,
        /// Its error, if it failed.
        error: Option<String>,
    },
    /// A fragment from a peer's rank is in the rank's pages.
    Landed {
        /// Which rank.
        rank: usize,
        /// The worker that sent it.
        peer: Instance,
        /// The fragment.
        notice: LaneNotice,
    },
    /// The rank has checked its pages: sums by the peer's rank that sent them, and from rank 0 the aux row.
    Checked {
        /// Which rank.
        rank: usize,
        /// The room.
        room: Room,
        /// The attempt within the room.
        attempt: u32,
        /// The aux row, from rank 0.
        aux_row: Option<Box<[u8; AUX_ROW_BYTES]>>,
        /// The sums.
        found: Sums,
    },
    /// The rank copies nothing into a room's pages any more.
    Closed {
        /// Which rank.
        rank: usize,
        /// The room.
        room: Room,
    },
}

/// A sum for each of a peer's ranks, or `None` when integrity is switched off.
pub type Sums = Option<Vec<(usize, u64)>>;

/// A report that contradicts earlier ones. Its event ends a request that waits for the transfer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("a part of a transfer cannot be: {reason} (room {room}, worker {peer}, rank {rank}, {notice:?})")]
pub struct Contradiction {
    /// The room.
    pub room: Room,
    /// The worker that sent the part.
    pub peer: Instance,
    /// The rank that reported it.
    pub rank: usize,
    /// The part.
    pub notice: LaneNotice,
    /// The contradiction, as text.
    pub reason: &'static str,
}

impl Contradiction {
    /// The event that tells the scheduler: no transfer has so many parts, so the scheduler ends the request.
    #[must_use]
    pub fn event(&self) -> Event {
        Event::Arrived(Notice { sequence: u32::MAX, ..self.notice.notice })
    }
}

/// The rank barrier of one worker. See the module.
#[derive(Debug)]
pub struct RankBarrier {
    ranks: usize,
    writes: BTreeMap<Tag, Settling>,
    rooms: BTreeMap<Room, OpenRoom>,
}

/// Ranks that have not settled a write.
#[derive(Debug)]
struct Settling {
    waiting: BTreeSet<usize>,
    error: Option<String>,
}

#[derive(Debug)]
struct OpenRoom {
    attempt: u32,
    peer: Instance,
    lanes: Vec<HeadLane>,
    /// Most parts of a transfer.
    parts: u32,
    arriving: BTreeMap<u32, PartArrival>,
    arrived: BTreeSet<u32>,
    /// Sums of the arrived parts, by the ranks of sender and receiver.
    sums: BTreeMap<(usize, usize), u64>,
    check: Option<Check>,
    /// Ranks that have not closed the room, once it is given up.
    closing: Option<BTreeSet<usize>>,
}

/// A part of which fragments have arrived.
#[derive(Debug)]
struct PartArrival {
    notice: Notice,
    alone: bool,
    lanes: BTreeMap<(usize, usize), LaneArrival>,
}

/// The arrived fragments of one lane of a part.
#[derive(Debug)]
struct LaneArrival {
    fragments: u32,
    sum: u64,
    landed: BTreeSet<u32>,
}

#[derive(Debug)]
struct Check {
    waiting: BTreeSet<usize>,
    aux_row: [u8; AUX_ROW_BYTES],
    /// Sums by the ranks of sender and receiver. `None` when a rank computes none, because integrity is switched off.
    found: Option<BTreeMap<(usize, usize), u64>>,
}

impl RankBarrier {
    /// A barrier of so many ranks.
    #[must_use]
    pub fn new(ranks: usize) -> Self {
        Self { ranks, writes: BTreeMap::new(), rooms: BTreeMap::new() }
    }

    fn all_ranks(&self) -> BTreeSet<usize> {
        (0..self.ranks).collect()
    }

    /// Begins to wait for a write: every rank was told to write its lanes.
    pub fn write(&mut self, tag: Tag) {
        let waiting = self.all_ranks();
        self.writes.insert(tag, Settling { waiting, error: None });
    }

    /// Opens a room: its parts may arrive over these lanes. Without a connection there are no lanes.
    pub fn open(&mut self, opening: &RoomOpening, lanes: Vec<HeadLane>) {
        let room = OpenRoom {
            attempt: opening.attempt,
            peer: opening.peer,
            lanes,
            parts: opening.parts,
            arriving: BTreeMap::new(),
            arrived: BTreeSet::new(),
            sums: BTreeMap::new(),
            check: None,
            closing: None,
        };
        self.rooms.insert(opening.room, room);
    }

    /// Begins to wait for a check: every rank was told to check a room's pages. Returns the lanes that brought them.
    pub fn verify(&mut self, room: Room) -> Vec<HeadLane> {
        let waiting = self.all_ranks();
        let Some(open) = self.rooms.get_mut(&room) else { return Vec::new() };
        open.check = Some(Check { waiting, aux_row: [0; AUX_ROW_BYTES], found: Some(BTreeMap::new()) });
        open.lanes.clone()
    }

    /// Begins to wait for the end of a room: every rank was told to close it.
    pub fn close(&mut self, room: Room) {
        let waiting = self.all_ranks();
        if let Some(open) = self.rooms.get_mut(&room) {
            open.closing = Some(waiting);
        }
    }

    /// Drops a room, whose reports do not count any more.
    pub fn forget(&mut self, room: Room) {
        self.rooms.remove(&room);
    }

    /// Takes a report. Returns the event that it completes, if any.
    ///
    /// # Errors
    /// For a report that contradicts earlier ones. The caller must tell the scheduler by [`Contradiction::event`].
    pub fn take(&mut self, report: Report) -> Result<Option<Event>, Contradiction> {
        Ok(match report {
            Report::Settled { rank, tag, error } => self.settled(rank, tag, error),
            Report::Landed { rank, peer, notice } => self.landed(rank, peer, &notice)?.map(Event::Arrived),
            Report::Checked { rank, room, attempt, aux_row, found } => {
                let open = self.rooms.get_mut(&room).filter(|open| open.attempt == attempt);
                let found = open.and_then(|open| open.checked(rank, aux_row.as_deref(), found));
                found.map(|found| Event::Verified { room, attempt, found: Box::new(found) })
            }
            Report::Closed { rank, room } => {
                let closing = self.rooms.get_mut(&room).and_then(|open| open.closing.as_mut());
                let last = closing.is_some_and(|closing| closing.remove(&rank) && closing.is_empty());
                last.then_some(Event::RoomClosed { room })
            }
        })
    }

    fn settled(&mut self, rank: usize, tag: Tag, error: Option<String>) -> Option<Event> {
        let settling = self.writes.get_mut(&tag)?;
        if settling.waiting.remove(&rank) {
            settling.error = settling.error.take().or(error);
        }
        let done = settling.waiting.is_empty();
        let settled = if done { self.writes.remove(&tag) } else { None };
        settled.map(|settled| Event::Written { tag, error: settled.error })
    }

    fn landed(
        &mut self,
        rank: usize,
        peer: Instance,
        notice: &LaneNotice,
    ) -> Result<Option<Notice>, Contradiction> {
        let room = notice.notice.room;
        let Some(open) = self.rooms.get_mut(&room) else { return Ok(None) };
        if open.peer != peer || open.attempt != notice.notice.attempt {
            return Ok(None);
        }
        open.landed(rank, notice).map_err(|reason| Contradiction {
            room,
            peer,
            rank,
            notice: *notice,
            reason,
        })
    }
}

impl OpenRoom {
    /// Takes a fragment. Returns the part if this fragment completes it.
    fn landed(&mut self, rank: usize, lane: &LaneNotice) -> Result<Option<Notice>, &'static str> {
        let between = (usize::from(lane.source), usize::from(lane.target));
        if self.lanes.is_empty() {
            // The connection was gone before the room was opened.
            return Ok(None);
        }
        if between.1 != rank || !self.lanes.iter().any(|lane| (lane.source, lane.target) == between) {
            return Err("it came over a lane that does not exist");
        }
        let notice = lane.notice;
        if notice.sequence >= self.parts {
            return Err("it has more parts than pages could make");
        }
        if self.arrived.contains(&notice.sequence) {
            return Ok(None);
        }
        let part = self.arriving.entry(notice.sequence);
        let part = part.or_insert_with(|| PartArrival { notice, alone: lane.alone, lanes: BTreeMap::new() });
        if part.notice != notice || part.alone != lane.alone {
            return Err("its ranks disagree about the part");
        }
        let arrival = part.lanes.entry(between);
        let arrival = arrival.or_insert_with(|| LaneArrival {
            fragments: lane.fragments,
            sum: lane.sum,
            landed: BTreeSet::new(),
        });
        if (arrival.fragments, arrival.sum) != (lane.fragments, lane.sum) || lane.fragments > FRAGMENTS {
            return Err("its fragments disagree about the part");
        }
        if lane.fragment >= lane.fragments {
            return Err("it has a fragment beyond its last");
        }
        arrival.landed.insert(lane.fragment);
        // A part that has the aux row alone goes from rank 0 to rank 0.
        let expected = self.lanes.iter().filter(|lane| !part.alone || (lane.source, lane.target) == (0, 0));
        let whole = |arrival: &LaneArrival| arrival.landed.len() == arrival.fragments as usize;
        if !expected.clone().all(|lane| part.lanes.get(&(lane.source, lane.target)).is_some_and(whole)) {
            return Ok(None);
        }
        for (between, arrival) in &part.lanes {
            let sum = self.sums.entry(*between).or_default();
            *sum = sum.wrapping_add(arrival.sum);
        }
        self.arriving.remove(&notice.sequence);
        self.arrived.insert(notice.sequence);
        Ok(Some(notice))
    }

    /// Takes the check of a rank. Returns the results of all ranks if this was the last one.
    fn checked(
        &mut self,
        rank: usize,
        aux_row: Option<&[u8; AUX_ROW_BYTES]>,
        sums: Sums,
    ) -> Option<FoundData> {
        let check = self.check.as_mut()?;
        if !check.waiting.remove(&rank) {
            return None;
        }
        if let Some(row) = aux_row {
            check.aux_row = *row;
        }
        match (&mut check.found, sums) {
            (Some(found), Some(sums)) => {
                found.extend(sums.into_iter().map(|(source, sum)| ((source, rank), sum)));
            }
            (found, _) => *found = None,
        }
        if !check.waiting.is_empty() {
            return None;
        }
        let Check { aux_row, found, .. } = self.check.take()?;
        let lanes = found.map(|found| {
            let lane = |lane: &HeadLane| {
                let between = (lane.source, lane.target);
                let sent = self.sums.get(&between).copied().unwrap_or(0);
                // A lane that no rank has checked counts as damaged.
                let found = found.get(&between).copied().unwrap_or(!sent);
                let rank = |rank: usize| u32::try_from(rank).unwrap_or(u32::MAX);
                LaneSum { source: rank(lane.source), target: rank(lane.target), sent, found }
            };
            self.lanes.iter().map(lane).collect()
        });
        Some(FoundData { aux_row, lanes })
    }
}

#[cfg(test)]
mod tests;
