//! Pages on their way from one memory to the other.

use host_core::aux_row::AuxRow;
use host_core::integrity::Found;
use host_core::scheduler::PageWrite;
use host_core::{Event, Instance, PageId, Room, Time};

use super::super::memory::{LAYERS, Memory, mix};
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
    /// Of the pages that it completes.
    pub digests: Vec<u64>,
    /// What it carries, where that was read when the write was begun. Else it is read when it lands.
    pub words: Option<Vec<Vec<u64>>>,
}

impl World {
    /// Reads what a write carries, now or when it lands, and digests the pages that it completes.
    pub(super) fn begin(&mut self, write: PageWrite, from: Instance) -> Landing {
        let sent = self.sent.entry((from, write.notice.room, write.notice.attempt)).or_default();
        for (page, layer) in write.target.iter().flat_map(|page| write.layers.clone().map(|l| (*page, l))) {
            assert!(sent.insert((page, layer)), "layer {layer} of {page:?} is sent twice: {write:?}");
        }
        if let Some((row, _, _)) = &write.aux {
            assert_eq!(sent.len(), (row.pages * LAYERS) as usize, "not all layers of all pages were sent");
        }
        let completes = write.layers.end == LAYERS;
        assert_eq!(write.notice.pages as usize, if completes { write.source.len() } else { 0 });
        assert!(!write.source.is_empty() || write.notice.last, "an empty part that is not the last");
        let memory = &self.prefill.memory;
        let complete = write.source.iter().filter(|_| completes);
        let digests = complete.map(|page| memory.digest(*page)).collect();
        let words = self.random.chance(0.5).then(|| carried(memory, &write));
        Landing { write, from, digests, words }
    }

    pub(super) fn land(&mut self, landing: &Landing) {
        let Landing { write, from, digests, words } = landing;
        let from = *from;
        let cut = self.prefill.instance != from || self.prefill_link != Some(write.session);
        let error = cut.then(|| "the connection is gone".to_owned());
        self.handle(from, Event::Written { tag: write.tag, error });
        if cut || self.prefill.instance != from {
            return;
        }
        for (room, pages) in self.decode.scheduler.holdings() {
            let foreign = room != write.notice.room && write.target.iter().any(|page| pages.contains(page));
            assert!(!foreign, "a write for {:?} landed on pages of {room:?}", write.notice.room);
        }
        let words = words.clone().unwrap_or_else(|| carried(&self.prefill.memory, write));
        for (target, words) in write.target.iter().zip(&words) {
            self.decode.memory.put(*target, write.layers.start, words);
        }
        if self.random.chance(self.faults.flip)
            && let Some(target) = write.target.first()
        {
            let bit = self.random.below(64);
            self.decode.memory.flip(*target, write.layers.start, bit);
        }
        let key = (write.notice.room, write.notice.attempt);
        let sent = self.prefill.sent_digests.entry(key).or_default();
        let place = sent.len().max(write.notice.sequence as usize + 1);
        sent.resize(place, 0);
        sent[write.notice.sequence as usize] = digests.iter().copied().fold(0, mix);
        if let Some((row, _, slot)) = &write.aux {
            // Parts land in order here, so the digests of all of them are known with the last.
            let row = AuxRow { digest: sent.iter().copied().fold(0, mix), ..row.clone() };
            self.decode.aux[*slot as usize] = row.encode();
            let parts = sent.len();
            self.decode.sent_digests.insert(key, vec![parts as u64]);
        }
        let after = self.soon(20);
        let event = Event::Arrived(write.notice);
        // The parts' page counts are what the digest below is cut by.
        let counts =
            self.decode.sent_digests.entry((write.notice.room, write.notice.attempt | 1 << 31)).or_default();
        counts.resize(counts.len().max(write.notice.sequence as usize + 1), 0);
        counts[write.notice.sequence as usize] = u64::from(write.notice.pages);
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
        let counts = self.decode.sent_digests.get(&(room, attempt | 1 << 31)).cloned().unwrap_or_default();
        let mut rest = pages;
        let digest = counts.iter().fold(0, |whole, count| {
            let (part, after) = rest.split_at(*count as usize);
            rest = after;
            mix(whole, part.iter().map(|page| self.decode.memory.digest(*page)).fold(0, mix))
        });
        let found = Found { aux_row: self.decode.aux[aux_slot as usize], digest: Some(digest) };
        let after = self.soon(30);
        let event = Event::Verified { room, attempt, found: Box::new(found) };
        self.schedule(after, Pending::Settle { at, event });
    }

    pub(super) fn last_landing(&self, from: Instance, room: Room) -> Time {
        let lands = self.pending.iter().filter_map(|((at, _), what)| match what {
            Pending::Land(landing) if landing.from == from && landing.write.notice.room == room => Some(*at),
            _ => None,
        });
        lands.max().unwrap_or(self.now)
    }
}
