//! Writes that may still land. Their pages must not be given to another request.

use host_core::scheduler::PageWrite;
use host_core::{Instance, PageId, Room};

use super::{Clients, World};

/// A write that was begun and has not settled.
#[derive(Debug)]
pub(super) struct Flight {
    from: Instance,
    to: Instance,
    session: u64,
    room: Room,
    pages: Vec<PageId>,
}

impl<C: Clients> World<C> {
    /// Records a write, and returns its number.
    pub(super) fn take_off(&mut self, from: Instance, write: &PageWrite) -> u64 {
        self.last_flight += 1;
        if self.kv.words {
            let flight = Flight {
                from,
                to: write.to,
                session: write.session,
                room: write.notice.room,
                pages: write.target.clone(),
            };
            self.flights.insert(self.last_flight, flight);
        }
        self.last_flight
    }

    /// Checks that a worker has given no page to another request while a write may still land in the page.
    pub(super) fn check_flights(&self, place: usize) {
        let worker = &self.workers[place];
        for flight in self.flights.values().filter(|flight| flight.to == worker.instance) {
            if self.links.get(&(flight.from, flight.to)) != Some(&flight.session) {
                // The session has ended, so the write lands nowhere.
                continue;
            }
            for (room, pages) in worker.scheduler.holdings().filter(|(room, _)| *room != flight.room) {
                let reused = flight.pages.iter().find(|page| pages.contains(page));
                assert!(
                    reused.is_none(),
                    "{room:?} was given {reused:?}, into which a write for {:?} may still land",
                    flight.room
                );
            }
        }
    }
}
