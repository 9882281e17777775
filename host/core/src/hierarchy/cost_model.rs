//! The cost model: whether a restore pays, and how long it is waited for.
//!
//! A request that waits for storage does not know how long it will take, only what it takes to do without: having the
//! pages computed, or sent. Waiting for as long as that and then doing without takes at most twice as long as the
//! better of both would have taken, whatever storage does. No rule that decides without knowing the future can promise
//! less.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use super::fetch::{Fetch, Phase, SHORTEST_WAIT};
use super::{Hierarchy, PrefetchPolicy};
use crate::ids::{Room, Time};
use crate::radix::PageHash;

/// What was too slow is tried again after so long. Otherwise the model would keep slow times for ever. Once a trial was
/// quick, the next request tries as well. So the model recovers request by request, as long as trials stay quick.
const TRIED_AGAIN: Duration = Duration::from_secs(30);

/// When something that does not pay by the model is done nevertheless, to correct the model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial {
    /// Whether a trial could teach anything: not where costs are given.
    learns: bool,
    next: Option<Time>,
}

impl Trial {
    pub(super) fn new(learns: bool) -> Self {
        Self { learns, next: None }
    }

    /// Whether it is time. The first time starts the clock.
    pub(super) fn is_due(&mut self, now: Time) -> bool {
        let due = self.would_be_due(now);
        if due || self.next.is_none() {
            self.next = Some(now.after(TRIED_AGAIN));
        }
        due
    }

    /// From this time on it is.
    pub(super) fn is_due_from(&mut self, now: Time) {
        self.next = Some(self.next.map_or(now, |at| at.min(now)));
    }

    /// What [`is_due`](Self::is_due) would say, without starting anything.
    pub(super) fn would_be_due(self, now: Time) -> bool {
        self.learns && self.next.is_some_and(|at| at <= now)
    }
}

impl Hierarchy {
    /// Whether reading these pieces, and copying so many in all, takes no longer than doing without these pages.
    pub(super) fn reading_pays(&self, room: Room, far: &[usize], copied: usize, all: Range<usize>) -> bool {
        let fetch = &self.fetches[&room];
        let mut by_tier: BTreeMap<usize, usize> = BTreeMap::new();
        for tier in far.iter().filter_map(|page| fetch.stored(*page)) {
            *by_tier.entry(tier).or_default() += 1;
        }
        let reads = by_tier.into_iter().map(|(tier, pages)| {
            let tier = &self.tiers[tier];
            let ahead = tier.reading_bytes + self.bytes(tier.to_read.len() + pages);
            tier.reading.predict(ahead as f64).unwrap_or_default()
        });
        let time = reads.fold(0.0, f64::max) + self.load_seconds(copied);
        time <= self.seconds_without(fetch, all.clone())
            || (!fetch.is_sent && time <= self.seconds_behind(self.ahead(fetch), all))
    }

    pub(super) fn load_seconds(&self, pages: usize) -> f64 {
        self.copying.predict((self.loading_bytes + self.bytes(pages)) as f64).unwrap_or_default()
    }

    /// What it takes when these pages are not restored, where that is known: of one that would go on now.
    pub(super) fn seconds_without(&self, fetch: &Fetch, pages: Range<usize>) -> f64 {
        if fetch.is_sent {
            // They come with what is sent anyway, and what is restored comes at the same time.
            let pages = fetch.names.len() - pages.start;
            return self.transferring.predict(pages as f64).unwrap_or(f64::INFINITY);
        }
        self.seconds_behind(self.backlog, pages)
    }

    /// What computing these pages takes behind so many tokens, where that is known.
    fn seconds_behind(&self, tokens: usize, pages: Range<usize>) -> f64 {
        let tokens = tokens + pages.len() * self.page_tokens;
        self.computing.predict(tokens as f64).unwrap_or(f64::INFINITY)
    }

    /// Tokens that are computed before this request's whatever it gets: those of the requests that were admitted, and what is
    /// not cached of those that are before it in line. As long as that is computed, reading costs it nothing.
    fn ahead(&self, fetch: &Fetch) -> usize {
        let before = self.passed + 1..fetch.place;
        let before = self.fetches.values().filter(|other| other.in_line && before.contains(&other.place));
        // Of those that begin alike one computes what the others wait for.
        let mut by_first: BTreeMap<PageHash, usize> = BTreeMap::new();
        for pages in before.map(Fetch::uncached) {
            if let Some(first) = pages.first() {
                let most = by_first.entry(*first).or_default();
                *most = pages.len().max(*most);
            }
        }
        self.backlog + by_first.into_values().sum::<usize>() * self.page_tokens
    }

    /// How long that takes, as far as a request waits for it.
    pub(super) fn time_ahead(&self, fetch: &Fetch) -> Duration {
        if self.config.prefetch != PrefetchPolicy::Timeout {
            return Duration::ZERO;
        }
        let ahead = self.ahead(fetch);
        let seconds = if ahead == 0 { Some(0.0) } else { self.computing.predict(ahead as f64) };
        Duration::try_from_secs_f64(seconds.unwrap_or_default())
            .unwrap_or(Duration::MAX)
            .min(self.config.wait_base)
    }

    /// So many tokens of the prompts of requests that run are not computed yet. What is restored is computed behind it as well.
    pub(crate) fn set_backlog(&mut self, tokens: usize) {
        let restored = self.fetches.values().filter(|fetch| fetch.phase == Phase::Restoring);
        let pages: usize = restored.map(|fetch| fetch.uncached().len()).sum();
        self.backlog = tokens + pages * self.page_tokens;
    }

    /// A request in the queue waits for something else, and may be skipped.
    pub(crate) fn yields(&mut self, room: Room) {
        if let Some(fetch) = self.fetches.get_mut(&room) {
            fetch.in_line = false;
        }
    }

    /// A request is admitted: those before it that still wait were skipped.
    pub(super) fn passes(&mut self, room: Room) {
        let place = self.fetches.get(&room).map_or(0, |fetch| fetch.place);
        self.passed = self.passed.max(place);
    }

    /// How long a request waits for these of its pages.
    pub(super) fn longest_wait(&self, room: Room, pages: Range<usize>) -> Duration {
        let told = match self.config.prefetch {
            PrefetchPolicy::WaitComplete => return self.config.longest_wait,
            PrefetchPolicy::BestEffort => self.config.wait_base,
            PrefetchPolicy::Timeout => {
                let tokens = (pages.len() * self.page_tokens) as f64;
                self.config.wait_base + self.config.wait_per_1024_tokens.mul_f64(tokens / 1024.0)
            }
        };
        let without =
            self.fetches.get(&room).map_or(f64::INFINITY, |fetch| self.seconds_without(fetch, pages));
        let without = Duration::try_from_secs_f64(without).unwrap_or(Duration::MAX);
        told.min(self.config.longest_wait).min(without.max(SHORTEST_WAIT))
    }
}
