//! Which piece is asked for next: rooms take turns, and each has few open questions.

use std::collections::{BTreeMap, VecDeque};

use super::super::round_trip::RoundTrip;
use crate::ids::Room;

/// Most pieces of all rooms that are asked for or granted and not yet gathered, for one target.
const PER_TARGET: usize = 64;
/// The same for one room: one on the wire, one being gathered, and credits for the next.
const PER_ROOM: usize = 4;

/// The questions for one target rank.
#[derive(Debug, Default)]
pub(super) struct Asking {
    rooms: BTreeMap<Room, Credits>,
    /// Rooms with lanes to ask for, the next in turn first.
    turns: VecDeque<Room>,
    /// Credits of all rooms.
    open: usize,
    /// Bytes of own slots whose pieces go to this target.
    pub held: u64,
    pub round_trip: RoundTrip,
}

#[derive(Debug, Default)]
struct Credits {
    open: usize,
    /// Lanes with pieces that were not asked for, in order.
    lanes: VecDeque<u64>,
}

impl Asking {
    pub(super) fn add(&mut self, room: Room, lane: u64) {
        let credits = self.rooms.entry(room).or_default();
        credits.lanes.push_back(lane);
        if credits.lanes.len() == 1 {
            self.turns.push_back(room);
        }
    }

    /// The lane whose next piece may be asked for now, if any. Its room then uses one credit more.
    pub(super) fn next(&mut self) -> Option<u64> {
        if self.open >= PER_TARGET {
            return None;
        }
        for _ in 0..self.turns.len() {
            let room = self.turns.pop_front()?;
            let Some(credits) = self.rooms.get_mut(&room) else { continue };
            let Some(lane) = credits.lanes.front().copied() else { continue };
            self.turns.push_back(room);
            if credits.open < PER_ROOM {
                credits.open += 1;
                self.open += 1;
                return Some(lane);
            }
        }
        None
    }

    /// Removes a lane that has no more pieces to ask for.
    pub(super) fn exhausted(&mut self, room: Room, lane: u64) {
        if let Some(credits) = self.rooms.get_mut(&room) {
            credits.lanes.retain(|other| *other != lane);
            if credits.lanes.is_empty() {
                self.turns.retain(|other| *other != room);
            }
        }
        self.tidy(room);
    }

    /// Takes back a credit that was used or is not needed any more.
    pub(super) fn give_back(&mut self, room: Room) {
        if let Some(credits) = self.rooms.get_mut(&room) {
            credits.open -= 1;
            self.open -= 1;
        }
        self.tidy(room);
    }

    fn tidy(&mut self, room: Room) {
        if self.rooms.get(&room).is_some_and(|credits| credits.open == 0 && credits.lanes.is_empty()) {
            self.rooms.remove(&room);
        }
    }

    pub(super) fn idle(&self) -> bool {
        self.rooms.is_empty() && self.held == 0
    }

    pub(super) fn open(&self) -> usize {
        self.open
    }
}
