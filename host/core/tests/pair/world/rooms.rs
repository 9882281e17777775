//! Rooms as decode's own transfer threads see them: what arrived beside the pages is copied into them, a little later.

use std::time::Duration;

use host_core::scheduler::{PageWrite, RoomOpening};
use host_core::{Event, Room};

use super::{DECODE, Pending, World};

/// What a write brought.
pub struct Arrival {
    pub write: PageWrite,
    pub words: Vec<Vec<u64>>,
    pub sum: u64,
}

/// A room that was opened and is not forgotten.
pub struct OpenRoom {
    attempt: u32,
    /// Asked for, and answered.
    closing: bool,
    closed: bool,
    /// Copies that were begun.
    copies: u32,
}

impl World {
    /// Takes what arrived of an open room to be copied. What comes for others stays where it is.
    pub(super) fn stage(&mut self, arrival: Arrival) {
        let notice = arrival.write.notice;
        let Some(room) = self.rooms.get_mut(&notice.room) else { return };
        if room.closing || room.attempt != notice.attempt {
            return;
        }
        room.copies += 1;
        let after = self.soon(100);
        self.schedule(after, Pending::Copy(Box::new(arrival)));
    }

    pub(super) fn copy(&mut self, arrival: &Arrival) {
        let room = arrival.write.notice.room;
        let Some(open) = self.rooms.get_mut(&room) else {
            let superseded = self.superseded.contains(&(room, arrival.write.notice.attempt));
            assert!(superseded, "{room:?} was forgotten while its pages were copied");
            return;
        };
        if open.attempt != arrival.write.notice.attempt {
            // Another attempt has taken its place: nothing of it is copied from then on.
            return;
        }
        assert!(!open.closed, "{room:?} was closed while its pages were copied");
        open.copies -= 1;
        self.outcome.copies += 1;
        self.put(arrival);
    }

    pub(super) fn open(&mut self, opening: &RoomOpening) {
        let fresh = OpenRoom { attempt: opening.attempt, closing: false, closed: false, copies: 0 };
        if let Some(before) = self.rooms.insert(opening.room, fresh) {
            assert!(
                !before.closing && before.attempt < opening.attempt,
                "{opening:?} replaces what it must not"
            );
            self.superseded.insert((opening.room, before.attempt));
        }
    }

    pub(super) fn close(&mut self, room: Room) {
        let Some(open) = self.rooms.get_mut(&room).filter(|open| !open.closing) else {
            panic!("{room:?} is closed, but is not open");
        };
        open.closing = true;
        self.await_copies(room);
    }

    /// Copies that were begun end first.
    fn await_copies(&mut self, room: Room) {
        let after = self.soon(20) + Duration::from_micros(1);
        self.schedule(after, Pending::Close(room));
    }

    pub(super) fn closed(&mut self, room: Room) {
        let Some(open) = self.rooms.get_mut(&room) else {
            panic!("{room:?} was forgotten before it was closed")
        };
        if open.copies > 0 {
            self.outcome.closed_late += 1;
            return self.await_copies(room);
        }
        open.closed = true;
        self.handle(DECODE, Event::RoomClosed { room });
    }

    pub(super) fn forget(&mut self, room: Room) {
        let Some(open) = self.rooms.remove(&room) else { panic!("{room:?} is forgotten, but is not open") };
        assert!(open.closing == open.closed && open.copies == 0, "{room:?} is forgotten too early");
    }
}
