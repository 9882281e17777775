//! The cost model: whether a restore pays, and how long a request waits for it.
//!
//! The time of a read is not known in advance. The time of doing without it is: the pages can be computed, or sent. A
//! request that waits for storage as long as that, and then does without, takes at most twice as long as with the
//! better choice, whatever storage does. No rule that decides without knowing the future can promise a smaller factor.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use super::fetch::{Fetch, Phase, SHORTEST_WAIT};
use super::{Hierarchy, PrefetchPolicy};
use crate::ids::{Room, Time};
use crate::radix::PageHash;

/// Work that was too slow is tried again after so long. Otherwise the model would keep slow times for ever. After a
/// quick trial the next request tries as well. So the model recovers request by request, as long as trials stay quick.
const TRIED_AGAIN: Duration = Duration::from_secs(30);

/// Says when work that does not pay by the model is done nevertheless, to correct the model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial {
    /// Whether trials can correct the model. False if costs are given.
    learns: bool,
    next: Option<Time>,
}

impl Trial {
    pub(super) fn new(learns: bool) -> Self {
        Self { learns, next: None }
    }

    /// Whether a trial is due. The first call starts the waiting time, and each due trial starts it again.
    pub(super) fn is_due(&mut self, now: Time) -> bool {
        let due = self.would_be_due(now);
        if due || self.next.is_none() {
            self.next = Some(now.after(TRIED_AGAIN));
        }
        due
    }

    /// Makes a trial due from this time on.
    pub(super) fn is_due_from(&mut self, now: Time) {
        self.next = Some(self.next.map_or(now, |at| at.min(now)));
    }

    /// Like [`is_due`](Self::is_due), but does not start the waiting time.
    pub(super) fn would_be_due(self, now: Time) -> bool {
        self.learns && self.next.is_some_and(|at| at <= now)
    }
}

impl Hierarchy {
    /// Whether reading the items `far`, and copying `copied` in all, takes no longer than doing without the pages
    /// `all`.
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

    /// Seconds that a request needs if these pages are not restored and it goes on now. Infinite if that is not known.
    pub(super) fn seconds_without(&self, fetch: &Fetch, pages: Range<usize>) -> f64 {
        if fetch.is_sent {
            // Prefill would send these pages together with those behind them. Restored pages arrive during the same
            // time.
            let pages = fetch.names.len() - pages.start;
            return self.transferring.predict(pages as f64).unwrap_or(f64::INFINITY);
        }
        self.seconds_behind(self.backlog, pages)
    }

    /// Seconds to compute these pages after `tokens` other tokens. Infinite if that is not known.
    fn seconds_behind(&self, tokens: usize, pages: Range<usize>) -> f64 {
        let tokens = tokens + pages.len() * self.page_tokens;
        self.seconds_to_compute(tokens).unwrap_or(f64::INFINITY)
    }

    /// Seconds to compute so many tokens, in steps that are as large as they may be. The fit is asked only for such steps and
    /// smaller ones, because it has learned of no others: steps that are all of about one size say nothing of larger ones.
    fn seconds_to_compute(&self, tokens: usize) -> Option<f64> {
        let step = |tokens: usize| self.computing.predict(tokens as f64);
        let (full, rest) = (tokens / self.step_tokens, tokens % self.step_tokens);
        if self.config.costs.is_some() || full == 0 {
            return step(tokens);
        }
        let rest = if rest == 0 { 0.0 } else { step(rest)? };
        Some(full as f64 * step(self.step_tokens)? + rest)
    }

    /// Tokens that are computed before those of this request in any case: those of admitted requests, and the uncached ones
    /// of requests before it in the queue. Reads that end in that time do not delay the request.
    fn ahead(&self, fetch: &Fetch) -> usize {
        let before = self.passed + 1..fetch.place;
        let before = self.fetches.values().filter(|other| other.in_line && before.contains(&other.place));
        // Of requests with the same first page, one computes the pages that the others wait for. So only the longest of
        // them counts.
        let mut by_first: BTreeMap<PageHash, usize> = BTreeMap::new();
        for pages in before.map(Fetch::uncached) {
            if let Some(first) = pages.first() {
                let most = by_first.entry(*first).or_default();
                *most = pages.len().max(*most);
            }
        }
        self.backlog + by_first.into_values().sum::<usize>() * self.page_tokens
    }

    /// Time to compute the tokens [ahead](Self::ahead) of a request, as far as it waits for storage meanwhile.
    pub(super) fn time_ahead(&self, fetch: &Fetch) -> Duration {
        if self.config.prefetch != PrefetchPolicy::Timeout {
            return Duration::ZERO;
        }
        let ahead = self.ahead(fetch);
        let seconds = if ahead == 0 { Some(0.0) } else { self.seconds_to_compute(ahead) };
        Duration::try_from_secs_f64(seconds.unwrap_or_default())
            .unwrap_or(Duration::MAX)
            .min(self.config.wait_base)
    }

    /// Sets the number of prompt tokens that running requests still have to compute. Uncached tokens of requests that are being
    /// restored are added.
    pub(crate) fn set_backlog(&mut self, tokens: usize) {
        let restored = self.fetches.values().filter(|fetch| fetch.phase == Phase::Restoring);
        let pages: usize = restored.map(|fetch| fetch.uncached().len()).sum();
        self.backlog = tokens + pages * self.page_tokens;
    }

    /// Takes note that a request in the queue waits for something other than storage, and may be skipped.
    pub(crate) fn yields(&mut self, room: Room) {
        if let Some(fetch) = self.fetches.get_mut(&room) {
            fetch.in_line = false;
        }
    }

    /// Takes note of an admitted request: requests before it that still wait were skipped.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hierarchy::HierarchyConfig;

    /// Later steps of a prompt are slower or faster than the first. A fit through such steps has any slope.
    #[test]
    fn a_long_prompt_takes_as_many_times_as_it_has_steps_although_all_steps_are_alike() {
        for slower in [-1.0, 1.0] {
            let mut tiers = Hierarchy::new(HierarchyConfig::new(1, 1, Vec::new()), 16, 512);
            assert_eq!(tiers.seconds_behind(0, 0..10), f64::INFINITY, "nothing was learned");
            for step in 0..40 {
                let tokens = 512 - step % 3;
                let seconds = 0.040 + slower * 0.001 * f64::from(u32::try_from(step % 3).unwrap());
                tiers.computed(tokens, Duration::from_secs_f64(seconds));
            }
            // 16 steps, of which 4 are ahead.
            let seconds = tiers.seconds_behind(2048, 0..384);
            assert!((0.6..0.7).contains(&seconds), "{seconds} s");
            let part = tiers.seconds_behind(0, 0..1);
            assert!((0.0..0.06).contains(&part), "{part} s for a part of a step");
        }
    }
}
