//! Copying from the pool to host memory, and writing from there to storage.

use super::{Direction, Hierarchy, HostSlot, Keep, Op, PageEnd, Queued, TierAction, Work};
use crate::ids::{PageId, Time};
use crate::radix::PageHash;

impl Hierarchy {
    /// Whether a page is in host memory or on its way there.
    pub(crate) fn has(&self, name: &PageHash) -> bool {
        self.host.find(name).is_some()
    }

    /// Whether pages are saved when they are evicted.
    pub(crate) fn saves_evicted(&self) -> bool {
        self.config.write == super::WritePolicy::WriteBack
    }

    /// Whether saved pages are written on to some storage tier.
    pub(crate) fn writes(&self) -> bool {
        self.tiers.iter().any(|tier| tier.config.writes)
    }

    /// Queues copies of pages, which `keep` protects meanwhile. Leaves out pages that are here already, and pages for
    /// which there is no slot. Gives `keep` back when no page is left.
    pub(crate) fn save(
        &mut self,
        keep: Keep,
        pages: impl Iterator<Item = (PageHash, PageId)>,
    ) -> Option<Keep> {
        let mut batch = Vec::new();
        for (name, page) in pages {
            if self.has(&name) {
                continue;
            }
            match self.host.begin(name) {
                Some(slot) => batch.push((page, slot)),
                None => self.stats.not_saved += 1,
            }
        }
        if batch.is_empty() {
            return Some(keep);
        }
        self.saves.push_back(Queued { keep, pages: batch });
        None
    }

    pub(super) fn start_saves(&mut self, now: Time, actions: &mut Vec<TierAction>) {
        while let Some(queued) = self.saves.front() {
            let bytes = self.bytes(queued.pages.len());
            if self.saving_bytes > 0 && self.saving_bytes + bytes > self.config.copy_bytes {
                return;
            }
            let Some(Queued { keep, pages }) = self.saves.pop_front() else { return };
            let tag = self.next_tag();
            self.saving_bytes += bytes;
            let slots = pages.iter().map(|(_, slot)| Some(*slot)).collect();
            let (work, left) = (Work::Save { keep: Some(keep) }, pages.len());
            self.ops.insert(tag, Op { work, slots, left, since: now, until: None, carried: bytes });
            actions.push(TierAction::Copy { tag, direction: Direction::Save, pages });
        }
    }

    /// Takes the youngest saves that have not begun and that keep the same pages: several batches of one request, or
    /// one that was evicted. The caller must have each [dropped](Self::drop_save) or [put back](Self::wait_again).
    pub(crate) fn take_youngest(&mut self) -> Vec<Queued> {
        let mut taken: Vec<Queued> = Vec::new();
        while let Some(queued) = self.saves.pop_back() {
            let alike = match (taken.last().map(|queued| &queued.keep), &queued.keep) {
                (None, _) => true,
                (Some(Keep::Lock(last)), Keep::Lock(lock)) => last.is_like(lock),
                _ => false,
            };
            if !alike {
                self.saves.push_back(queued);
                break;
            }
            taken.push(queued);
        }
        taken
    }

    /// Puts taken saves back, behind all others.
    pub(crate) fn wait_again(&mut self, taken: Vec<Queued>) {
        self.saves.extend(taken.into_iter().rev());
    }

    /// Drops taken saves, because there is no time for their copies. Returns the locks and pages that they kept.
    pub(crate) fn give_up(&mut self, taken: Vec<Queued>) -> Vec<Keep> {
        for queued in taken {
            self.stats.dropped += queued.pages.len() as u64;
            self.drop_save(queued);
        }
        self.take_released()
    }

    /// Drops a save that has not begun.
    pub(super) fn drop_save(&mut self, queued: Queued) {
        for (_, slot) in queued.pages {
            self.host.ended(slot, false);
            self.tell_waiters(slot, false);
        }
        self.released.push(queued.keep);
    }

    pub(super) fn page_saved(&mut self, slot: HostSlot, end: PageEnd) {
        let name = self.host.name(slot);
        let here = self.host.ended(slot, end == PageEnd::Done);
        self.tell_waiters(slot, here);
        let Some(name) = name.filter(|_| here) else { return };
        self.stats.saved += 1;
        for tier in self.tiers.iter_mut().filter(|tier| tier.config.writes) {
            if tier.to_write.len() >= self.config.queued_writes as usize {
                tier.stats.write_dropped += 1;
                continue;
            }
            self.host.pin(slot);
            tier.to_write.push_back((name, slot));
        }
    }

    pub(super) fn start_writes(&mut self, now: Time, actions: &mut Vec<TierAction>) {
        for tier in 0..self.tiers.len() {
            while !self.rests(now, tier) && !self.tiers[tier].to_write.is_empty() {
                let free = self.config.write_bytes.saturating_sub(self.tiers[tier].writing_bytes);
                let fit = usize::try_from(free / self.config.page_bytes).unwrap_or(usize::MAX);
                let fit = if self.tiers[tier].writing_bytes == 0 { fit.max(1) } else { fit };
                let count = fit.min(self.config.batch_pages as usize).min(self.tiers[tier].to_write.len());
                if count == 0 {
                    break;
                }
                let tag = self.next_tag();
                let pages: Vec<(PageHash, HostSlot)> = self.tiers[tier].to_write.drain(..count).collect();
                let bytes = self.bytes(count);
                self.tiers[tier].writing_bytes += bytes;
                let slots = pages.iter().map(|(_, slot)| Some(*slot)).collect();
                let until = Some(now.after(self.config.longest_wait));
                let op =
                    Op { work: Work::Write { tier }, slots, left: count, since: now, until, carried: bytes };
                self.ops.insert(tag, op);
                actions.push(TierAction::Write { tag, tier, pages });
            }
            // The queued writes of a tier that hangs must not take all of host memory.
            let most = self.host.total() / 2 / self.tiers.len();
            while self.tiers[tier].to_write.len() > most {
                let Some((_, slot)) = self.tiers[tier].to_write.pop_front() else { break };
                self.tiers[tier].stats.write_dropped += 1;
                self.host.unpin(slot);
            }
        }
    }

    pub(super) fn page_written(&mut self, tier: usize, slot: HostSlot, end: PageEnd) {
        self.host.unpin(slot);
        let stats = &mut self.tiers[tier].stats;
        *(match end {
            PageEnd::Done => &mut stats.written,
            PageEnd::Refused => &mut stats.write_refused,
            PageEnd::Missing | PageEnd::Failed | PageEnd::Damaged => &mut stats.write_failed,
        }) += 1;
    }

    /// Locks that saves hold.
    pub(crate) fn locks(&self) -> usize {
        self.keeps().filter(|keep| matches!(keep, Keep::Lock(_))).count()
    }

    /// Pages of the pool that were evicted and are being copied.
    pub(crate) fn evicted_pages(&self) -> usize {
        let pages = |keep: &Keep| match keep {
            Keep::Evicted(pages) => pages.len(),
            Keep::Lock(_) => 0,
        };
        self.keeps().map(pages).sum()
    }

    fn keeps(&self) -> impl Iterator<Item = &Keep> {
        let running = self.ops.values().filter_map(|op| match &op.work {
            Work::Save { keep } => keep.as_ref(),
            _ => None,
        });
        running.chain(self.saves.iter().map(|queued| &queued.keep)).chain(&self.released)
    }
}
