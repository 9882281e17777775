//! Reading from storage into slots.

use std::time::Duration;

use super::{GRACE, Hierarchy, HostSlot, Op, PATIENCE, PageEnd, PrefetchPolicy, TierAction, Work};
use crate::ids::Time;
use crate::radix::PageHash;

impl Hierarchy {
    /// Begins as many reads as fit.
    pub(super) fn start_reads(&mut self, now: Time, actions: &mut Vec<TierAction>) {
        for tier in 0..self.tiers.len() {
            if self.rests(now, tier) {
                self.fail_queued_reads(tier);
                continue;
            }
            self.tiers[tier].rests_until = None;
            while let Some(pages) = self.next_reads(tier) {
                let tag = self.next_tag();
                let carried = self.tiers[tier].reading_bytes + self.bytes(pages.len());
                let wait = match self.config.prefetch {
                    PrefetchPolicy::WaitComplete => self.config.longest_wait,
                    _ => {
                        let expected = self.tiers[tier].reading.predict(carried as f64).unwrap_or_default();
                        Duration::try_from_secs_f64(PATIENCE * expected)
                            .map_or(self.config.longest_wait, |wait| {
                                (wait + GRACE).min(self.config.longest_wait)
                            })
                    }
                };
                self.tiers[tier].reading_bytes = carried;
                let slots: Vec<Option<HostSlot>> = pages.iter().map(|(_, slot)| Some(*slot)).collect();
                let (left, until) = (slots.len(), Some(now.after(wait)));
                let op = Op { work: Work::Read { tier }, slots, left, since: now, until, carried };
                self.ops.insert(tag, op);
                actions.push(TierAction::Read { tag, tier, pages });
            }
        }
    }

    /// The next batch that fits. Pages that no request waits for any more are left out.
    fn next_reads(&mut self, tier: usize) -> Option<Vec<(PageHash, HostSlot)>> {
        let mut pages = Vec::new();
        while let Some((name, slot)) = self.tiers[tier].to_read.front().copied() {
            if !self.host.is_wanted(slot) {
                self.tiers[tier].to_read.pop_front();
                self.host.ended(slot, false);
                self.tell_waiters(slot, false);
                continue;
            }
            let bytes = self.tiers[tier].reading_bytes + self.bytes(pages.len() + 1);
            let first = self.tiers[tier].reading_bytes == 0 && pages.is_empty();
            if pages.len() >= self.config.batch_pages as usize || (bytes > self.config.read_bytes && !first) {
                break;
            }
            self.tiers[tier].to_read.pop_front();
            pages.push((name, slot));
        }
        (!pages.is_empty()).then_some(pages)
    }

    pub(super) fn fail_queued_reads(&mut self, tier: usize) {
        // One by one, because a waiting request that is told may queue other reads instead.
        while let Some((_, slot)) = self.tiers[tier].to_read.pop_front() {
            self.host.ended(slot, false);
            self.tell_waiters(slot, false);
        }
    }

    pub(super) fn page_read(&mut self, tier: usize, slot: HostSlot, end: PageEnd) {
        let stats = &mut self.tiers[tier].stats;
        *(match end {
            PageEnd::Done => &mut stats.read,
            PageEnd::Damaged => &mut stats.damaged,
            PageEnd::Missing | PageEnd::Refused | PageEnd::Failed => &mut stats.read_failed,
        }) += 1;
        let here = self.host.ended(slot, end == PageEnd::Done);
        self.tell_waiters(slot, here);
    }

    /// Learns from a batch of reads whose last page has ended.
    pub(super) fn batch_read(&mut self, now: Time, tier: usize, op: &Op, bytes: u64) {
        let tier = &mut self.tiers[tier];
        tier.reading_bytes -= bytes;
        let seconds = now.since(op.since).as_secs_f64();
        if tier.reading.expected_more(op.carried as f64, seconds) {
            self.read_trial.is_due_from(now);
        }
        // Reads that were given up are learned, too. Requests then wait longer for the next one, or do not begin it.
        tier.reading.learn_clamped(op.carried as f64, seconds);
        tier.stats.read_times.add(Duration::try_from_secs_f64(seconds).unwrap_or_default());
        if op.until.is_some() {
            tier.strikes = 0;
        }
    }
}
