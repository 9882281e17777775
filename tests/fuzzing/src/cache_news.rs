//! Fuzzes news of workers' caches and the router's index of prefixes.

use host_core::routing::{Applied, BlockKey, PrefixIndex, WorkerSlot};
use host_wire::cache_news::{News, read};
use host_wire::proto::CacheNews;
use prost::Message as _;

use crate::reader::Decisions;

/// Limits of blocks of the workers.
const LIMITS: [u64; 3] = [4, 16, 1000];

/// Applies news to an index. An input has pieces, each with a worker, a length, and news as protobuf. True when any news was
/// read.
///
/// # Panics
/// When the index holds more blocks of a worker than its pool can, or blocks of workers that are gone.
#[must_use]
pub fn cache_news(bytes: &[u8]) -> bool {
    let mut decisions = Decisions(bytes);
    let mut index = PrefixIndex::default();
    let slots = LIMITS.map(|limit| index.add_worker(limit));
    let mut read_any = false;
    while let Some(worker) = decisions.byte() {
        let slot = slots[usize::from(worker) % slots.len()];
        let length = usize::from(decisions.byte().unwrap_or(0));
        let Some(news) = CacheNews::decode(decisions.piece(length)).ok().and_then(read) else { continue };
        read_any = true;
        follow(&mut index, slot, news);
        for (slot, limit) in slots.iter().zip(LIMITS) {
            assert!(index.blocks(*slot) <= limit, "{slot:?} has {} of {limit}", index.blocks(*slot));
        }
        let prompt = [0, 1, 2, 3].map(BlockKey);
        assert!(index.matches(&prompt).iter().all(|matched| *matched as usize <= prompt.len()));
    }
    for slot in slots {
        index.remove_worker(slot);
    }
    assert!(index.is_empty(), "{} blocks of workers that are gone", index.len());
    read_any
}

/// Applies news as the router does: after a gap the router asks the worker to resume.
fn follow(index: &mut PrefixIndex, slot: WorkerSlot, news: News) {
    let applied = match news {
        News::Part(part) => index.take(slot, &part),
        News::Events(first, events) => {
            let numbered = (first..).zip(&events);
            let applied: Vec<Applied> =
                numbered.map(|(number, event)| index.apply(slot, number, event)).collect();
            applied.last().copied().unwrap_or(Applied::Repeat)
        }
    };
    if applied == Applied::Gap {
        assert!(index.resume(slot).is_some());
    }
}
