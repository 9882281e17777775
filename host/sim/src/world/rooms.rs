//! Rooms as a worker's transfer threads see them. Data that arrived beside the pages is copied into them a little
//! later.

use std::time::Duration;

use host_core::scheduler::RoomOpening;
use host_core::{Event, Instance, Room};

use super::pending::Arrival;
use super::{Clients, Pending, World};
use crate::times::Work;

/// A room that was opened and is not forgotten.
pub(super) struct OpenRoom {
    attempt: u32,
    /// Whether closing was requested, and whether it has happened.
    closing: bool,
    closed: bool,
    /// Copies that were begun and have not ended.
    copies: u32,
}

impl<C: Clients> World<C> {
    /// Takes arrived data of an open room to be copied. Data for any other room is ignored.
    pub(super) fn stage(&mut self, arrival: Arrival) {
        let (at, notice) = (arrival.write.to, arrival.write.notice);
        let room = self.worker(at).and_then(|worker| worker.rooms.get_mut(&notice.room));
        let Some(room) = room.filter(|room| !room.closing && room.attempt == notice.attempt) else { return };
        room.copies += 1;
        let pages = arrival.write.target.len();
        self.later(Work::Scatter { at: self.place(at), pages }, Pending::Copy(Box::new(arrival)));
    }

    pub(super) fn copy(&mut self, arrival: &Arrival) {
        let notice = arrival.write.notice;
        let room = notice.room;
        let Some(worker) = self.worker(arrival.write.to) else { return };
        let Some(open) = worker.rooms.get_mut(&room) else {
            let superseded = worker.superseded.contains(&(room, notice.attempt));
            assert!(superseded, "{room:?} was forgotten while its pages were copied");
            return;
        };
        if open.attempt != notice.attempt {
            // A later attempt has replaced this one: its data is not copied any more.
            return;
        }
        assert!(!open.closed, "{room:?} was closed while its pages were copied");
        open.copies -= 1;
        self.outcome.copies += 1;
        self.put(arrival);
    }

    pub(super) fn open(&mut self, at: Instance, opening: &RoomOpening) {
        let Some(worker) = self.worker(at) else { return };
        let fresh = OpenRoom { attempt: opening.attempt, closing: false, closed: false, copies: 0 };
        if let Some(before) = worker.rooms.insert(opening.room, fresh) {
            assert!(
                !before.closing && before.attempt < opening.attempt,
                "{opening:?} replaces what it must not"
            );
            worker.superseded.insert((opening.room, before.attempt));
        }
    }

    pub(super) fn close(&mut self, at: Instance, room: Room) {
        let open = self.worker(at).and_then(|worker| worker.rooms.get_mut(&room));
        let Some(open) = open.filter(|open| !open.closing) else {
            panic!("{room:?} is closed, but is not open");
        };
        open.closing = true;
        self.later(Work::News { at: self.place(at) }, Pending::Close { at, room });
    }

    pub(super) fn closed(&mut self, at: Instance, room: Room) {
        let Some(worker) = self.worker(at) else { return };
        let Some(open) = worker.rooms.get_mut(&room) else {
            panic!("{room:?} was forgotten before it was closed")
        };
        if open.copies > 0 {
            self.outcome.closed_late += 1;
            // Checked again a little later, however long messages between threads take.
            return self.agenda.after(Duration::from_millis(5), Pending::Close { at, room });
        }
        open.closed = true;
        self.handle(at, Event::RoomClosed { room });
    }

    pub(super) fn forget(&mut self, at: Instance, room: Room) {
        let Some(worker) = self.worker(at) else { return };
        let Some(open) = worker.rooms.remove(&room) else { panic!("{room:?} is forgotten, but is not open") };
        assert!(open.closing == open.closed && open.copies == 0, "{room:?} is forgotten too early");
        worker.parts.remove(&room);
    }
}
