//! A source rank's staging memory: when which pieces are asked for, gathered and written.
//!
//! Each target rank is asked for few pieces ahead ([`asking`]). Granted pieces are gathered in the order of their
//! grants, as far as own slots go. A target whose wire is slow holds at most twice as many bytes as are left to others.

mod action;
mod asking;
mod gathering;
mod lane;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::message::{Answer, Ask, Verdict};
use super::round_trip::LONGEST;
use super::slots::Slots;
use super::{Key, PeerRank, Span};
use crate::ids::{Instance, Room, Time};
use crate::transfer::Tag;
pub use action::{Action, Gather, SenderStats, Written};
use asking::Asking;
pub use lane::{Fault, LaneError, StagedLane, Target};
use lane::{State, Work};

/// Most targets whose round trips are remembered while nothing is sent to them.
const IDLE_TARGETS: usize = 256;

type PieceOf = (u64, u16);

/// The staging of a sending rank. See the module.
#[derive(Debug)]
pub struct Sender {
    slots: Slots,
    lanes: BTreeMap<u64, Work>,
    by_key: BTreeMap<(Room, u32, u32, PeerRank), u64>,
    targets: BTreeMap<Target, Asking>,
    /// When questions are to be repeated.
    due: BTreeSet<(Time, PieceOf)>,
    /// Granted pieces without an own slot.
    ready: VecDeque<PieceOf>,
    /// Pieces being gathered or written, by the id that the caller knows.
    in_hand: BTreeMap<u64, PieceOf>,
    last_id: u64,
    /// Own slots given out so far.
    gathers: u64,
    /// The first piece for which there was no gap, and the value of `gathers` then.
    denied: Option<(PieceOf, u64)>,
    claimed: bool,
    stats: SenderStats,
}

impl Sender {
    /// A sender with so many bytes of memory.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self {
            slots: Slots::new(bytes),
            lanes: BTreeMap::new(),
            by_key: BTreeMap::new(),
            targets: BTreeMap::new(),
            due: BTreeSet::new(),
            ready: VecDeque::new(),
            in_hand: BTreeMap::new(),
            last_id: 0,
            gathers: 0,
            denied: None,
            claimed: false,
            stats: SenderStats::default(),
        }
    }

    /// Takes a lane on, which ends in exactly one [`Action::Ended`]. A lane without pieces ends at once.
    ///
    /// # Errors
    /// When it cannot be staged. Nothing was begun then.
    pub fn add(&mut self, now: Time, lane: StagedLane, actions: &mut Vec<Action>) -> Result<(), LaneError> {
        let most = self.slots.capacity() / 4;
        if lane.pieces.len() >= usize::from(u16::MAX) {
            return Err(LaneError::TooMany(lane.pieces.len()));
        }
        let fits = |span: &&Span| span.bytes == 0 || Slots::size_of(u64::from(span.bytes)) > most;
        if let Some(span) = lane.pieces.iter().find(fits) {
            return Err(LaneError::PieceBytes(span.bytes, self.slots.capacity()));
        }
        let (target, room) = (lane.target, lane.room);
        let key = (room, lane.attempt, lane.sequence, target.peer_rank());
        if self.by_key.contains_key(&key) {
            return Err(LaneError::Repeated(lane.sequence, room));
        }
        if lane.pieces.is_empty() {
            actions.push(Action::Ended { tag: lane.tag, target, fault: None });
            return Ok(());
        }
        self.last_id += 1;
        let id = self.last_id;
        self.by_key.insert(key, id);
        self.lanes.insert(id, Work::new(lane));
        if self.targets.len() > IDLE_TARGETS {
            self.targets.retain(|_, asking| !asking.idle());
        }
        self.targets.entry(target).or_default().add(room, id);
        self.ask(now, target, actions);
        Ok(())
    }

    /// Takes the answer of a ring.
    pub fn heard(&mut self, now: Time, from: PeerRank, answer: &Answer, actions: &mut Vec<Action>) {
        let Key { room, attempt, sequence, piece } = answer.key;
        let Some(id) = self.by_key.get(&(room, attempt, sequence, from)).copied() else { return };
        let Some(work) = self.lanes.get_mut(&id) else { return };
        let (target, target_bytes) = (work.lane.target, work.lane.target_bytes);
        let state = work.state(piece);
        if let State::Asked { at, due, repeat, wait, answered } = state {
            // Only the first answer counts as a round trip: after it, a grant comes when there is a slot.
            if repeat == answer.repeat
                && !answered
                && let Some(asking) = self.targets.get_mut(&target)
            {
                asking.round_trip.measured(now.since(at));
            }
            if answer.verdict == Verdict::Wait {
                work.set(piece, State::Asked { at, due, repeat, wait, answered: true });
                return;
            }
            self.due.remove(&(due, (id, piece)));
        }
        match (state, answer.verdict) {
            (State::Asked { .. }, Verdict::Grant { offset, generation }) => {
                let length = u64::from(work.span(piece).map_or(0, |span| span.bytes));
                work.set(piece, State::Granted { offset, generation });
                if offset.checked_add(length).is_none_or(|end| end > target_bytes) {
                    self.fail(now, id, Fault::Outside, actions);
                    return;
                }
                self.ready.push_back((id, piece));
            }
            (State::Asked { .. }, Verdict::Done) => {
                work.set(piece, State::Over);
                self.credit(target, room);
                self.ask(now, target, actions);
                self.finish(id, actions);
            }
            (State::Asked { .. }, Verdict::Refused(refusal)) => {
                // The piece's deadline was removed above, so `fail` finds none.
                self.fail(now, id, Fault::Refused(refusal), actions);
            }
            // Late answers, and answers to repeats.
            _ => {}
        }
    }

    /// Takes note that a write has ended: nothing of it is in flight any more.
    pub fn settled(&mut self, now: Time, write: u64, error: Option<String>, actions: &mut Vec<Action>) {
        let Some((id, piece)) = self.in_hand.remove(&write) else { return };
        let Some(work) = self.lanes.get(&id) else { return };
        let State::Writing { slot } = work.state(piece) else { return };
        match error {
            None => {
                self.stats.pieces += 1;
                self.stats.bytes += u64::from(work.span(piece).map_or(0, |span| span.bytes));
                self.over(id, piece, slot);
                self.finish(id, actions);
            }
            Some(error) => {
                self.over(id, piece, slot);
                self.fail(now, id, Fault::Write(error), actions);
            }
        }
    }

    /// Stops a part. It ends when nothing of it is in flight any more.
    pub fn cancel(&mut self, now: Time, tag: Tag, actions: &mut Vec<Action>) {
        self.fail_all(now, Fault::Cancelled, |lane| lane.tag == tag, actions);
    }

    /// Fails all lanes of a connection that is gone. Its writes settle by themselves.
    pub fn peer_lost(&mut self, now: Time, peer: Instance, session: u64, actions: &mut Vec<Action>) {
        let lost = |target: &Target| target.peer == peer && target.session == session;
        self.fail_all(now, Fault::PeerLost, |lane| lost(&lane.target), actions);
        self.targets.retain(|target, asking| !lost(target) || !asking.idle());
    }

    fn fail_all(
        &mut self,
        now: Time,
        fault: Fault,
        which: impl Fn(&StagedLane) -> bool,
        actions: &mut Vec<Action>,
    ) {
        let ids: Vec<u64> =
            self.lanes.iter().filter(|(_, work)| which(&work.lane)).map(|(id, _)| *id).collect();
        for id in ids {
            self.fail(now, id, fault.clone(), actions);
        }
    }

    /// Repeats asks that were not answered.
    pub fn tick(&mut self, now: Time, actions: &mut Vec<Action>) {
        while let Some((at, (id, piece))) = self.due.first().copied().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, (id, piece)));
            let Some(work) = self.lanes.get_mut(&id) else { continue };
            let State::Asked { wait, repeat, .. } = work.state(piece) else { continue };
            let Some(span) = work.span(piece).cloned() else { continue };
            let (wait, repeat) = ((wait * 2).min(LONGEST), repeat.wrapping_add(1));
            let due = now.after(wait);
            work.set(piece, State::Asked { at: now, due, wait, repeat, answered: false });
            self.due.insert((due, (id, piece)));
            self.stats.repeats += 1;
            actions
                .push(Action::Say { to: work.lane.target, ask: Ask { key: work.key(piece), repeat, span } });
        }
    }

    /// When [`tick`](Self::tick) is to be called next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Asks a target for as many pieces as it may be asked for.
    fn ask(&mut self, now: Time, target: Target, actions: &mut Vec<Action>) {
        let Some(asking) = self.targets.get_mut(&target) else { return };
        let wait = asking.round_trip.patience();
        while let Some(id) = asking.next() {
            let Some(work) = self.lanes.get_mut(&id) else { continue };
            // Fewer than u16::MAX: checked when the lane was added.
            let piece = work.next as u16;
            let Some(span) = work.span(piece).cloned() else { continue };
            work.next += 1;
            if work.next == work.states.len() {
                asking.exhausted(work.lane.room, id);
            }
            let due = now.after(wait);
            work.set(piece, State::Asked { at: now, due, wait, repeat: 0, answered: false });
            self.due.insert((due, (id, piece)));
            actions.push(Action::Say { to: target, ask: Ask { key: work.key(piece), repeat: 0, span } });
        }
    }

    fn credit(&mut self, target: Target, room: Room) {
        if let Some(asking) = self.targets.get_mut(&target) {
            asking.give_back(room);
        }
    }

    /// Ends a piece, and frees its own slot.
    fn over(&mut self, id: u64, piece: u16, slot: u64) {
        let Some(work) = self.lanes.get_mut(&id) else { return };
        let size = Slots::size_of(u64::from(work.span(piece).map_or(0, |span| span.bytes)));
        work.set(piece, State::Over);
        self.slots.give_back(slot);
        if let Some(asking) = self.targets.get_mut(&work.lane.target) {
            asking.held -= size;
        }
    }

    /// Fails a lane: drops all its pieces that no thread or backend has.
    fn fail(&mut self, now: Time, id: u64, fault: Fault, actions: &mut Vec<Action>) {
        let Some(work) = self.lanes.get_mut(&id) else { return };
        if work.fault.is_none() {
            work.fault = Some(fault);
            let (target, room) = (work.lane.target, work.lane.room);
            let mut credits = 0;
            for piece in 0..work.states.len() as u16 {
                match work.state(piece) {
                    State::Queued => work.set(piece, State::Over),
                    State::Asked { due, .. } => {
                        self.due.remove(&(due, (id, piece)));
                        work.set(piece, State::Over);
                        credits += 1;
                    }
                    State::Granted { .. } => {
                        work.set(piece, State::Over);
                        credits += 1;
                    }
                    State::Gathering { .. } | State::Writing { .. } | State::Over => {}
                }
            }
            let writing = self.in_hand.iter().filter(|(_, (lane, piece))| {
                *lane == id && matches!(work.state(*piece), State::Writing { .. })
            });
            actions.extend(writing.map(|(write, _)| Action::CancelWrite(*write)));
            self.ready.retain(|(lane, _)| *lane != id);
            if self.denied.is_some_and(|((lane, _), _)| lane == id) {
                (self.denied, self.claimed) = (None, false);
                self.slots.unclaim();
            }
            if let Some(asking) = self.targets.get_mut(&target) {
                asking.exhausted(room, id);
                (0..credits).for_each(|_| asking.give_back(room));
            }
            self.ask(now, target, actions);
        }
        self.finish(id, actions);
    }

    fn finish(&mut self, id: u64, actions: &mut Vec<Action>) {
        if let Some(work) = self.lanes.get(&id).filter(|work| work.left == 0) {
            let StagedLane { room, attempt, sequence, target, tag, .. } = work.lane;
            actions.push(Action::Ended { tag, target, fault: work.fault.clone() });
            self.by_key.remove(&(room, attempt, sequence, target.peer_rank()));
            self.lanes.remove(&id);
        }
    }

    /// Counts for metrics.
    #[must_use]
    pub fn stats(&self) -> SenderStats {
        let waiting = self.due.len() as u64;
        SenderStats { bytes_in_use: self.slots.used(), waiting, ..self.stats }
    }

    /// Whether nothing is under way.
    #[must_use]
    pub fn idle(&self) -> bool {
        self.lanes.is_empty()
            && self.by_key.is_empty()
            && self.in_hand.is_empty()
            && self.due.is_empty()
            && self.ready.is_empty()
            && self.slots.used() == 0
            && self.targets.values().all(Asking::idle)
    }

    /// Credits in use over all targets.
    #[must_use]
    pub fn credits(&self) -> usize {
        self.targets.values().map(Asking::open).sum()
    }
}
