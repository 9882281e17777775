//! Answers of host memory and storage tiers.

use std::collections::BTreeSet;

use host_core::hierarchy::{Direction, HostSlot, PageEnd, TierAction, TierEvent, TierTag};
use host_core::radix::PageHash;
use host_core::{Event, PageId};

use super::Leg;

impl Leg {
    /// Does every tier action at once, until none is pending. `stored` is what all tiers
    /// hold.
    pub fn serve(&mut self, stored: &mut BTreeSet<PageHash>) {
        while !self.tier_actions.is_empty() {
            for action in std::mem::take(&mut self.tier_actions) {
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

    /// Ends all pages of a batch alike.
    pub fn all_end(&mut self, tag: TierTag, pages: usize, end: PageEnd) {
        let pages = (0..pages as u32).map(|place| (place, end)).collect();
        self.event(Event::Tier(TierEvent::Ended { tag, pages }));
    }

    /// Takes the first pending tier action for which `wanted` returns something.
    fn take_tier_action<T>(&mut self, what: &str, wanted: impl Fn(&TierAction) -> Option<T>) -> T {
        let found = self.tier_actions.iter().enumerate().find_map(|(at, action)| Some((at, wanted(action)?)));
        let Some((at, taken)) = found else { panic!("no {what} is pending: {:?}", self.tier_actions) };
        self.tier_actions.remove(at);
        taken
    }

    /// Answers the only pending query: `found` says which pages are there. Returns the names in the query.
    pub fn answer_query(&mut self, found: impl Fn(&PageHash) -> bool) -> Vec<PageHash> {
        let (tag, names) = self.take_tier_action("query", |action| match action {
            TierAction::Query { tag, names, .. } => Some((*tag, names.clone())),
            _ => None,
        });
        let found = names.iter().map(found).collect();
        self.event(Event::Tier(TierEvent::Answered { tag, found }));
        names
    }

    /// Takes the first pending read.
    pub fn take_read(&mut self) -> (TierTag, Vec<(PageHash, HostSlot)>) {
        self.take_tier_action("read", |action| match action {
            TierAction::Read { tag, pages, .. } => Some((*tag, pages.clone())),
            _ => None,
        })
    }

    /// Takes the first pending copy in this direction.
    pub fn take_copy(&mut self, wanted: Direction) -> (TierTag, Vec<(PageId, HostSlot)>) {
        self.take_tier_action("copy", |action| match action {
            TierAction::Copy { tag, direction, pages } if *direction == wanted => Some((*tag, pages.clone())),
            _ => None,
        })
    }

    /// The number of pending tier actions for which `is` is true.
    pub fn pending(&self, is: impl Fn(&TierAction) -> bool) -> usize {
        self.tier_actions.iter().filter(|action| is(action)).count()
    }

    /// Checks that nothing is in progress in offload tiers, and that no request keeps a page there.
    ///
    /// # Panics
    /// When an action, a slot or a request is left over.
    pub fn offload_at_rest(&self) {
        self.at_rest();
        let stats = self.stats().hierarchy;
        let host = stats.host;
        assert_eq!((host.filling, host.spoilt, host.abandoned, stats.host_pinned), (0, 0, 0, 0));
        assert!(self.scheduler.is_settled());
    }
}
