//! Which pages are copied to the offload tiers, and when.
//!
//! Window parts are copied only for windows from which other requests will continue, so a prompt costs its pages and
//! one or two windows. These windows are at the ends of prompts and answers, where a request was preempted, and where a
//! request continued.
//!
//! | Policy | Copies |
//! | --- | --- |
//! | write-through | pages that enter the radix tree |
//! | selective | pages that enter or are used, and were matched often enough |
//! | write-back | pages about to be evicted |
//!
//! With write-back, pages are evicted before they are needed, so that their copies run while other pages are still free. An
//! evicted page is in quarantine until its copy has ended. A request that needs pages *now* takes free ones, and the rest is
//! evicted at once, copied or not: nothing in a tick waits for a copy. Only copies that are under way can keep pages from a
//! step, because their pages stay until they have ended. Copies that have not begun are given up when a step lacks pages.

use std::ops::Range;

use super::{Cache, Holding, Pages, Tokens, quarantine};
use crate::hierarchy::{Hierarchy, Keep, WritePolicy};
use crate::ids::PageId;
use crate::pool::{CachedPages, Component};
use crate::radix::PageHash;
use crate::window::WindowShape;

impl Cache {
    /// Saves pages of a request that are in the tree, by the policy. The last `taken` of its locked pages are new there.
    /// Nothing is saved if the tree was flushed since.
    pub(super) fn save_computed(&mut self, tokens: &Tokens<'_>, kv: &mut Holding, taken: usize) {
        let (Some(tiers), Some(tree)) = (&self.tiers, &self.tree) else { return };
        let Some(lock) = kv.lock.as_ref().filter(|lock| tree.is_found(lock)) else { return };
        let pages = lock.pages();
        let (all, often) = (vec![(0..pages, u32::MAX)], tiers.config().write_after_hits);
        let (first, wanted) = match tiers.config().write {
            WritePolicy::WriteThrough => (pages - taken, all),
            WritePolicy::WriteThroughSelective => (0, tree.hits(lock)),
            WritePolicy::WriteBack => return,
        };
        let batch = tiers.config().batch_pages as usize;
        for (pages, _) in wanted.into_iter().filter(|(_, hits)| *hits >= often) {
            let end = pages.end;
            for start in (pages.start.max(first)..end).step_by(batch) {
                self.save_pages(tokens, kv, start..end.min(start + batch));
            }
        }
    }

    /// Saves the windows in front of the token pages `ends`, if the request's lock keeps them whole. Other requests will
    /// continue there. With write-back they are only named here, and saved when they are evicted.
    pub(crate) fn save_windows(
        &mut self,
        tokens: &Tokens<'_>,
        kv: &mut Holding,
        ends: impl IntoIterator<Item = usize>,
    ) {
        let Some(shape) = self.window else { return };
        for end in ends {
            let (Some(tiers), Some(tree)) = (&self.tiers, &mut self.tree) else { return };
            let Some(lock) = kv.lock.as_ref().filter(|lock| tree.is_found(lock)) else { return };
            let (seen, first, kept) = (shape.seen_at(end, self.page_tokens), kv.window.first, lock.windows());
            if seen.is_empty() || seen.start < first || seen.end > first + kept {
                continue;
            }
            let (policy, often) = (tiers.config().write, tiers.config().write_after_hits);
            kv.name_pages(tokens, &self.identity, end, self.page_tokens);
            let Some(lock) = &kv.lock else { return };
            match policy {
                WritePolicy::WriteBack => {
                    tree.name_windows(lock, seen.start - first, &kv.names[seen.clone()])
                }
                WritePolicy::WriteThroughSelective
                    if !tree
                        .hits(lock)
                        .iter()
                        .any(|(pages, hits)| pages.contains(&(end - 1)) && *hits >= often) => {}
                _ => {
                    let batch = (tiers.config().batch_pages / shape.parts).max(1) as usize;
                    for start in seen.clone().step_by(batch) {
                        self.save_parts(kv, start..seen.end.min(start + batch), shape);
                    }
                }
            }
        }
    }

    fn save_parts(&mut self, kv: &Holding, pages: Range<usize>, shape: WindowShape) {
        let (Some(tiers), Some(tree), Some(lock)) = (&mut self.tiers, &mut self.tree, &kv.lock) else {
            return;
        };
        let first = kv.window.first;
        let names = kv.names[pages.clone()]
            .iter()
            .flat_map(|name| (0..shape.parts).map(|part| name.window_part(part)));
        let parts = kv.window.cached.iter().skip((pages.start - first) * shape.parts as usize);
        let batch = unsaved(tiers, names.zip(parts.copied()));
        if batch.is_empty() {
            return;
        }
        let keep = Keep::Lock(tree.lock_windows_again(lock, pages.start - first..pages.end - first));
        if let Some(Keep::Lock(lock)) = tiers.save(keep, batch.into_iter()) {
            self.unlock(Some(lock));
        }
    }

    fn save_pages(&mut self, tokens: &Tokens<'_>, kv: &mut Holding, pages: Range<usize>) {
        kv.name_pages(tokens, &self.identity, pages.end, self.page_tokens);
        let (Some(tiers), Some(tree), Some(lock)) = (&mut self.tiers, &mut self.tree, &kv.lock) else {
            return;
        };
        let batch = unsaved(tiers, pages.map(|page| (kv.names[page], kv.table[page])));
        if batch.is_empty() {
            return;
        }
        let keep = Keep::Lock(tree.lock_again(lock));
        if let Some(Keep::Lock(lock)) = tiers.save(keep, batch.into_iter()) {
            self.unlock(Some(lock));
        }
    }

    /// Evicts pages before they are needed, until as many are free or on their way out as the policy wants.
    pub(crate) fn write_back(&mut self) {
        let Some(tiers) = &self.tiers else { return };
        if tiers.config().write != WritePolicy::WriteBack {
            return;
        }
        let ahead = (tiers.config().write_back_ahead as usize).min(self.pool.total() / 2);
        let (wanted, leaving) = (tiers.config().write_back_ahead as usize, tiers.evicted_pages());
        let there = self.pool.counts().free + leaving;
        self.evict_and_save(ahead.saturating_sub(there));
        // Windows that are limited to a part of the pool can run short while the pool has free pages.
        let limit = self.pool.limits().window as usize;
        if limit < self.pool.total()
            && let Some(tree) = &mut self.tree
        {
            let there = limit.saturating_sub(self.pool.used(Component::Window)) + leaving;
            let evicted = tree.evict_windows_named(wanted.min(limit / 2).saturating_sub(there));
            self.save_evicted(evicted);
        }
    }

    fn evict_and_save(&mut self, wanted: usize) {
        let Some(tree) = &mut self.tree else { return };
        if wanted > 0 {
            let evicted = tree.evict_named(wanted, &mut self.changes);
            self.save_evicted(evicted);
        }
    }

    fn save_evicted(&mut self, evicted: Vec<(Vec<PageHash>, CachedPages)>) {
        let Some(tiers) = &mut self.tiers else { return };
        for (names, mut pages) in evicted {
            // A window part without a name is not saved.
            if names.is_empty() {
                self.pool.release_cached(pages);
                continue;
            }
            let unsaved = pages.extract(|place| !tiers.has(&names[place]));
            self.pool.release_cached(pages);
            let names: Vec<PageHash> = names.into_iter().filter(|name| !tiers.has(name)).collect();
            if unsaved.ids().is_empty() {
                self.pool.release_cached(unsaved);
                continue;
            }
            let ids = unsaved.ids().to_vec();
            let keep = Keep::Evicted(self.pool.quarantine_cached(unsaved));
            if let Some(Keep::Evicted(pages)) = tiers.save(keep, names.into_iter().zip(ids)) {
                quarantine::copied(&mut self.pool, pages);
            }
        }
    }

    /// Gives up copies that have not begun and whose pages nothing else keeps, the youngest first, until so many pages
    /// are available.
    pub(crate) fn give_up_saves(&mut self, wanted: Pages) {
        let mut kept = Vec::new();
        while !self.can_have(wanted) {
            let (Some(tiers), Some(tree)) = (&mut self.tiers, &self.tree) else { return };
            let taken = tiers.take_youngest();
            let Some(youngest) = taken.first() else { break };
            if let Keep::Lock(lock) = &youngest.keep
                && !tree.is_kept_by(lock, taken.len())
            {
                kept.push(taken);
                continue;
            }
            let released = tiers.give_up(taken);
            self.released(released);
        }
        if let Some(tiers) = &mut self.tiers {
            kept.into_iter().rev().for_each(|taken| tiers.wait_again(taken));
        }
    }

    /// Lets go of the pages of copies that have ended or will never begin.
    pub(super) fn released(&mut self, kept: Vec<Keep>) {
        for keep in kept {
            match keep {
                Keep::Lock(lock) => self.unlock(Some(lock)),
                Keep::Evicted(pages) => quarantine::copied(&mut self.pool, pages),
            }
        }
    }

    /// Evicts for a request that needs the pages now.
    pub(super) fn evict_now(&mut self, missing: usize) {
        let Some(tree) = &mut self.tree else { return };
        match &mut self.tiers {
            Some(tiers) if tiers.config().write == WritePolicy::WriteBack => {
                let evicted = tree.evict_named(missing, &mut self.changes);
                for (names, pages) in evicted {
                    let dropped = names.iter().filter(|name| !tiers.has(name)).count();
                    tiers.stats_mut().dropped += dropped as u64;
                    self.pool.release_cached(pages);
                }
            }
            _ => {
                let evicted: CachedPages = tree.evict(missing, &mut self.changes);
                self.pool.release_cached(evicted);
            }
        }
    }
}

/// The pages that are neither in host memory nor on their way there.
fn unsaved(tiers: &Hierarchy, pages: impl Iterator<Item = (PageHash, PageId)>) -> Vec<(PageHash, PageId)> {
    pages.filter(|(name, _)| !tiers.has(name)).collect()
}
