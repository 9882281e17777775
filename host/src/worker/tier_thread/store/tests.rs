//! A store against a plugin that is slow, full, confused or gone.

use std::sync::Mutex;

use host_core::layout::{KvOrder, KvShape};
use host_core::{Dtype, KvLayout};
use host_plugin_api::{Memory, Result, Scanned, TierUsage};

use super::*;
use crate::executor::KvMemory;

/// What the test says that the plugin does.
#[derive(Default)]
struct Fake {
    /// Answers to what is submitted; 0 when there are no more.
    answers: Mutex<VecDeque<i32>>,
    /// Tags and sizes of what was taken.
    taken: Mutex<Vec<(u64, usize)>>,
    completions: Mutex<VecDeque<TierCompletion>>,
    cancelled: Mutex<Vec<u64>>,
    /// What polling answers, below zero.
    gone: Mutex<Option<i32>>,
}

impl Fake {
    fn submit(&self, tag: Tag, count: usize) -> i32 {
        let answer = self.answers.lock().unwrap().pop_front().unwrap_or(0);
        if answer == 0 {
            self.taken.lock().unwrap().push((tag.0, count));
        }
        answer
    }

    fn end(&self, tag: u64, page: u32, status: i32) {
        self.completions.lock().unwrap().push_back(TierCompletion { tag, page, status, bytes: 0 });
    }

    fn taken(&self) -> Vec<(u64, usize)> {
        self.taken.lock().unwrap().clone()
    }
}

impl StorageTier for Fake {
    fn limits(&self) -> TierLimits {
        TierLimits { max_pages: 4, max_batches: 2, max_value: 1 << 20, alignment: 1, reserved: [0; 4] }
    }
    fn register(&self, _memory: &Memory) -> Result<RegionId> {
        Ok(RegionId(1))
    }
    fn deregister(&self, _region: RegionId) -> Result<()> {
        Ok(())
    }
    fn exists(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.submit(tag, keys.len())
    }
    fn get(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        self.submit(tag, pages.len())
    }
    fn put(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        self.submit(tag, pages.len())
    }
    fn delete(&self, tag: Tag, keys: &[Key]) -> i32 {
        self.submit(tag, keys.len())
    }
    fn poll(&self, completions: &mut [TierCompletion]) -> i32 {
        if let Some(code) = *self.gone.lock().unwrap() {
            return code;
        }
        let mut waiting = self.completions.lock().unwrap();
        let count = waiting.len().min(completions.len());
        completions.iter_mut().zip(waiting.drain(..count)).for_each(|(slot, done)| *slot = done);
        count as i32
    }
    fn cancel(&self, tag: Tag) -> i32 {
        self.cancelled.lock().unwrap().push(tag.0);
        0
    }
    fn settled(&self, _tag: Tag) -> i32 {
        0
    }
    fn scan(&self, _cursor: u64, _keys: &mut [Key]) -> Result<Scanned> {
        Ok(Scanned::default())
    }
    fn usage(&self) -> Result<TierUsage> {
        Ok(TierUsage::default())
    }
    fn event_fd(&self) -> i32 {
        -1
    }
    fn shutdown(&self, _deadline_ms: u64) -> Result<()> {
        Ok(())
    }
}

const READ: TierTag = TierTag(7);

/// A store for pages of two heads, so that the plugin takes two pages at once, and two batches.
fn store() -> (Store, Arc<Fake>, HostMemory) {
    let shape = KvShape {
        pages: 2,
        heads: 2,
        layers: 1,
        page_tokens: 2,
        head_dim: 4,
        value_dim: 4,
        dtype: Dtype::Bf16,
    };
    let pool = KvMemory::new(KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim)).unwrap();
    let memory = HostMemory::new(&[pool], 8, 2, Some(1)).unwrap();
    let fake = Arc::new(Fake::default());
    (Store::open("fake", fake.clone(), &memory).unwrap(), fake, memory)
}

fn pages(count: u8) -> Vec<(PageHash, HostSlot)> {
    (0..count).map(|page| (PageHash([page; 32]), HostSlot(page.into()))).collect()
}

/// What the plugin would have read.
fn seal_all(memory: &HostMemory, pages: &[(PageHash, HostSlot)]) {
    for (name, slot) in pages {
        for block in memory.blocks(*slot, false) {
            memory.seal(&key(name, block.head), block.rank, block.offset);
        }
    }
}

fn turn(store: &mut Store, memory: &HostMemory) -> Vec<TierEvent> {
    let mut events = Vec::new();
    store.turn(memory, &mut events);
    events
}

#[test]
fn what_a_full_plugin_does_not_take_waits_and_goes_later_in_order() {
    let (mut store, fake, memory) = store();
    fake.answers.lock().unwrap().extend([0, ErrorCode::WOULD_BLOCK.0]);
    store.read(READ, &pages(5), &memory);
    assert_eq!(turn(&mut store, &memory), []);
    assert_eq!(fake.taken(), [(1, 4)]);
    assert!(store.wants_polling());
    turn(&mut store, &memory);
    seal_all(&memory, &pages(5));
    assert_eq!(fake.taken().len(), 2, "two batches are the most that it has said it takes");
    for (tag, count) in fake.taken() {
        (0..count as u32).for_each(|page| fake.end(tag, page, FOUND));
    }
    let ended = turn(&mut store, &memory);
    let done = |range: std::ops::Range<u32>| range.map(|page| (page, PageEnd::Done)).collect();
    assert_eq!(ended, [TierEvent::Ended { tag: READ, pages: done(0..4) }]);
    turn(&mut store, &memory);
    let (tag, count) = fake.taken()[2];
    assert_eq!(count, 2);
    fake.end(tag, 0, FOUND);
    fake.end(tag, 1, 0);
    assert_eq!(
        turn(&mut store, &memory),
        [TierEvent::Ended { tag: READ, pages: vec![(4, PageEnd::Missing)] }]
    );
    assert!(store.requests.is_empty() && store.batches.is_empty() && !store.wants_polling());
}

#[test]
fn ends_of_what_nobody_began_and_second_ends_change_nothing() {
    let (mut store, fake, memory) = store();
    store.write(READ, &pages(1), &memory);
    turn(&mut store, &memory);
    for (tag, page) in [(9, 0), (1, 77), (1, 0), (1, 0)] {
        fake.end(tag, page, FOUND);
    }
    assert_eq!(turn(&mut store, &memory), [], "one of two heads");
    fake.end(1, 1, ErrorCode::NO_RESOURCE.0);
    let refused = TierEvent::Ended { tag: READ, pages: vec![(0, PageEnd::Refused)] };
    assert_eq!(turn(&mut store, &memory), [refused]);
    fake.end(1, 1, FOUND);
    assert_eq!(turn(&mut store, &memory), []);
}

#[test]
fn cancelling_ends_what_the_plugin_was_not_given_and_waits_for_the_rest() {
    let (mut store, fake, memory) = store();
    fake.answers.lock().unwrap().extend([0, ErrorCode::WOULD_BLOCK.0]);
    store.read(READ, &pages(3), &memory);
    turn(&mut store, &memory);
    let mut events = Vec::new();
    store.cancel(READ, &mut events);
    assert_eq!(events, [TierEvent::Ended { tag: READ, pages: vec![(2, PageEnd::Failed)] }]);
    assert_eq!(*fake.cancelled.lock().unwrap(), [1]);
    (0..4).for_each(|page| fake.end(1, page, ErrorCode::CANCELLED.0));
    let failed = vec![(0, PageEnd::Failed), (1, PageEnd::Failed)];
    assert_eq!(turn(&mut store, &memory), [TierEvent::Ended { tag: READ, pages: failed }]);
    assert_eq!(fake.taken().len(), 1, "the rest is not begun any more");
}

#[test]
fn what_a_plugin_has_when_it_dies_never_ends_and_it_is_given_nothing_more() {
    let (mut store, fake, memory) = store();
    store.read(READ, &pages(1), &memory);
    turn(&mut store, &memory);
    *fake.gone.lock().unwrap() = Some(ErrorCode::INTERNAL.0);
    assert_eq!(turn(&mut store, &memory), [], "it may still write");
    store.ask(TierTag(8), &[PageHash([1; 32])], &memory);
    store.read(TierTag(9), &pages(2), &memory);
    let failed = vec![(0, PageEnd::Failed), (1, PageEnd::Failed)];
    let expected = [
        TierEvent::Answered { tag: TierTag(8), found: vec![false] },
        TierEvent::Ended { tag: TierTag(9), pages: failed },
    ];
    assert_eq!(turn(&mut store, &memory), expected);
    assert_eq!(fake.taken().len(), 1);
}

#[test]
fn a_page_is_found_when_all_its_heads_are() {
    let (mut store, fake, memory) = store();
    store.ask(READ, &[PageHash([1; 32]), PageHash([2; 32])], &memory);
    turn(&mut store, &memory);
    for (object, status) in [FOUND, FOUND, 0, FOUND].into_iter().enumerate() {
        fake.end(1, object as u32, status);
    }
    assert_eq!(turn(&mut store, &memory), [TierEvent::Answered { tag: READ, found: vec![true, false] }]);
}

#[test]
fn what_a_plugin_found_is_used_only_if_it_is_what_was_written_and_is_removed_if_not() {
    let (mut store, fake, memory) = store();
    let pages = pages(2);
    store.write(TierTag(6), &pages, &memory);
    turn(&mut store, &memory);
    (0..4).for_each(|page| fake.end(1, page, FOUND));
    turn(&mut store, &memory);
    // The second page is read into the slot of the first, as if the plugin had taken one for the other.
    store.read(READ, &[pages[0], (pages[1].0, pages[0].1)], &memory);
    turn(&mut store, &memory);
    (0..4).for_each(|page| fake.end(2, page, FOUND));
    let ended = TierEvent::Ended { tag: READ, pages: vec![(0, PageEnd::Done), (1, PageEnd::Damaged)] };
    assert_eq!(turn(&mut store, &memory), [ended]);
    turn(&mut store, &memory);
    assert_eq!(fake.taken()[2..], [(3, 2)], "both heads of it are deleted");
    (0..2).for_each(|page| fake.end(3, page, FOUND));
    assert_eq!(turn(&mut store, &memory), []);
    assert!(store.requests.is_empty() && store.batches.is_empty() && store.damaged.is_empty());
}
