//! What lies below the pools, and what can go wrong there. A slow, wrong or hanging tier may write garbage into the slots
//! that it was given, at any time until it says that it has ended.

use std::collections::BTreeMap;

use host_core::hierarchy::{Direction, HostSlot, PageEnd, TierAction, TierEvent, TierTag};
use host_core::radix::PageHash;
use host_core::{Event, Instance, PageId};

use super::super::memory::LAYERS;
use super::{Pending, World};

/// What is stored, by tier. It outlives workers.
#[derive(Default)]
pub struct Storage(BTreeMap<(usize, PageHash), Vec<u64>>);

/// Something that was begun.
pub enum Batch {
    Copy { tag: TierTag, direction: Direction, pages: Vec<(PageId, HostSlot)>, read: Vec<Vec<u64>> },
    Query { tag: TierTag, tier: usize, names: Vec<PageHash> },
    Read { tag: TierTag, tier: usize, page: (u32, PageHash, HostSlot) },
    Write { tag: TierTag, tier: usize, page: (u32, PageHash, HostSlot) },
}

impl Batch {
    fn tag(&self) -> TierTag {
        match self {
            Batch::Copy { tag, .. }
            | Batch::Query { tag, .. }
            | Batch::Read { tag, .. }
            | Batch::Write { tag, .. } => *tag,
        }
    }
}

fn slot(slot: HostSlot) -> PageId {
    PageId(slot.0)
}

impl World {
    pub(super) fn begin_below(&mut self, at: Instance, action: TierAction) {
        match action {
            TierAction::Copy { tag, direction, pages } => {
                let Some(worker) = self.worker(at) else { return };
                let from = |(page, host): &(PageId, HostSlot)| match direction {
                    Direction::Save => worker.memory.words(*page, 0, LAYERS).to_vec(),
                    Direction::Load => worker.host.words(slot(*host), 0, LAYERS).to_vec(),
                };
                let read = pages.iter().map(from).collect();
                let after = self.soon(10);
                self.schedule(
                    after,
                    Pending::Below { at, batch: Batch::Copy { tag, direction, pages, read } },
                );
            }
            TierAction::Query { tag, tier, names } => {
                // Seconds late, or lost: the answer is not waited for, and must do no harm.
                let late = self.random.chance(self.faults.tier);
                let after = self.soon(if late { 20_000 } else { 15 });
                self.schedule(after, Pending::Below { at, batch: Batch::Query { tag, tier, names } });
            }
            TierAction::Read { tag, tier, pages } => {
                self.begin_pages(at, pages, |page| Batch::Read { tag, tier, page });
            }
            TierAction::Write { tag, tier, pages } => {
                self.begin_pages(at, pages, |page| Batch::Write { tag, tier, page });
            }
            TierAction::Cancel { tag, .. } => {
                // What hangs comes to an end some time after.
                let hangs = |what: &Pending| matches!(what, Pending::Below { at: other, batch } if *other == at && batch.tag() == tag);
                let keys: Vec<_> =
                    self.pending.iter().filter(|(_, what)| hangs(what)).map(|(key, _)| *key).collect();
                for key in keys {
                    if let Some(what) = self.pending.remove(&key) {
                        let after = self.soon(if self.random.0.is_multiple_of(4) { 30_000 } else { 100 });
                        self.schedule(after, what);
                    }
                }
            }
        }
    }

    /// Each page takes its time; a batch that hangs does so until it is cancelled, and longer.
    fn begin_pages(
        &mut self,
        at: Instance,
        pages: Vec<(PageHash, HostSlot)>,
        batch: impl Fn((u32, PageHash, HostSlot)) -> Batch,
    ) {
        let hangs = self.random.chance(self.faults.tier);
        self.outcome.hung += u64::from(hangs);
        for (place, (name, slot)) in (0..).zip(pages) {
            let most = match hangs {
                true if place > 0 || self.random.chance(0.5) => 3_600_000,
                _ => 6,
            };
            let after = self.soon(most);
            self.schedule(after, Pending::Below { at, batch: batch((place, name, slot)) });
        }
    }

    pub(super) fn below(&mut self, at: Instance, batch: Batch) {
        let event = match batch {
            Batch::Copy { tag, direction, pages, read } => {
                let mut ends = Vec::new();
                for (place, ((page, host), words)) in (0..).zip(pages.iter().zip(&read)) {
                    let fails = self.random.chance(self.faults.copy);
                    let Some(worker) = self.worker(at) else { return };
                    let (to, target) = match direction {
                        Direction::Save => {
                            assert_eq!(
                                worker.memory.words(*page, 0, LAYERS),
                                words,
                                "{page:?} was changed while it was copied"
                            );
                            (&mut worker.host, slot(*host))
                        }
                        Direction::Load => {
                            let there = worker.host.words(slot(*host), 0, LAYERS);
                            assert_eq!(there, words, "{host:?} was changed while it was copied");
                            (&mut worker.memory, *page)
                        }
                    };
                    match fails {
                        true => to.put(target, 0, &words[..1]),
                        false => to.put(target, 0, words),
                    }
                    ends.push((place, if fails { PageEnd::Failed } else { PageEnd::Done }));
                }
                TierEvent::Ended { tag, pages: ends }
            }
            Batch::Query { tag, tier, names } => {
                let mut found = Vec::new();
                for name in names {
                    let there = self.storage.0.contains_key(&(tier, name));
                    found.push(there != self.random.chance(self.faults.tier));
                }
                TierEvent::Answered { tag, found }
            }
            Batch::Read { tag, tier, page: (place, name, host) } => {
                let trouble = self.random.chance(self.faults.tier);
                let forgets = trouble && self.random.chance(0.3);
                let found = match forgets {
                    true => self.storage.0.remove(&(tier, name)),
                    false => self.storage.0.get(&(tier, name)).cloned(),
                };
                let Some(worker) = self.worker(at) else { return };
                let end = match found {
                    Some(words) if !trouble => {
                        worker.host.put(slot(host), 0, &words);
                        PageEnd::Done
                    }
                    Some(words) => {
                        // Cut off, with what was there before behind it; or something else altogether.
                        worker.host.put(slot(host), 0, &words[..words.len() / 2]);
                        worker.host.flip(slot(host), 0, 5);
                        if forgets { PageEnd::Missing } else { PageEnd::Failed }
                    }
                    None => PageEnd::Missing,
                };
                TierEvent::Ended { tag, pages: vec![(place, end)] }
            }
            Batch::Write { tag, tier, page: (place, name, host) } => {
                let refuses = self.random.chance(self.faults.tier);
                let Some(worker) = self.worker(at) else { return };
                let words = worker.host.words(slot(host), 0, LAYERS).to_vec();
                let before = self.storage.0.get(&(tier, name));
                assert!(before.is_none_or(|before| *before == words), "two contents under one name");
                let end = match refuses {
                    true => PageEnd::Refused,
                    false => {
                        self.storage.0.insert((tier, name), words);
                        PageEnd::Done
                    }
                };
                TierEvent::Ended { tag, pages: vec![(place, end)] }
            }
        };
        self.handle(at, Event::Tier(event));
    }
}
