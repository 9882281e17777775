//! Which pages are copied below the pool, and when.
//!
//! Of window parts only those of the windows at which others will go on, so that what a prompt costs below is its pages and one
//! window or two: those at the ends of prompts and answers, where a request was retracted, and those that somebody went on from.
//!
//! Write-through: those that enter the radix tree. Selective: those that enter or are used and were matched often enough.
//! Write-back: those about to be evicted. Evicting goes ahead of need then, so that a page's copy is under way while
//! others are still free; it is in quarantine until the copy has ended. Whoever needs pages *now* takes what is free and
//! evicts the rest at once, copied or not: nothing in a tick waits for a copy. What would keep a step from its pages are
//! copies under way, of pages that stay until they have ended; those that have not begun are given up then.

use std::ops::Range;

use super::Scheduler;
use super::growth::Pages;
use crate::hierarchy::{Keep, WritePolicy};
use crate::ids::{PageId, Room};
use crate::pool::{CachedPages, Component};
use crate::quarantine;
use crate::radix::PageHash;
use crate::window::WindowShape;

impl Scheduler {
    /// Some pages of a job are in the tree, the last `taken` of its locked ones only now. Of a tree that was flushed since,
    /// nothing is saved.
    pub(super) fn save_computed(&mut self, room: Room, taken: usize) {
        let (Some(hierarchy), Some(tree), Some(job)) = (&self.hierarchy, &self.cache, self.jobs.get(&room))
        else {
            return;
        };
        let Some(lock) = job.lock.as_ref().filter(|lock| tree.is_found(lock)) else { return };
        let pages = lock.pages();
        let (all, often) = (vec![(0..pages, u32::MAX)], hierarchy.config().write_after_hits);
        let (first, wanted) = match hierarchy.config().write {
            WritePolicy::WriteThrough => (pages - taken, all),
            WritePolicy::WriteThroughSelective => (0, tree.hits(lock)),
            WritePolicy::WriteBack => return,
        };
        let batch = hierarchy.config().batch_pages as usize;
        for (pages, _) in wanted.into_iter().filter(|(_, hits)| *hits >= often) {
            let end = pages.end;
            for start in (pages.start.max(first)..end).step_by(batch) {
                self.save_pages(room, start..end.min(start + batch));
            }
        }
    }

    /// Saves the windows that a job's lock keeps in front of these token pages, if they are whole: places where others will go
    /// on. With a policy that waits for eviction they are saved when they are evicted.
    pub(super) fn save_windows(&mut self, room: Room, ends: impl IntoIterator<Item = usize>) {
        let Some(shape) = self.config.window else { return };
        let page_tokens = self.config.page_tokens as usize;
        for end in ends {
            let (Some(hierarchy), Some(tree), Some(job)) =
                (&self.hierarchy, &mut self.cache, self.jobs.get_mut(&room))
            else {
                return;
            };
            let Some(lock) = job.lock.as_ref().filter(|lock| tree.is_found(lock)) else { return };
            let (seen, first, kept) = (shape.seen_at(end, page_tokens), job.window.first, lock.windows());
            if seen.is_empty() || seen.start < first || seen.end > first + kept {
                continue;
            }
            job.name_pages(&self.config.identity, end, page_tokens);
            let (policy, often) = (hierarchy.config().write, hierarchy.config().write_after_hits);
            let Some(lock) = &job.lock else { return };
            match policy {
                WritePolicy::WriteBack => {
                    tree.name_windows(lock, seen.start - first, &job.names[seen.clone()])
                }
                WritePolicy::WriteThroughSelective
                    if !tree
                        .hits(lock)
                        .iter()
                        .any(|(pages, hits)| pages.contains(&(end - 1)) && *hits >= often) => {}
                _ => {
                    let batch = (hierarchy.config().batch_pages / shape.parts).max(1) as usize;
                    for start in seen.clone().step_by(batch) {
                        self.save_parts(room, start..seen.end.min(start + batch), shape);
                    }
                }
            }
        }
    }

    fn save_parts(&mut self, room: Room, pages: Range<usize>, shape: WindowShape) {
        let (Some(hierarchy), Some(tree), Some(job)) =
            (&mut self.hierarchy, &mut self.cache, self.jobs.get(&room))
        else {
            return;
        };
        let Some(lock) = &job.lock else { return };
        let first = job.window.first;
        let names = job.names[pages.clone()]
            .iter()
            .flat_map(|name| (0..shape.parts).map(|part| name.window_part(part)));
        let parts = job.window.cached.iter().skip((pages.start - first) * shape.parts as usize);
        let batch: Vec<(PageHash, PageId)> =
            names.zip(parts.copied()).filter(|(name, _)| !hierarchy.has(name)).collect();
        if batch.is_empty() {
            return;
        }
        let keep = Keep::Lock(tree.lock_windows_again(lock, pages.start - first..pages.end - first));
        if let Some(Keep::Lock(lock)) = hierarchy.save(keep, batch.into_iter()) {
            self.unlock(Some(lock));
        }
    }

    fn save_pages(&mut self, room: Room, pages: Range<usize>) {
        let (Some(hierarchy), Some(tree), Some(job)) =
            (&mut self.hierarchy, &mut self.cache, self.jobs.get_mut(&room))
        else {
            return;
        };
        job.name_pages(&self.config.identity, pages.end, self.config.page_tokens as usize);
        let Some(lock) = &job.lock else { return };
        let batch: Vec<(PageHash, PageId)> = pages
            .map(|page| (job.names[page], job.table[page]))
            .filter(|(name, _)| !hierarchy.has(name))
            .collect();
        if batch.is_empty() {
            return;
        }
        let keep = Keep::Lock(tree.lock_again(lock));
        if let Some(Keep::Lock(lock)) = hierarchy.save(keep, batch.into_iter()) {
            self.unlock(Some(lock));
        }
    }

    /// Evicts ahead of need, as far as the policy wants pages free or on their way out.
    pub(super) fn write_back(&mut self) {
        let Some(hierarchy) = &self.hierarchy else { return };
        if hierarchy.config().write != WritePolicy::WriteBack {
            return;
        }
        let ahead = (hierarchy.config().write_back_ahead as usize).min(self.pool.total() / 2);
        let (wanted, leaving) = (hierarchy.config().write_back_ahead as usize, hierarchy.evicted_pages());
        let there = self.pool.counts().free + leaving;
        self.evict_and_save(ahead.saturating_sub(there));
        // Windows that may have a part of the pool only run short by themselves.
        let limit = self.pool.limits().window as usize;
        if limit < self.pool.total()
            && let Some(tree) = &mut self.cache
        {
            let there = limit.saturating_sub(self.pool.used(Component::Window)) + leaving;
            let evicted = tree.evict_windows_named(wanted.min(limit / 2).saturating_sub(there));
            self.save_evicted(evicted);
        }
    }

    fn evict_and_save(&mut self, wanted: usize) {
        let Some(tree) = &mut self.cache else { return };
        if wanted > 0 {
            let evicted = tree.evict_named(wanted, &mut self.cache_changes);
            self.save_evicted(evicted);
        }
    }

    fn save_evicted(&mut self, evicted: Vec<(Vec<PageHash>, CachedPages)>) {
        let Some(hierarchy) = &mut self.hierarchy else { return };
        for (names, mut pages) in evicted {
            // A window part that is not to be saved.
            if names.is_empty() {
                self.pool.release_cached(pages);
                continue;
            }
            let unsaved = pages.extract(|place| !hierarchy.has(&names[place]));
            self.pool.release_cached(pages);
            let names: Vec<PageHash> = names.into_iter().filter(|name| !hierarchy.has(name)).collect();
            if unsaved.ids().is_empty() {
                self.pool.release_cached(unsaved);
                continue;
            }
            let ids = unsaved.ids().to_vec();
            let keep = Keep::Evicted(self.pool.quarantine_cached(unsaved));
            if let Some(Keep::Evicted(pages)) = hierarchy.save(keep, names.into_iter().zip(ids)) {
                quarantine::copied(&mut self.pool, pages);
            }
        }
    }

    /// Gives up copies that have not begun and alone keep pages, the youngest first, until so many pages can be had.
    pub(super) fn give_up_saves(&mut self, wanted: Pages) {
        let mut kept = Vec::new();
        while !self.can_have(wanted) {
            let (Some(hierarchy), Some(tree)) = (&mut self.hierarchy, &self.cache) else { return };
            let taken = hierarchy.take_youngest();
            let Some(youngest) = taken.first() else { break };
            if let Keep::Lock(lock) = &youngest.keep
                && !tree.is_kept_by(lock, taken.len())
            {
                kept.push(taken);
                continue;
            }
            let released = hierarchy.give_up(taken);
            self.released(released);
        }
        if let Some(hierarchy) = &mut self.hierarchy {
            kept.into_iter().rev().for_each(|taken| hierarchy.wait_again(taken));
        }
    }

    /// Copies have ended, or never will begin.
    pub(super) fn released(&mut self, kept: Vec<Keep>) {
        for keep in kept {
            match keep {
                Keep::Lock(lock) => self.unlock(Some(lock)),
                Keep::Evicted(pages) => quarantine::copied(&mut self.pool, pages),
            }
        }
    }

    /// Evicts for somebody who needs the pages now.
    pub(super) fn evict_now(&mut self, missing: usize) {
        let Some(tree) = &mut self.cache else { return };
        match &mut self.hierarchy {
            Some(hierarchy) if hierarchy.config().write == WritePolicy::WriteBack => {
                let evicted = tree.evict_named(missing, &mut self.cache_changes);
                for (names, pages) in evicted {
                    let dropped = names.iter().filter(|name| !hierarchy.has(name)).count();
                    hierarchy.stats_mut().dropped += dropped as u64;
                    self.pool.release_cached(pages);
                }
            }
            _ => {
                let evicted: CachedPages = tree.evict(missing, &mut self.cache_changes);
                self.pool.release_cached(evicted);
            }
        }
    }
}
