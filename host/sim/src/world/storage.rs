//! Host memory and storage tiers, and what can go wrong there. A slow, wrong or hanging tier may write garbage into the slots
//! that it was given, at any time until it says that it has ended.

use std::collections::BTreeMap;
use std::time::Duration;

use host_core::hierarchy::{Direction, HostSlot, PageEnd, TierAction, TierEvent};
use host_core::radix::PageHash;
use host_core::{Event, Instance, PageId};

use super::pending::TierWork;
use super::{Clients, Pending, World};
use crate::times::Work;

/// The longest delay of an answer to a query that is late or lost. No request waits for it, and it must do no harm.
const LATE_ANSWER: Duration = Duration::from_secs(20);
/// The longest time that work hangs. Most of it hangs until it is cancelled.
const HANGS: Duration = Duration::from_secs(3_600);
/// The longest time until cancelled work ends: usually, and in some cases.
const CANCELLED: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(30)];

/// Stored pages, by tier and name. They outlive workers.
#[derive(Default)]
pub(super) struct Storage(BTreeMap<(usize, PageHash), Vec<u64>>);

impl Storage {
    pub(super) fn lose_all(&mut self) {
        self.0.clear();
    }
}

fn slot(slot: HostSlot) -> PageId {
    PageId(slot.0)
}

impl<C: Clients> World<C> {
    pub(super) fn begin_tier(&mut self, at: Instance, action: TierAction) {
        match action {
            TierAction::Copy { tag, direction, pages } => {
                let Some(worker) = self.worker(at) else { return };
                let from = |(page, host): &(PageId, HostSlot)| match direction {
                    Direction::Save => worker.memory.page(*page).to_vec(),
                    Direction::Load => worker.host.page(slot(*host)).to_vec(),
                };
                let read = pages.iter().map(from).collect();
                let takes = Work::Copy { at: self.place(at), direction, pages: pages.len() };
                self.later(takes, Pending::Tier { at, work: TierWork::Copy { tag, direction, pages, read } });
            }
            TierAction::Query { tag, tier, names } => {
                let asks = Work::Query { at: self.place(at), tier, pages: names.len() };
                let work = TierWork::Query { tag, tier, names };
                if self.strikes(self.faults.tier, || format!("an answer of tier {tier} is late")) {
                    let wait = self.soon(LATE_ANSWER);
                    self.agenda.after(wait, Pending::Tier { at, work });
                } else {
                    self.later(asks, Pending::Tier { at, work });
                }
            }
            TierAction::Read { tag, tier, pages } => {
                let takes = Work::Read { at: self.place(at), tier };
                self.begin_pages(at, takes, pages, |page| TierWork::Read { tag, tier, page });
            }
            TierAction::Write { tag, tier, pages } => {
                let takes = Work::Store { at: self.place(at), tier };
                self.begin_pages(at, takes, pages, |page| TierWork::Write { tag, tier, page });
            }
            TierAction::Cancel { tag, .. } => {
                // Hanging work ends some time after it was cancelled.
                let hanging = self.agenda.take_where(|what| {
                    matches!(what, Pending::Tier { at: other, work } if *other == at && work.tag() == tag)
                });
                for what in hanging {
                    let late = usize::from(self.faults.tier > 0.0 && self.random.chance(0.25));
                    let wait = self.soon(CANCELLED[late]);
                    self.agenda.after(wait, what);
                }
            }
        }
    }

    /// Begins the pages of a batch, each with a time of its own. A batch that hangs does so until it is cancelled, and
    /// longer.
    fn begin_pages(
        &mut self,
        at: Instance,
        takes: Work<'_>,
        pages: Vec<(PageHash, HostSlot)>,
        work: impl Fn((u32, PageHash, HostSlot)) -> TierWork,
    ) {
        let hangs = self.strikes(self.faults.tier, || "a batch of a tier hangs".to_owned());
        self.outcome.hung += u64::from(hangs);
        for (place, (name, slot)) in (0..).zip(pages) {
            let what = Pending::Tier { at, work: work((place, name, slot)) };
            if hangs && (place > 0 || self.random.chance(0.5)) {
                let wait = self.soon(HANGS);
                self.agenda.after(wait, what);
            } else {
                self.later(takes, what);
            }
        }
    }

    pub(super) fn tier(&mut self, at: Instance, work: TierWork) {
        let event = match work {
            TierWork::Copy { tag, direction, pages, read } => {
                let pages = pages.iter().zip(&read);
                let ends = pages.map(|(pair, words)| self.copy_page(at, direction, *pair, words));
                TierEvent::Ended { tag, pages: (0..).zip(ends).collect() }
            }
            TierWork::Query { tag, tier, names } => {
                let mut found = Vec::new();
                for name in names {
                    let there = self.storage.0.contains_key(&(tier, name));
                    let lies = self.strikes(self.faults.tier, || format!("tier {tier} gives a wrong answer"));
                    found.push(there != lies);
                }
                TierEvent::Answered { tag, found }
            }
            TierWork::Read { tag, tier, page: (place, name, host) } => {
                TierEvent::Ended { tag, pages: vec![(place, self.read_page(at, (tier, name), slot(host)))] }
            }
            TierWork::Write { tag, tier, page: (place, name, host) } => {
                TierEvent::Ended { tag, pages: vec![(place, self.write_page(at, (tier, name), slot(host)))] }
            }
        };
        self.handle(at, Event::Tier(event));
    }

    fn copy_page(
        &mut self,
        at: Instance,
        direction: Direction,
        (page, host): (PageId, HostSlot),
        words: &[u64],
    ) -> PageEnd {
        let fails = self.strikes(self.faults.copy, || "a copy fails".to_owned());
        let Some(worker) = self.worker(at) else { return PageEnd::Failed };
        let (from, to) = match direction {
            Direction::Save => (worker.memory.page(page), (&mut worker.host, slot(host))),
            Direction::Load => (worker.host.page(slot(host)), (&mut worker.memory, page)),
        };
        assert_eq!(from, words, "{page:?} or {host:?} was changed while it was copied: {direction:?}");
        match fails {
            true => to.0.put(to.1, 0, &words[..words.len().min(1)]),
            false => to.0.put(to.1, 0, words),
        }
        if fails { PageEnd::Failed } else { PageEnd::Done }
    }

    fn read_page(&mut self, at: Instance, name: (usize, PageHash), slot: PageId) -> PageEnd {
        if self.faults.missing > 0.0 && self.strikes(self.faults.missing, || "a tier has no page".to_owned())
        {
            self.storage.0.remove(&name);
            return PageEnd::Missing;
        }
        let trouble = self.strikes(self.faults.tier, || "a tier reads wrong".to_owned());
        let forgets = trouble && self.random.chance(0.3);
        let found = match forgets {
            true => self.storage.0.remove(&name),
            false => self.storage.0.get(&name).cloned(),
        };
        let (Some(worker), Some(words)) = (self.worker(at), found) else { return PageEnd::Missing };
        if !trouble {
            worker.host.put(slot, 0, &words);
            return PageEnd::Done;
        }
        // The page is cut off in the middle, with the slot's earlier contents behind it, and one of its bits is
        // flipped.
        worker.host.put(slot, 0, &words[..words.len() / 2]);
        worker.host.flip(slot, 0, 5);
        if forgets { PageEnd::Missing } else { PageEnd::Failed }
    }

    fn write_page(&mut self, at: Instance, name: (usize, PageHash), slot: PageId) -> PageEnd {
        let refuses = self.strikes(self.faults.tier, || "a tier refuses a write".to_owned());
        let Some(worker) = self.worker(at) else { return PageEnd::Failed };
        let words = worker.host.page(slot).to_vec();
        let before = self.storage.0.get(&name);
        assert!(before.is_none_or(|before| *before == words), "two contents under one name");
        if refuses {
            return PageEnd::Refused;
        }
        self.storage.0.insert(name, words);
        PageEnd::Done
    }
}
