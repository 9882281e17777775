//! Which piece gets a slot, and when.

use super::room::{Piece, PieceKey, Slot, State};
use super::{Action, Ring};
use crate::ids::Room;
use crate::staging::PeerRank;
use crate::staging::message::{Answer, Ask, Refusal, Verdict};
use crate::staging::slots::Slots;

/// Grants to other pieces after which a window is kept free for a piece that found no gap.
const PATIENCE: u64 = 16;

impl<N> Ring<N> {
    /// Answers a sender that has a piece: grants a slot, or says why not (yet).
    pub fn request_slot(&mut self, from: PeerRank, ask: &Ask, actions: &mut Vec<Action>) {
        let verdict = match self.judge(from, ask) {
            Ok(Some(verdict)) => verdict,
            Ok(None) => {
                self.serve(actions);
                let piece = self
                    .rooms
                    .get(&ask.key.room)
                    .and_then(|open| open.pieces.get(&PieceKey::of(from.rank, &ask.key)));
                if piece.is_some_and(|piece| piece.state != State::Waiting) {
                    // The answer was sent already.
                    return;
                }
                Verdict::Wait
            }
            Err(refusal) => {
                self.stats.refused += 1;
                Verdict::Refused(refusal)
            }
        };
        actions.push(Action::Say { to: from, answer: Answer { key: ask.key, repeat: ask.repeat, verdict } });
    }

    /// The answer to an ask, or `None` for a piece that waits now.
    fn judge(&mut self, from: PeerRank, ask: &Ask) -> Result<Option<Verdict>, Refusal> {
        let (geometry, capacity) = (self.geometry, self.slots.capacity());
        let open = self.rooms.get_mut(&ask.key.room).filter(|open| !open.closed).ok_or(Refusal::Gone)?;
        if open.opening.peer != from.peer || open.opening.attempt < ask.key.attempt {
            return Err(Refusal::Gone);
        }
        if ask.key.attempt < open.opening.attempt {
            // The sender does not know yet that decode asked again. The part is not needed any more, which is no
            // failure.
            return Ok(Some(Verdict::Done));
        }
        let lane = open.opening.lanes.iter().find(|lane| lane.0 == from.rank).ok_or(Refusal::Malformed)?;
        let heads = lane.1.clone();
        let key = PieceKey::of(from.rank, &ask.key);
        if let Some(piece) = open.pieces.get_mut(&key) {
            if piece.span != ask.span {
                return Err(Refusal::Malformed);
            }
            return Ok(match piece.state {
                State::Waiting => {
                    piece.repeat = ask.repeat;
                    None
                }
                State::Granted(Slot { offset, generation, .. }) => {
                    Some(Verdict::Grant { offset, generation })
                }
                State::Arrived(_) | State::Scattering(_) | State::Done => Some(Verdict::Done),
            });
        }
        let span = &ask.span;
        let blocks = span.blocks().ok_or(Refusal::Malformed)?;
        let inside = span.layers.end <= geometry.layers
            && span.heads.start >= heads.start
            && span.heads.end <= heads.end
            && span.pages.end as usize <= open.opening.pages.len();
        if !inside || blocks.checked_mul(u64::from(geometry.block_bytes)) != Some(u64::from(span.bytes)) {
            return Err(Refusal::Malformed);
        }
        if Slots::size_of(u64::from(span.bytes)) > capacity / 4 {
            return Err(Refusal::TooLong);
        }
        open.charge(from.rank, blocks, geometry.layers, heads.end - heads.start)?;
        // This rank writes in this attempt, so its writes of earlier ones have settled.
        self.free_kept(ask.key.room, |held| held.source == from.rank && held.attempt < ask.key.attempt);
        let Some(open) = self.rooms.get_mut(&ask.key.room) else { return Err(Refusal::Gone) };
        open.pieces.insert(
            key,
            Piece { span: span.clone(), repeat: ask.repeat, denied: None, state: State::Waiting },
        );
        if open.waiting.is_empty() {
            self.turns.push_back(ask.key.room);
        }
        open.waiting.push_back(key);
        self.stats.waiting += 1;
        Ok(None)
    }

    /// Grants as many slots as possible, to rooms in turn.
    pub(super) fn serve(&mut self, actions: &mut Vec<Action>) {
        let mut denied = 0;
        while denied < self.turns.len() {
            let Some(room) = self.turns.pop_front() else { return };
            let Some(open) = self.rooms.get_mut(&room) else { continue };
            let Some(key) = open.waiting.front().copied() else { continue };
            let granted = self.try_grant(room, key, actions);
            denied = if granted { 0 } else { denied + 1 };
            if self.rooms.get(&room).is_some_and(|open| !open.waiting.is_empty()) {
                self.turns.push_back(room);
            }
        }
    }

    fn try_grant(&mut self, room: Room, key: PieceKey, actions: &mut Vec<Action>) -> bool {
        let Some(open) = self.rooms.get_mut(&room) else { return false };
        let Some(piece) = open.pieces.get_mut(&key) else { return false };
        let (peer, length) = (open.opening.peer, u64::from(piece.span.bytes));
        let size = Slots::size_of(length);
        let peers = self.peers.get(&peer).copied().unwrap_or(0);
        let left = self.slots.unused();
        let fair = match (open.held, peers) {
            (_, 0) => true,
            (0, peers) => peers + size <= left * 4,
            (held, peers) => held + size <= left && peers + size <= left * 2,
        };
        if !fair {
            return false;
        }
        let claimed = self.claimant == Some((room, key));
        let offset = if claimed { self.slots.take_claimed(length) } else { self.slots.take(length) };
        let Some(offset) = offset else {
            let since = *piece.denied.get_or_insert(self.grants);
            if self.claimant.is_none() && self.grants - since >= PATIENCE {
                self.slots.claim(length);
                self.claimant = Some((room, key));
            }
            return false;
        };
        if claimed {
            self.claimant = None;
        }
        self.grants += 1;
        // A generation comes again after four billion grants. No notice is late by that many.
        self.last_generation = self.last_generation.wrapping_add(1);
        let slot = Slot { offset, size, generation: self.last_generation };
        piece.state = State::Granted(slot);
        let repeat = piece.repeat;
        open.waiting.pop_front();
        open.held += size;
        *self.peers.entry(peer).or_default() += size;
        self.stats.waiting -= 1;
        let verdict = Verdict::Grant { offset, generation: slot.generation };
        let to = PeerRank { peer, rank: key.source };
        actions.push(Action::Say { to, answer: Answer { key: key.key(room), repeat, verdict } });
        true
    }
}
