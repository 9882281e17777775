//! A leg with host memory and storage below its pool, and what answers for them.

use std::collections::BTreeSet;
use std::time::Duration;

use host_core::hierarchy::{
    Direction, HierarchyConfig, HostSlot, PageEnd, TierAction, TierConfig, TierEvent, TierTag,
};
use host_core::radix::{NamespaceKey, PageHash};
use host_core::{Config, Event, PageId, Role};

use super::leg::{Leg, PAGE, config};

/// Names of the pages of a prompt.
pub fn names(prompt: &[u32]) -> Vec<PageHash> {
    let mut last = PageHash([0; 32]).namespace(&NamespaceKey::default());
    let next = |tokens: &[u32]| {
        last = last.next(tokens);
        last
    };
    prompt.chunks_exact(PAGE).map(next).collect()
}

/// A tier that answers in a millisecond and reads a page in one more.
pub fn tier() -> TierConfig {
    TierConfig { writes: true, latency: Duration::from_millis(1), bytes_per_second: 1e6 }
}

/// So many slots of 1000 bytes, and these tiers.
pub fn hierarchy(slots: u32, tiers: usize) -> HierarchyConfig {
    HierarchyConfig::new(slots, 1_000, vec![tier(); tiers])
}

pub fn with_below(role: Role, pages: u32, below: HierarchyConfig) -> Config {
    Config { hierarchy: Some(below), reserved_decode_tokens: 1, ..config(role, pages) }
}

impl Leg {
    /// Does everything that is asked for below the pool, at once, until nothing is asked for. `stored` is what all tiers
    /// hold.
    pub fn serve(&mut self, stored: &mut BTreeSet<PageHash>) {
        while !self.below.is_empty() {
            for action in std::mem::take(&mut self.below) {
                let found = |there| if there { PageEnd::Done } else { PageEnd::Missing };
                match action {
                    TierAction::Copy { tag, pages, .. } => self.all_end(tag, pages.len(), PageEnd::Done),
                    TierAction::Query { tag, names, .. } => {
                        let found = names.iter().map(|name| stored.contains(name)).collect();
                        self.event(Event::Tier(TierEvent::Answered { tag, found }));
                    }
                    TierAction::Read { tag, pages, .. } => {
                        let ends = pages.iter().map(|(name, _)| found(stored.contains(name)));
                        let pages = (0..).zip(ends).collect();
                        self.event(Event::Tier(TierEvent::Ended { tag, pages }));
                    }
                    TierAction::Write { tag, pages, .. } => {
                        stored.extend(pages.iter().map(|(name, _)| *name));
                        self.all_end(tag, pages.len(), PageEnd::Done);
                    }
                    TierAction::Cancel { .. } => {}
                }
            }
        }
    }

    /// All pages of a batch end alike.
    pub fn all_end(&mut self, tag: TierTag, pages: usize, end: PageEnd) {
        let pages = (0..pages as u32).map(|place| (place, end)).collect();
        self.event(Event::Tier(TierEvent::Ended { tag, pages }));
    }

    /// The only query that is asked; it is answered with this.
    pub fn answer_query(&mut self, found: impl Fn(&PageHash) -> bool) -> Vec<PageHash> {
        let at = self.below.iter().position(|action| matches!(action, TierAction::Query { .. })).unwrap();
        let TierAction::Query { tag, names, .. } = self.below.remove(at) else { unreachable!() };
        let found = names.iter().map(found).collect();
        self.event(Event::Tier(TierEvent::Answered { tag, found }));
        names
    }

    /// The first read that is asked for.
    pub fn take_read(&mut self) -> (TierTag, Vec<(PageHash, HostSlot)>) {
        let at = self.below.iter().position(|action| matches!(action, TierAction::Read { .. })).unwrap();
        let TierAction::Read { tag, pages, .. } = self.below.remove(at) else { unreachable!() };
        (tag, pages)
    }

    /// The first copy this way that is asked for.
    pub fn take_copy(&mut self, wanted: Direction) -> (TierTag, Vec<(PageId, HostSlot)>) {
        let is = |action: &TierAction| matches!(action, TierAction::Copy { direction, .. } if *direction == wanted);
        let at = self.below.iter().position(is).unwrap();
        let TierAction::Copy { tag, pages, .. } = self.below.remove(at) else { unreachable!() };
        (tag, pages)
    }

    /// How many of what is asked for are such.
    pub fn asked(&self, is: impl Fn(&TierAction) -> bool) -> usize {
        self.below.iter().filter(|action| is(action)).count()
    }

    /// Nothing is under way below the pool, and nobody keeps anything there.
    pub fn below_at_rest(&self) {
        self.at_rest();
        let stats = self.stats().hierarchy;
        let host = stats.host;
        assert_eq!((host.filling, host.spoilt, host.abandoned, stats.host_pinned), (0, 0, 0, 0));
        assert!(self.scheduler.is_settled());
    }
}
