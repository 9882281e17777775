//! A store against a plugin that is slow, full, confused or gone.

mod told;

use std::sync::Mutex;

use host_core::layout::{KvOrder, KvShape};
use host_core::{Dtype, KvLayout};
use host_executor::KvMemory;
use host_plugin_api::{Memory, Result, Scanned, Tag, TierUsage};

use super::*;

/// A plugin whose behaviour the test sets.
#[derive(Default)]
struct Fake {
    /// Answers to submissions. The answer is 0 when there are no more.
    answers: Mutex<VecDeque<i32>>,
    /// Tags and sizes of what was taken.
    taken: Mutex<Vec<(u64, usize)>>,
    completions: Mutex<VecDeque<TierCompletion>>,
    cancelled: Mutex<Vec<u64>>,
    /// The negative code that polling answers.
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
        self.completions.lock().unwrap().push_back(TierCompletion { tag: Tag(tag), page, status, bytes: 0 });
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
    let fake = Arc::new(Fake::default());
    let memory = memory();
    (Store::open("fake", fake.clone(), &memory).unwrap(), fake, memory)
}

fn shape() -> KvShape {
    KvShape { pages: 2, heads: 2, layers: 1, page_tokens: 2, head_dim: 4, value_dim: 4, dtype: Dtype::Bf16 }
}

fn memory() -> HostMemory {
    let pool = KvMemory::new(KvLayout::new(shape(), KvOrder::PageHeadLayerKvTokenDim)).unwrap();
    HostMemory::new(&[pool], 8, 2, Some(1)).unwrap()
}

fn pages(count: u8) -> Vec<(PageHash, HostSlot)> {
    (0..count).map(|page| (PageHash([page; 32]), HostSlot(page.into()))).collect()
}

/// Writes the seals that the plugin would have read.
fn seal_all(memory: &HostMemory, pages: &[(PageHash, HostSlot)]) {
    for (name, slot) in pages {
        for block in memory.blocks(*slot, false) {
            memory.seal(&key(name, block.head), block.rank, block.offset);
        }
    }
}

fn begin(store: &mut Store, memory: &HostMemory, action: TierAction) -> Vec<TierEvent> {
    let mut events = Vec::new();
    store.begin(action, memory, &mut events);
    events
}

fn read(store: &mut Store, memory: &HostMemory, tag: TierTag, pages: Vec<(PageHash, HostSlot)>) {
    assert_eq!(begin(store, memory, TierAction::Read { tag, tier: 0, pages }), []);
}

fn write(store: &mut Store, memory: &HostMemory, tag: TierTag, pages: Vec<(PageHash, HostSlot)>) {
    assert_eq!(begin(store, memory, TierAction::Write { tag, tier: 0, pages }), []);
}

fn ask(store: &mut Store, memory: &HostMemory, tag: TierTag, pages: std::ops::Range<u8>) {
    let names = pages.map(|page| PageHash([page; 32])).collect();
    assert_eq!(begin(store, memory, TierAction::Query { tag, tier: 0, names }), []);
}

/// Takes one turn. Returns its events, and what is to be done then.
fn next(store: &mut Store, memory: &HostMemory) -> (Vec<TierEvent>, Next) {
    let mut events = Vec::new();
    let next = store.turn(memory, &mut events);
    (events, next)
}

fn turn(store: &mut Store, memory: &HostMemory) -> Vec<TierEvent> {
    next(store, memory).0
}

#[test]
fn what_a_full_plugin_does_not_take_waits_and_goes_later_in_order() {
    let (mut store, fake, memory) = store();
    fake.answers.lock().unwrap().extend([0, ErrorCode::WOULD_BLOCK.0]);
    read(&mut store, &memory, READ, pages(5));
    assert_eq!(next(&mut store, &memory), (vec![], Next::Look));
    assert_eq!(fake.taken(), [(1, 4)]);
    turn(&mut store, &memory);
    seal_all(&memory, &pages(5));
    assert_eq!(fake.taken().len(), 2, "two batches are the most that it has said it takes");
    for (tag, count) in fake.taken() {
        (0..count as u32).for_each(|page| fake.end(tag, page, FOUND));
    }
    let ended = turn(&mut store, &memory);
    let done = |range: std::ops::Range<u32>| range.map(|page| (page, PageEnd::Done)).collect();
    assert_eq!(ended, [TierEvent::Ended { tag: READ, pages: done(0..4) }]);
    // The completed batches made room, so the last objects were submitted in the same turn.
    let (tag, count) = fake.taken()[2];
    assert_eq!(count, 2);
    fake.end(tag, 0, FOUND);
    fake.end(tag, 1, 0);
    let missing = TierEvent::Ended { tag: READ, pages: vec![(4, PageEnd::Missing)] };
    assert_eq!(next(&mut store, &memory), (vec![missing], Next::Sleep));
    assert!(store.requests.is_empty() && store.batches.is_empty());
}

#[test]
fn what_requests_wait_for_goes_before_what_is_to_be_written() {
    let (mut store, fake, memory) = store();
    write(&mut store, &memory, TierTag(5), pages(6));
    turn(&mut store, &memory);
    assert_eq!(fake.taken(), [(1, 4), (2, 4)], "a third of it waits");
    read(&mut store, &memory, READ, pages(1));
    ask(&mut store, &memory, TierTag(8), 0..1);
    for tag in 1..3 {
        (0..4).for_each(|page| fake.end(tag, page, FOUND));
    }
    turn(&mut store, &memory);
    assert_eq!(fake.taken()[2..], [(3, 2), (4, 2)]);
    assert_eq!(store.batches[&3].of, Some(READ));
    assert_eq!(store.batches[&4].of, Some(TierTag(8)));
}

#[test]
fn ends_of_what_was_not_begun_and_second_ends_change_nothing() {
    let (mut store, fake, memory) = store();
    write(&mut store, &memory, READ, pages(1));
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
    read(&mut store, &memory, READ, pages(3));
    turn(&mut store, &memory);
    let events = begin(&mut store, &memory, TierAction::Cancel { tag: READ, tier: 0 });
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
    read(&mut store, &memory, READ, pages(1));
    turn(&mut store, &memory);
    *fake.gone.lock().unwrap() = Some(ErrorCode::INTERNAL.0);
    assert_eq!(turn(&mut store, &memory), [], "it may still write");
    ask(&mut store, &memory, TierTag(8), 1..2);
    read(&mut store, &memory, TierTag(9), pages(2));
    let failed = vec![(0, PageEnd::Failed), (1, PageEnd::Failed)];
    let expected = [
        TierEvent::Answered { tag: TierTag(8), found: vec![false] },
        TierEvent::Ended { tag: TierTag(9), pages: failed },
    ];
    assert_eq!(next(&mut store, &memory), (expected.to_vec(), Next::Sleep));
    assert_eq!(fake.taken().len(), 1);
}

#[test]
fn what_panicked_never_ends_and_the_rest_fails() {
    let (mut store, fake, memory) = store();
    fake.answers.lock().unwrap().extend([0, ErrorCode::PANICKED.0]);
    read(&mut store, &memory, READ, pages(5));
    let events = turn(&mut store, &memory);
    let failed = TierEvent::Ended { tag: READ, pages: vec![(4, PageEnd::Failed)] };
    assert_eq!(events, [failed], "the plugin may write to the four pages that it was given");
    read(&mut store, &memory, TierTag(9), pages(1));
    let failed = TierEvent::Ended { tag: TierTag(9), pages: vec![(0, PageEnd::Failed)] };
    assert_eq!(next(&mut store, &memory), (vec![failed], Next::Sleep));
    assert_eq!(fake.taken().len(), 1, "it is given nothing more");
}

#[test]
fn a_page_is_found_when_all_its_heads_are() {
    let (mut store, fake, memory) = store();
    ask(&mut store, &memory, READ, 1..3);
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
    write(&mut store, &memory, TierTag(6), pages.clone());
    turn(&mut store, &memory);
    (0..4).for_each(|page| fake.end(1, page, FOUND));
    turn(&mut store, &memory);
    // The second page is read into the slot of the first, as if the plugin had taken one for the other.
    read(&mut store, &memory, READ, vec![pages[0], (pages[1].0, pages[0].1)]);
    turn(&mut store, &memory);
    (0..4).for_each(|page| fake.end(2, page, FOUND));
    let ended = TierEvent::Ended { tag: READ, pages: vec![(0, PageEnd::Done), (1, PageEnd::Damaged)] };
    assert_eq!(turn(&mut store, &memory), [ended]);
    assert_eq!(fake.taken()[2..], [(3, 2)], "both heads of it are deleted");
    (0..2).for_each(|page| fake.end(3, page, FOUND));
    assert_eq!(turn(&mut store, &memory), []);
    assert!(store.requests.is_empty() && store.batches.is_empty() && store.damaged.is_empty());
}
