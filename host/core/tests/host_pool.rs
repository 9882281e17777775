//! Host memory against a naive model, step by step: both find the same pages and evict the same page, every slot is in exactly one
//! state, and no slot is free while it is written or used.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should panic")]

use std::collections::BTreeMap;

use host_core::hierarchy::{FoundSlot, HostCounts, HostPool, HostSlot};
use host_core::radix::PageHash;
use host_sim::Random;

const SLOTS: u32 = 6;
const NAMES: u8 = 12;
const SEEDS: u64 = 300;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Is {
    Filling,
    Ready,
    Spoilt,
    Abandoned,
}

/// One slot that is not free.
#[derive(Clone, Copy, Debug)]
struct Page {
    is: Is,
    name: Option<u8>,
    pins: u32,
    /// The step in which it was last released.
    released: u64,
}

/// Events that must have occurred in some run. Without them the runs prove little.
#[derive(Debug, Default)]
struct Seen {
    evicted: u64,
    refused: u64,
    spoilt: u64,
    abandoned: u64,
    cleared_in_use: u64,
}

struct World {
    random: Random,
    step: u64,
    pool: HostPool,
    model: BTreeMap<HostSlot, Page>,
    seen: Seen,
}

fn name(number: u8) -> PageHash {
    PageHash([number; 32])
}

impl World {
    fn below(&mut self, bound: usize) -> usize {
        self.random.place(bound)
    }

    /// A random slot for which `wanted` is true.
    fn one(&mut self, wanted: impl Fn(&Page) -> bool) -> Option<HostSlot> {
        let slots: Vec<HostSlot> =
            self.model.iter().filter(|(_, page)| wanted(page)).map(|(slot, _)| *slot).collect();
        if slots.is_empty() { None } else { Some(slots[self.below(slots.len())]) }
    }

    fn begin(&mut self) {
        let number = self.below(NAMES.into()) as u8;
        if self.model.values().any(|page| page.name == Some(number)) {
            return;
        }
        let oldest = self.model.iter().filter(|(_, page)| page.is == Is::Ready && page.pins == 0);
        let oldest = oldest.min_by_key(|(_, page)| page.released).map(|(slot, _)| *slot);
        let full = self.model.len() == SLOTS as usize;
        let begun = self.pool.begin(name(number));
        match (full, oldest) {
            (true, None) => {
                assert_eq!(begun, None);
                self.seen.refused += 1;
                return;
            }
            (true, Some(oldest)) => {
                assert_eq!(begun, Some(oldest), "the least recently used makes way");
                self.seen.evicted += 1;
            }
            (false, _) => assert!(!self.model.contains_key(&begun.unwrap())),
        }
        let page = Page { is: Is::Filling, name: Some(number), pins: 0, released: 0 };
        self.model.insert(begun.unwrap(), page);
    }

    fn ended(&mut self) {
        let Some(slot) = self.one(|page| matches!(page.is, Is::Filling | Is::Abandoned)) else { return };
        let good = self.below(3) > 0;
        let page = self.model.get_mut(&slot).unwrap();
        let here = page.is == Is::Filling && good;
        assert_eq!(self.pool.ended(slot, good), here);
        if here {
            (page.is, page.released) = (Is::Ready, self.step);
        } else {
            (page.is, page.name) = (Is::Spoilt, None);
            self.seen.spoilt += u64::from(page.pins > 0);
        }
    }

    fn unpin(&mut self) {
        let Some(slot) = self.one(|page| page.pins > 0) else { return };
        self.pool.unpin(slot);
        let page = self.model.get_mut(&slot).unwrap();
        page.pins -= 1;
        page.released = self.step;
        if page.pins == 0 && page.is == Is::Ready && page.name.is_none() {
            page.is = Is::Spoilt;
        }
    }

    fn clear(&mut self) {
        let mut writing: Vec<HostSlot> =
            self.model.iter().filter(|(_, page)| page.is == Is::Filling).map(|(slot, _)| *slot).collect();
        let mut told = self.pool.clear();
        writing.sort();
        told.sort();
        assert_eq!(told, writing);
        for page in self.model.values_mut() {
            page.name = None;
            page.is = if page.is == Is::Filling { Is::Abandoned } else { page.is };
            self.seen.cleared_in_use += u64::from(page.pins > 0 && page.is == Is::Ready);
        }
        self.model.retain(|_, page| page.is != Is::Ready || page.pins > 0);
    }

    fn take(&mut self) {
        self.step += 1;
        match self.below(20) {
            0..=5 => self.begin(),
            6..=9 => self.ended(),
            10..=13 => {
                if let Some(slot) = self.one(|_| true) {
                    self.pool.pin(slot);
                    self.model.get_mut(&slot).unwrap().pins += 1;
                }
            }
            14..=17 => self.unpin(),
            18 => {
                if let Some(slot) = self.one(|page| page.is == Is::Filling) {
                    self.pool.give_up(slot);
                    let page = self.model.get_mut(&slot).unwrap();
                    (page.is, page.name) = (Is::Abandoned, None);
                    self.seen.abandoned += 1;
                }
            }
            _ if self.below(5) == 0 => self.clear(),
            _ => {}
        }
        self.model.retain(|_, page| page.is != Is::Spoilt || page.pins > 0);
    }

    fn check(&self) {
        self.pool.audit();
        for number in 0..NAMES {
            let there = self.model.iter().find(|(_, page)| page.name == Some(number));
            let expected = there.map(|(slot, page)| match page.is {
                Is::Ready => FoundSlot::Ready(*slot),
                _ => FoundSlot::Filling(*slot),
            });
            assert_eq!(self.pool.find(&name(number)), expected);
        }
        let count = |is| self.model.values().filter(|page| page.is == is).count();
        let expected = HostCounts {
            free: SLOTS as usize - self.model.len(),
            filling: count(Is::Filling),
            ready: count(Is::Ready),
            spoilt: count(Is::Spoilt),
            abandoned: count(Is::Abandoned),
        };
        assert_eq!(self.pool.counts(), expected);
        assert_eq!(self.pool.pinned(), self.model.values().filter(|page| page.pins > 0).count());
    }
}

#[test]
fn host_memory_equals_the_model() {
    let mut seen = Seen::default();
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let (pool, model) = (HostPool::new(SLOTS), BTreeMap::new());
        let mut world = World { random: Random::new(seed), step: 0, pool, model, seen };
        for _ in 0..400 {
            world.take();
            world.check();
        }
        seen = world.seen;
    }
    println!("{seen:?}");
    let all = [seen.evicted, seen.refused, seen.spoilt, seen.abandoned, seen.cleared_in_use];
    assert!(all.iter().all(|count| *count > SEEDS / 10), "something hardly ever happened");
}
