//! Digests of the pages that a transfer sends, collected part by part for its aux row.
//!
//! A part is digested when it is sent, also when it has only some layers of its pages, so that little is left to do when
//! the last one goes.

use std::collections::VecDeque;

use host_core::scheduler::PageWrite;
use host_core::{KvShape, PageId, Room};

use crate::executor::KvMemory;
use crate::executor::digest::{self, PagePart};

/// Rooms remembered at most.
const ROOMS: usize = 4096;

/// See the module.
#[derive(Default)]
pub(super) struct SentDigests(VecDeque<Sent>);

struct Sent {
    room: Room,
    attempt: u32,
    /// Pages of which all layers were sent, and their digest.
    pages: usize,
    digest: u64,
    /// Layers that were sent of the pages after these, and their digest.
    begun: (usize, u64),
}

impl SentDigests {
    /// Digests what a write carries.
    pub(super) fn add(&mut self, kv: &KvMemory, write: &PageWrite) {
        let (room, attempt) = (write.notice.room, write.notice.attempt);
        let (first, end) = (write.layers.start as usize, write.layers.end as usize);
        let at = self.0.iter().position(|sent| (sent.room, sent.attempt) == (room, attempt));
        let at = at.unwrap_or_else(|| {
            // Rooms that ended early leave theirs behind. Forgetting a live one would only cost a second transfer.
            if self.0.len() >= ROOMS {
                self.0.pop_front();
            }
            self.0.push_back(Sent { room, attempt, pages: 0, digest: 0, begun: (0, 0) });
            self.0.len() - 1
        });
        let Some(sent) = self.0.get_mut(at) else { return };
        let shape = kv.layout().shape;
        // Digests that were forgotten are made again.
        let (layers, begun) = Some(sent.begun).filter(|(layers, _)| *layers == first).unwrap_or_default();
        let pages = write.source.iter().zip(sent.pages..).map(|(page, index)| {
            let tokens = shape.page_tokens;
            digest::part(kv, &PagePart { page: *page, index, layers: layers..end, heads: kv.heads(), tokens })
        });
        let digest = digest::sum(pages.chain([begun]));
        if end == shape.layers {
            sent.pages += write.source.len();
            sent.digest = digest::sum([sent.digest, digest]);
            sent.begun = (0, 0);
        } else {
            sent.begun = (end, digest);
        }
    }

    /// The digest over all pages of a transfer, which is forgotten.
    pub(super) fn take(&mut self, room: Room, attempt: u32) -> u64 {
        let at = self.0.iter().position(|sent| (sent.room, sent.attempt) == (room, attempt));
        at.and_then(|at| self.0.remove(at)).map_or(0, |sent| sent.digest)
    }
}

/// The digest over all pages of a transfer, as they lie in a pool.
pub(super) fn whole(kv: &KvMemory, pages: &[PageId]) -> u64 {
    let KvShape { layers, page_tokens: tokens, .. } = kv.layout().shape;
    digest::sum(pages.iter().enumerate().map(|(index, page)| {
        digest::part(kv, &PagePart { page: *page, index, layers: 0..layers, heads: kv.heads(), tokens })
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_core::Instance;
    use host_core::layout::{Dtype, KvLayout, KvOrder};
    use host_core::notice::Notice;
    use host_core::transfer::Tag;

    fn write(room: u64, source: &[u32], layers: std::ops::Range<u32>) -> PageWrite {
        let source: Vec<PageId> = source.iter().map(|page| PageId(*page)).collect();
        PageWrite {
            tag: Tag(1),
            to: Instance(1),
            session: 1,
            notice: Notice { room: Room(room), attempt: 1, sequence: 0, pages: 0, last: false },
            target: source.clone(),
            source,
            layers,
            aux: None,
        }
    }

    #[test]
    fn parts_of_layers_give_the_digest_of_whole_pages() {
        let shape = KvShape {
            pages: 6,
            heads: 2,
            layers: 3,
            page_tokens: 4,
            head_dim: 8,
            value_dim: 8,
            dtype: Dtype::F32,
        };
        for order in KvOrder::ALL {
            let mut kv = KvMemory::new(KvLayout::new(shape, order)).unwrap();
            for page in 0..6 {
                for row in 0..2 * 3 * 2 * 4 {
                    let (head, layer, side, token) = (row / 24, row / 8 % 3, row / 4 % 2, row % 4);
                    kv.write_row(PageId(page), head, layer, side, token).fill(row as u8 ^ page as u8);
                }
            }
            let expected = whole(&kv, &[3, 0, 5, 1].map(PageId));
            let mut sent = SentDigests::default();
            for part in [write(1, &[3, 0], 0..1), write(2, &[4], 0..2), write(1, &[3, 0], 1..2)] {
                sent.add(&kv, &part);
            }
            for part in [write(1, &[3, 0], 2..3), write(1, &[5, 1], 0..3)] {
                sent.add(&kv, &part);
            }
            assert_eq!(sent.take(Room(1), 1), expected, "{order}");
            assert_eq!(sent.take(Room(1), 1), 0, "taken already");
            // Forgotten, as after too many rooms.
            sent.take(Room(2), 1);
            sent.add(&kv, &write(2, &[4], 2..3));
            assert_eq!(sent.take(Room(2), 1), whole(&kv, &[PageId(4)]));
        }
    }

    #[test]
    fn rooms_that_never_end_do_not_pile_up() {
        let shape = KvShape {
            pages: 1,
            heads: 1,
            layers: 2,
            page_tokens: 1,
            head_dim: 2,
            value_dim: 2,
            dtype: Dtype::F32,
        };
        let kv = KvMemory::new(KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim)).unwrap();
        let mut sent = SentDigests::default();
        for room in 0..ROOMS as u64 + 10 {
            sent.add(&kv, &write(room, &[0], 0..1));
        }
        assert_eq!(sent.0.len(), ROOMS);
    }
}
