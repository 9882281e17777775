//! The times at which jobs must be looked at, so that a tick looks at no other jobs.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{Room, Time};

/// At most one time per job.
#[derive(Debug, Default)]
pub(super) struct Deadlines {
    by_time: BTreeSet<(Time, Room)>,
    by_room: BTreeMap<Room, Time>,
}

impl Deadlines {
    /// Sets the time at which the job must be looked at. It replaces an earlier setting.
    pub(super) fn set(&mut self, room: Room, at: Time) {
        self.remove(room);
        self.by_time.insert((at, room));
        self.by_room.insert(room, at);
    }

    pub(super) fn remove(&mut self, room: Room) {
        if let Some(at) = self.by_room.remove(&room) {
            self.by_time.remove(&(at, room));
        }
    }

    /// Takes out all jobs whose time has come, earliest first.
    pub(super) fn due(&mut self, now: Time) -> Vec<Room> {
        let mut due = Vec::new();
        while let Some((at, room)) = self.by_time.first().copied().filter(|(at, _)| *at <= now) {
            self.by_time.remove(&(at, room));
            self.by_room.remove(&room);
            due.push(room);
        }
        due
    }

    /// The earliest time.
    pub(super) fn next(&self) -> Option<Time> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// A job's time.
    pub(super) fn of(&self, room: Room) -> Option<Time> {
        self.by_room.get(&room).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.by_room.len()
    }
}
