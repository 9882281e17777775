//! Pages on their way from one memory to another.

use std::collections::BTreeMap;
use std::time::Duration;

use host_core::integrity::{FoundData, LaneSum};
use host_core::scheduler::PageWrite;
use host_core::{Event, Instance, PageId, Room};

use super::pending::{Arrival, Landing};
use super::worker::Part;
use super::{Clients, Pending, World};
use crate::kv::Memory;
use crate::times::Work;

/// The longest delay of a repeated report of a part.
const TOLD_AGAIN: Duration = Duration::from_secs(5);

/// The words that a write carries, page by page.
fn carried(memory: &Memory, write: &PageWrite) -> Vec<Vec<u64>> {
    write.source.iter().map(|page| memory.words(*page, write.layers.clone()).to_vec()).collect()
}

impl<C: Clients> World<C> {
    /// Begins a write: digests its data, which is read now or when the write lands.
    pub(super) fn begin_write(&mut self, write: PageWrite, from: Instance) {
        if self.kv.words {
            self.note_sent(&write, from);
        }
        assert!(!write.source.is_empty() || write.notice.last, "an empty part that is not the last");
        let early = self.random.chance(self.faults.read_early);
        let Some(worker) = self.worker(from) else { return };
        let sum = worker.memory.sum(&write.source, write.first_page, write.layers.clone());
        let words = early.then(|| carried(&worker.memory, &write));
        let (here, there) = (self.place(from), self.place(write.to));
        let cut = self.cut_off(here, there).unwrap_or_default();
        let wait = cut + self.takes(Work::Write { from: here, to: there, write: &write });
        let flight = self.take_off(from, &write);
        self.agenda.after(wait, Pending::Land(Box::new(Landing { write, from, sum, words, flight })));
    }

    /// Checks that each layer of each page is sent once, and that all are sent when the last part is.
    fn note_sent(&mut self, write: &PageWrite, from: Instance) {
        let layers = self.kv.layers;
        let sent = self.sent.entry((from, write.notice.room, write.notice.attempt)).or_default();
        let places = (write.first_page..).take(write.target.len());
        for (place, layer) in places.flat_map(|place| write.layers.clone().map(move |l| (place, l))) {
            assert!(sent.insert((place, layer)), "layer {layer} of page {place} is sent twice: {write:?}");
        }
        if let Some((row, _, _)) = &write.aux {
            assert_eq!(sent.len(), (row.pages * layers) as usize, "not all layers of all pages were sent");
        }
        let completes = write.layers.end == layers;
        assert_eq!(write.notice.pages as usize, if completes { write.source.len() } else { 0 });
    }

    /// Lands a write: in the receiver's pages, or beside them, from where the receiver copies it.
    pub(super) fn land(&mut self, landing: Landing) {
        let Landing { write, from, sum, words, flight } = landing;
        self.flights.remove(&flight);
        let cut = self.links.get(&(from, write.to)) != Some(&write.session);
        let fails = self.faults.write > 0.0 && self.strikes(self.faults.write, || "a write fails".to_owned());
        let error = match (cut, fails) {
            (true, _) => Some("the connection is gone".to_owned()),
            (false, true) => Some("the plugin failed".to_owned()),
            (false, false) => None,
        };
        // A plugin may report a failure although all data has arrived.
        let lands = !fails || self.random.chance(0.5);
        self.handle(from, Event::Written { tag: write.tag, error });
        let Some(sender) = self.worker(from).filter(|_| !cut && lands) else { return };
        let words = words.unwrap_or_else(|| carried(&sender.memory, &write));
        let arrival = Arrival { write, words, sum };
        match self.random.chance(self.faults.staged) {
            true => self.stage(arrival),
            false => self.put(&arrival),
        }
    }

    /// Writes data into the receiver's pages, and tells the receiver.
    pub(super) fn put(&mut self, arrival: &Arrival) {
        let Arrival { write, words, sum } = arrival;
        let (at, notice) = (write.to, write.notice);
        let flips = self.strikes(self.faults.flip, || format!("a bit flips on its way to {at:?}"));
        let bit = flips.then(|| self.random.below(64));
        let check = self.kv.words;
        let Some(worker) = self.worker(at) else { return };
        // This check looks at every request of the worker.
        if check {
            for (room, pages) in worker.scheduler.holdings().filter(|(room, _)| *room != notice.room) {
                let foreign = write.target.iter().any(|page| pages.contains(page));
                assert!(!foreign, "a write for {:?} landed on pages of {room:?}", notice.room);
            }
        }
        for (target, words) in write.target.iter().zip(words) {
            worker.memory.put(*target, write.layers.start, words);
        }
        if let (Some(bit), Some(target)) = (bit, write.target.first()) {
            worker.memory.flip(*target, write.layers.start, bit);
        }
        let attempts = worker.parts.entry(notice.room).or_default();
        let part = Part { sum: *sum, last: notice.last };
        attempts.entry(notice.attempt).or_default().insert(notice.sequence, part);
        if let Some((row, _, slot)) = &write.aux {
            worker.aux[*slot as usize] = row.encode();
        }
        self.tell(at, Event::Arrived(notice));
        if self.faults.notice > 0.0
            && self.strikes(self.faults.notice, || format!("{at:?} is told again of a part"))
        {
            let wait = self.soon(TOLD_AGAIN);
            self.agenda.after(wait, Pending::Tell { at, event: Event::Arrived(notice) });
        }
    }

    /// Checks that all parts of an attempt have arrived, digests its pages in a worker's memory, and reports the result.
    pub(super) fn verify(
        &mut self,
        at: Instance,
        (room, attempt): (Room, u32),
        pages: &[PageId],
        aux_slot: u32,
    ) {
        let layers = self.kv.layers;
        let Some(worker) = self.worker(at) else { return };
        let parts = worker.parts.get(&room).and_then(|attempts| attempts.get(&attempt));
        let (none, missing) = (BTreeMap::new(), "is verified, but parts of it may still be on their way");
        let parts = parts.unwrap_or(&none);
        let ends = |(sequence, part): (&u32, &Part)| part.last && *sequence as usize + 1 == parts.len();
        assert!(parts.last_key_value().is_some_and(ends), "attempt {attempt} of {room:?} {missing}");
        let sent = parts.values().fold(0, |all: u64, part| all.wrapping_add(part.sum));
        let found = worker.memory.sum(pages, 0, 0..layers);
        let lanes = Some(vec![LaneSum { source: 0, target: 0, sent, found }]);
        let found = FoundData { aux_row: worker.aux[aux_slot as usize], lanes };
        let event = Event::Verified { room, attempt, found: Box::new(found) };
        self.later(Work::Verify { at: self.place(at), pages: pages.len() }, Pending::Tell { at, event });
    }
}
