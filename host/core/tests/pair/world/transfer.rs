//! Pages on their way from one memory to the other.

use host_core::integrity::{Found, LaneSum};
use host_core::scheduler::PageWrite;
use host_core::{Event, Instance, PageId, Room};

use super::super::memory::{LAYERS, Memory};
use super::rooms::Arrival;
use super::{DECODE, Pending, World};

/// The words that a write carries, page by page.
fn carried(memory: &Memory, write: &PageWrite) -> Vec<Vec<u64>> {
    let pages = write.source.iter();
    pages.map(|page| memory.words(*page, write.layers.start, write.layers.end).to_vec()).collect()
}

/// A write on its way.
pub struct Landing {
    pub write: PageWrite,
    pub from: Instance,
    /// Digest of what is sent.
    pub sum: u64,
    /// What it carries, where that was read when the write was begun. Else it is read when it lands.
    pub words: Option<Vec<Vec<u64>>>,
}

impl World {
    /// Reads what a write carries, now or when it lands, and digests it.
    pub(super) fn begin(&mut self, write: PageWrite, from: Instance) -> Landing {
        let sent = self.sent.entry((from, write.notice.room, write.notice.attempt)).or_default();
        let places = (write.first_page..).take(write.target.len());
        for (place, layer) in places.flat_map(|place| write.layers.clone().map(move |l| (place, l))) {
            assert!(sent.insert((place, layer)), "layer {layer} of page {place} is sent twice: {write:?}");
        }
        if let Some((row, _, _)) = &write.aux {
            assert_eq!(sent.len(), (row.pages * LAYERS) as usize, "not all layers of all pages were sent");
        }
        let completes = write.layers.end == LAYERS;
        assert_eq!(write.notice.pages as usize, if completes { write.source.len() } else { 0 });
        assert!(!write.source.is_empty() || write.notice.last, "an empty part that is not the last");
        let memory = &self.prefill.memory;
        let sum = memory.sum(&write.source, write.first_page, write.layers.clone());
        let words = self.random.chance(0.5).then(|| carried(memory, &write));
        Landing { write, from, sum, words }
    }

    /// A write lands: in decode's pages, or where decode copies it from into its pages.
    pub(super) fn land(&mut self, landing: Landing) {
        let Landing { write, from, sum, words } = landing;
        let cut = self.prefill.instance != from || self.prefill_link != Some(write.session);
        let error = cut.then(|| "the connection is gone".to_owned());
        self.handle(from, Event::Written { tag: write.tag, error });
        if cut || self.prefill.instance != from {
            return;
        }
        let words = words.unwrap_or_else(|| carried(&self.prefill.memory, &write));
        let arrival = Arrival { write, words, sum };
        match self.random.chance(0.5) {
            true => self.stage(arrival),
            false => self.put(&arrival),
        }
    }

    /// Fills decode's pages, and lets it know.
    pub(super) fn put(&mut self, arrival: &Arrival) {
        let Arrival { write, words, sum } = arrival;
        for (room, pages) in self.decode.scheduler.holdings() {
            let foreign = room != write.notice.room && write.target.iter().any(|page| pages.contains(page));
            assert!(!foreign, "a write for {:?} landed on pages of {room:?}", write.notice.room);
        }
        for (target, words) in write.target.iter().zip(words) {
            self.decode.memory.put(*target, write.layers.start, words);
        }
        if self.random.chance(self.faults.flip)
            && let Some(target) = write.target.first()
        {
            let bit = self.random.below(64);
            self.decode.memory.flip(*target, write.layers.start, bit);
        }
        let key = (write.notice.room, write.notice.attempt);
        self.decode.sent_sums.entry(key).or_default().insert(write.notice.sequence, *sum);
        if let Some((row, _, slot)) = &write.aux {
            self.decode.aux[*slot as usize] = row.encode();
        }
        let after = self.soon(20);
        let event = Event::Arrived(write.notice);
        self.schedule(after, Pending::Settle { at: DECODE, event });
    }

    /// Digests what lies in decode's memory.
    pub(super) fn verify(
        &mut self,
        at: Instance,
        (room, attempt): (Room, u32),
        pages: &[PageId],
        aux_slot: u32,
    ) {
        let sums = self.decode.sent_sums.get(&(room, attempt)).into_iter().flat_map(|parts| parts.values());
        let sent = sums.fold(0, |all: u64, sum| all.wrapping_add(*sum));
        let found = self.decode.memory.sum(pages, 0, 0..LAYERS);
        let lanes = Some(vec![LaneSum { source: 0, target: 0, sent, found }]);
        let found = Found { aux_row: self.decode.aux[aux_slot as usize], lanes };
        let after = self.soon(30);
        let event = Event::Verified { room, attempt, found: Box::new(found) };
        self.schedule(after, Pending::Settle { at, event });
    }
}
