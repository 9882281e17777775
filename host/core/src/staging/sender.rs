//! A source rank's staging memory: what is asked for, gathered and written when.
//!
//! Each target rank is asked for few pieces ahead ([`asking`]). Granted pieces are gathered in the order of their grants, as far
//! as own slots go; a target whose wire is slow holds at most twice as many bytes as are left to others.

mod asking;
mod lane;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::message::{Answer, Ask, Refusal, Verdict};
use super::round_trip::LONGEST;
use super::slots::Slots;
use super::{Key, PeerRank, Span};
use crate::ids::{Instance, Room, Time};
use crate::transfer::Tag;
use asking::Asking;
pub use lane::{Lane, LaneError, Target};
use lane::{State, Work};

/// Pieces for which there may be no gap while others get theirs, before one is kept free for them.
const PATIENCE: u64 = 16;
/// Targets whose round trips are remembered while nothing goes there.
const IDLE_TARGETS: usize = 256;

/// Why a lane failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// By [`Sender::cancel`].
    #[error("cancelled")]
    Cancelled,
    /// By [`Sender::peer_lost`].
    #[error("the connection is gone")]
    PeerLost,
    /// The ring will not take it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The ring granted what is not its memory.
    #[error("the other worker granted staging memory that it does not have")]
    Outside,
    /// The write failed.
    #[error("{0}")]
    Write(String),
}

/// What a sender wants done. It gathers only when asked for work ([`Sender::next_gather`]).
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// To be told.
    Say {
        /// To whom.
        to: Target,
        /// What.
        ask: Ask,
    },
    /// A gathered piece is to be written; answered by [`Sender::settled`].
    Write(Written),
    /// A write under this id is of no use any more. It still settles.
    CancelWrite(u64),
    /// Nothing of the part is in flight to this target any more.
    Ended {
        /// The part.
        tag: Tag,
        /// The target.
        target: Target,
        /// Why not everything was written.
        fault: Option<Fault>,
    },
}

/// One write of a piece.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Written {
    /// Names it in [`Sender::settled`].
    pub id: u64,
    /// The part.
    pub tag: Tag,
    /// Where to.
    pub target: Target,
    /// The piece.
    pub key: Key,
    /// How many pieces there are of the part for this target.
    pub pieces: u16,
    /// Bytes from the start of the own staging region.
    pub source_offset: u64,
    /// Bytes from the start of the target's.
    pub target_offset: u64,
    /// Bytes.
    pub length: u32,
    /// Travels in the notice behind the data.
    pub generation: u32,
}

/// One piece to copy out of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gather {
    /// Names it in [`Sender::gathered`].
    pub id: u64,
    /// The part.
    pub tag: Tag,
    /// Where it will go.
    pub target: Target,
    /// What.
    pub span: Span,
    /// Bytes from the start of the own staging region.
    pub offset: u64,
}

/// Counts for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SenderStats {
    /// Bytes of own slots in use.
    pub bytes_in_use: u64,
    /// Pieces asked for and not answered by a slot.
    pub waiting: u64,
    /// Pieces written so far.
    pub pieces: u64,
    /// Bytes written so far.
    pub bytes: u64,
    /// Questions repeated so far.
    pub repeats: u64,
}

type PieceOf = (u64, u16);

/// See the module.
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
    /// The piece for which there was first no gap, and `gathers` then.
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

    /// Takes a lane on; it ends in exactly one [`Action::Ended`]. A lane without pieces ends at once.
    ///
    /// # Errors
    /// When it cannot be staged; then nothing was begun.
    pub fn add(&mut self, now: Time, lane: Lane, actions: &mut Vec<Action>) -> Result<(), LaneError> {
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

    /// A ring says something.
    pub fn heard(&mut self, now: Time, from: PeerRank, answer: &Answer, actions: &mut Vec<Action>) {
        let Key { room, attempt, sequence, piece } = answer.key;
        let Some(id) = self.by_key.get(&(room, attempt, sequence, from)).copied() else { return };
        let Some(work) = self.lanes.get_mut(&id) else { return };
        let (target, target_bytes) = (work.lane.target, work.lane.target_bytes);
        let state = work.state(piece);
        if let State::Asked { at, due, repeat, wait } = state {
            if repeat == answer.repeat
                && let Some(asking) = self.targets.get_mut(&target)
                // A grant may come long after the question.
                && (answer.verdict == Verdict::Wait || now.since(at) <= wait)
            {
                asking.round_trip.measured(now.since(at));
            }
            if answer.verdict == Verdict::Wait {
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
                // Its deadline is gone already; failing the lane finds it without one.
                self.fail(now, id, Fault::Refused(refusal), actions);
            }
            // Answers to repeats, late ones.
            _ => {}
        }
    }

    /// The next piece to gather, into a slot that is now its own.
    pub fn next_gather(&mut self, now: Time, actions: &mut Vec<Action>) -> Option<Gather> {
        let (at, piece_of, slot, size) = self.next_fitting()?;
        self.ready.remove(at);
        let (id, piece) = piece_of;
        let work = self.lanes.get_mut(&id)?;
        let State::Granted { offset, generation } = work.state(piece) else { return None };
        work.set(piece, State::Gathering { slot, offset, generation });
        let (tag, target, room) = (work.lane.tag, work.lane.target, work.lane.room);
        let span = work.span(piece)?.clone();
        if let Some(asking) = self.targets.get_mut(&target) {
            asking.held += size;
        }
        self.credit(target, room);
        self.last_id += 1;
        let gather = Gather { id: self.last_id, tag, target, span, offset: slot };
        self.in_hand.insert(gather.id, piece_of);
        // Its credit is free: ask for the one after next before this one is copied.
        self.ask(now, target, actions);
        Some(gather)
    }

    /// The first granted piece that may have an own slot: its place, the slot, and the slot's size.
    fn next_fitting(&mut self) -> Option<(usize, PieceOf, u64, u64)> {
        for at in 0..self.ready.len() {
            let piece_of = *self.ready.get(at)?;
            let Some(work) = self.lanes.get(&piece_of.0) else { continue };
            let length = u64::from(work.span(piece_of.1)?.bytes);
            let size = Slots::size_of(length);
            let held = self.targets.get(&work.lane.target).map_or(0, |asking| asking.held);
            if held > 0 && held + size > self.slots.unused() * 2 {
                continue;
            }
            let waits = self.denied.is_some_and(|(denied, _)| denied == piece_of);
            let slot = match waits && self.claimed {
                true => self.slots.take_claimed(length),
                false => self.slots.take(length),
            };
            if let Some(slot) = slot {
                self.gathers += 1;
                if waits {
                    (self.denied, self.claimed) = (None, false);
                }
                return Some((at, piece_of, slot, size));
            }
            let since = self.denied.get_or_insert((piece_of, self.gathers)).1;
            if waits && !self.claimed && self.gathers - since >= PATIENCE {
                self.slots.claim(length);
                self.claimed = true;
            }
        }
        None
    }

    /// A piece lies in its slot: it is written, unless nobody wants it any more.
    pub fn gathered(&mut self, gather: u64, actions: &mut Vec<Action>) {
        let Some((id, piece)) = self.in_hand.get(&gather).copied() else { return };
        let Some(work) = self.lanes.get_mut(&id) else { return };
        let State::Gathering { slot, offset, generation } = work.state(piece) else { return };
        if work.fault.is_some() {
            self.in_hand.remove(&gather);
            self.over(id, piece, slot);
            self.finish(id, actions);
            return;
        }
        work.set(piece, State::Writing { slot });
        let written = Written {
            id: gather,
            tag: work.lane.tag,
            target: work.lane.target,
            key: work.key(piece),
            // Fewer than u16::MAX: checked when the lane was added.
            pieces: work.states.len() as u16,
            source_offset: slot,
            target_offset: offset,
            length: work.span(piece).map_or(0, |span| span.bytes),
            generation,
        };
        actions.push(Action::Write(written));
    }

    /// A write has ended, and nothing of it is in flight any more.
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

    /// Stops a part. What is in flight of it is waited for.
    pub fn cancel(&mut self, now: Time, tag: Tag, actions: &mut Vec<Action>) {
        self.fail_all(now, Fault::Cancelled, |lane| lane.tag == tag, actions);
    }

    /// A connection is gone. Its writes settle by themselves.
    pub fn peer_lost(&mut self, now: Time, peer: Instance, session: u64, actions: &mut Vec<Action>) {
        let meant = |target: &Target| target.peer == peer && target.session == session;
        self.fail_all(now, Fault::PeerLost, |lane| meant(&lane.target), actions);
        self.targets.retain(|target, asking| !meant(target) || !asking.idle());
    }

    fn fail_all(
        &mut self,
        now: Time,
        fault: Fault,
        which: impl Fn(&Lane) -> bool,
        actions: &mut Vec<Action>,
    ) {
        let ids: Vec<u64> =
            self.lanes.iter().filter(|(_, work)| which(&work.lane)).map(|(id, _)| *id).collect();
        for id in ids {
            self.fail(now, id, fault.clone(), actions);
        }
    }

    /// Repeats what was not answered.
    pub fn tick(&mut self, now: Time, actions: &mut Vec<Action>) {
        while let Some((at, (id, piece))) = self.due.first().copied().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, (id, piece)));
            let Some(work) = self.lanes.get_mut(&id) else { continue };
            let State::Asked { wait, repeat, .. } = work.state(piece) else { continue };
            let Some(span) = work.span(piece).cloned() else { continue };
            let (wait, repeat) = ((wait * 2).min(LONGEST), repeat.wrapping_add(1));
            let due = now.after(wait);
            work.set(piece, State::Asked { at: now, due, wait, repeat });
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
            work.set(piece, State::Asked { at: now, due, wait, repeat: 0 });
            self.due.insert((due, (id, piece)));
            actions.push(Action::Say { to: target, ask: Ask { key: work.key(piece), repeat: 0, span } });
        }
    }

    fn credit(&mut self, target: Target, room: Room) {
        if let Some(asking) = self.targets.get_mut(&target) {
            asking.give_back(room);
        }
    }

    /// A piece is over and its own slot free.
    fn over(&mut self, id: u64, piece: u16, slot: u64) {
        let Some(work) = self.lanes.get_mut(&id) else { return };
        let size = Slots::size_of(u64::from(work.span(piece).map_or(0, |span| span.bytes)));
        work.set(piece, State::Over);
        self.slots.give_back(slot);
        if let Some(asking) = self.targets.get_mut(&work.lane.target) {
            asking.held -= size;
        }
    }

    /// Drops everything of a lane that is in nobody's hands.
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
            let Lane { room, attempt, sequence, target, tag, .. } = work.lane;
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
