//! Asking storage which pages it has: one batch per tier and tick, for all requests that came meanwhile.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{GRACE, Hierarchy, PATIENCE, PrefetchPolicy, TierAction, TierTag};
use crate::ids::{Room, Time};

/// A batch of questions under way.
#[derive(Debug)]
pub(super) struct Query {
    /// Request and item of each question, in the order of the batch.
    pages: Vec<(Room, usize)>,
    since: Time,
    /// When requests stop waiting for the answer. `None` once they have stopped.
    pub until: Option<Time>,
}

impl Query {
    /// Pages for whose answer a request waits.
    pub(super) fn pages(&self) -> usize {
        self.pages.len()
    }
}

impl Hierarchy {
    /// Sends the waiting questions to each tier. A tier that rests, or owes answers to as many batches as it may, is
    /// not asked: it counts as having none of the pages.
    pub(super) fn ask(&mut self, now: Time, actions: &mut Vec<TierAction>) {
        for tier in 0..self.tiers.len() {
            let pages = std::mem::take(&mut self.tiers[tier].questions);
            if pages.is_empty() {
                continue;
            }
            if self.rests(now, tier) || self.tiers[tier].queries.len() >= self.config.questions as usize {
                self.answer(now, tier, &pages, &[]);
                continue;
            }
            let tag = self.next_tag();
            let name = |(room, page): &(Room, usize)| self.fetches.get(room).map(|fetch| fetch.name(*page));
            let (pages, names): (Vec<_>, Vec<_>) =
                pages.into_iter().filter_map(|page| name(&page).map(|name| (page, name))).unzip();
            if pages.is_empty() {
                continue;
            }
            let expected = self.tiers[tier].answering.predict(1.0).unwrap_or_default();
            let wait = Duration::try_from_secs_f64(PATIENCE * expected).unwrap_or(self.config.longest_wait);
            // Slow answers in the past must not make requests wait for longer than the configured limit.
            let most = match self.config.prefetch {
                PrefetchPolicy::WaitComplete => self.config.longest_wait,
                _ => self.config.wait_base.min(self.config.longest_wait),
            };
            let until = now.after((wait + GRACE).min(most));
            self.tiers[tier].stats.queried += names.len() as u64;
            self.tiers[tier].queries.insert(tag, Query { pages, since: now, until: Some(until) });
            actions.push(TierAction::Query { tag, tier, names });
        }
    }

    pub(super) fn answered(&mut self, now: Time, tag: TierTag, found: &[bool]) {
        let Some(tier) = self.tiers.iter().position(|tier| tier.queries.contains_key(&tag)) else { return };
        let Some(query) = self.tiers[tier].queries.remove(&tag) else { return };
        let took = now.since(query.since);
        self.tiers[tier].answering.learn(1.0, took.as_secs_f64());
        self.tiers[tier].stats.answer_times.add(took);
        if query.until.is_none() {
            return;
        }
        self.tiers[tier].strikes = 0;
        self.tiers[tier].stats.found += found.iter().filter(|found| **found).count() as u64;
        self.answer(now, tier, &query.pages, found);
    }

    /// Ends the wait for answers that take too long. The tier still owes these answers, and they count against its
    /// limit of unanswered batches.
    pub(super) fn expire_questions(&mut self, now: Time) {
        for tier in 0..self.tiers.len() {
            let due = self.tiers[tier].queries.values_mut();
            let mut given_up = Vec::new();
            for query in due.filter(|query| query.until.is_some_and(|until| until <= now)) {
                query.until = None;
                given_up.push(std::mem::take(&mut query.pages));
            }
            for pages in given_up {
                self.strike(now, tier);
                self.answer(now, tier, &pages, &[]);
            }
        }
    }

    /// Takes one tier's answer about these pages. An empty `found` means that it has none of them.
    fn answer(&mut self, now: Time, tier: usize, pages: &[(Room, usize)], found: &[bool]) {
        // Requests that came first are looked at first, because the pages that they do not find are computed before
        // those of the others.
        let mut rooms = BTreeSet::new();
        for (place, (room, page)) in pages.iter().enumerate() {
            let Some(fetch) = self.fetches.get_mut(room) else { continue };
            if found.get(place) == Some(&true) {
                fetch.found(*page, tier);
            }
            if fetch.unanswered.remove(&tier) {
                rooms.insert((fetch.place, *room));
            }
        }
        for (_, room) in rooms {
            self.after_answer(now, room);
        }
    }
}
