//! From granted to written: which piece gets an own slot next.

use super::lane::State;
use super::{Action, Gather, PieceOf, Sender, Written};
use crate::ids::Time;
use crate::staging::slots::Slots;

/// Slots given to other pieces after which a window is kept free for a piece that found no gap.
const PATIENCE: u64 = 16;

impl Sender {
    /// The next piece to gather, with the own slot that it now has.
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
        // The piece's credit is free: ask for a later piece before this one is copied.
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

    /// Takes note that a piece lies in its slot, and has it written unless its lane has failed.
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
}
