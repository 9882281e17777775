//! What requests leave behind for those that begin alike.

use std::borrow::Cow;
use std::collections::BTreeSet;

use super::growth::Pages;
use super::job::Job;
use super::stage::Stage;
use super::{Config, Role, Scheduler};
use crate::hierarchy::Hierarchy;
use crate::ids::Room;
use crate::pool::Component;
use crate::radix::{Policy, PrefixLock, RadixTree, TreeConfig};

/// Namespaces at most, whatever the size of the pool.
const NAMESPACES: usize = 1 << 16;

/// An empty cache.
pub(super) fn open(config: &Config, policy: Policy) -> RadixTree {
    RadixTree::new(&TreeConfig {
        page_tokens: config.page_tokens,
        policy,
        identity: config.identity,
        // One that is kept has a page or a running request, so that in pools of up to as many pages nobody can take
        // up all the places.
        max_namespaces: NAMESPACES.min(config.pages as usize + config.max_running as usize),
        seed: config.seed,
    })
}

/// What became of the pages of a cache that was emptied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flushed {
    /// Pages that are free now.
    pub freed: usize,
    /// Pages that requests use; they are free when these end.
    pub in_use: usize,
}

impl Scheduler {
    /// Locks what is cached of a request's prompt; of a retracted one's answer so far too. `None` for a request that
    /// runs without the cache. It is a use of the prefix only when the request is admitted.
    pub(super) fn lock_prefix(&mut self, room: Room) -> Option<PrefixLock> {
        let job = self.jobs.get(&room)?;
        let tree = self.cache.as_mut()?;
        let request = &job.request;
        if request.no_cache {
            return None;
        }
        let namespace = tree.namespace(&request.namespace)?;
        let tokens = job.usable_tokens(self.config.role);
        // Who is sent the rest is sent the window too.
        Some(match self.config.window.filter(|_| job.computes(self.config.role)) {
            Some(window) => tree.hold_window(namespace, &tokens, window),
            None => tree.hold(namespace, &tokens),
        })
    }

    pub(super) fn unlock(&mut self, lock: Option<PrefixLock>) {
        if let (Some(tree), Some(lock)) = (&mut self.cache, lock) {
            tree.unlock(lock);
            self.pool.release_cached(tree.gone());
        }
    }

    /// A prompt is complete: counts where it came from.
    pub(super) fn count_prefix(&mut self, room: Room) {
        let Some(job) = self.jobs.get(&room) else { return };
        let window = u32::try_from(self.tail_pages(job)).unwrap_or(u32::MAX);
        let near = job.promised_tokens.min(job.near_tokens);
        self.stats.delivered_tokens += u64::from(near);
        self.stats.delivered_below_tokens += u64::from(job.promised_tokens - near);
        if self.config.role == Role::Decode {
            self.stats.pages_saved += u64::from(job.promised_tokens / self.config.page_tokens);
            let kind = match (job.promised_tokens, job.transferred_pages) {
                (0, _) => &mut self.stats.full_transfers,
                (_, pages) if pages <= window => &mut self.stats.full_hits,
                _ => &mut self.stats.delta_transfers,
            };
            *kind += 1;
        }
    }

    /// Empties the radix cache and what is in host memory; storage keeps its pages. What requests use stays for them, is found by nobody else, and goes with the last of
    /// them; what they compute or receive from here on with what they found before enters no cache.
    ///
    /// `None` when the worker keeps no cache.
    pub fn flush_cache(&mut self) -> Option<Flushed> {
        let tree = self.cache.as_mut()?;
        let pages = tree.clear(&mut self.cache_changes);
        let freed = pages.ids().len();
        self.pool.release_cached(pages);
        self.leaders.clear();
        if let Some(hierarchy) = &mut self.hierarchy {
            hierarchy.clear();
        }
        Some(Flushed { freed, in_use: tree.counts().pages + tree.counts().window_pages })
    }

    /// Whether so many pages can be had: free ones, and cached ones that nobody uses, within what each component may have.
    pub(super) fn can_have(&self, pages: Pages) -> bool {
        let (full, window) = self.cache.as_ref().map_or((0, 0), RadixTree::evictable_parts);
        let within = |component, wanted, evictable| {
            self.pool.used(component) + wanted <= self.pool.limits().of(component) as usize + evictable
        };
        within(Component::Full, pages.full, full)
            && within(Component::Window, pages.window, window)
            && pages.full + pages.window <= self.pool.counts().free + full + window
    }

    /// Gives up cached pages until so many can be taken.
    pub(super) fn make_free(&mut self, pages: Pages) {
        if self.pool.fits(pages.full, pages.window) {
            return;
        }
        let over = |scheduler: &Self, component, wanted: usize| {
            let limit = scheduler.pool.limits().of(component) as usize;
            // One that may have all of the pool lacks what the pool lacks.
            let over = (scheduler.pool.used(component) + wanted).saturating_sub(limit);
            if limit == scheduler.pool.total() { 0 } else { over }
        };
        let (full, window) =
            (over(self, Component::Full, pages.full), over(self, Component::Window, pages.window));
        if let Some(tree) = &mut self.cache {
            let windows = tree.evict_windows_named(window);
            let save = self.hierarchy.as_mut().filter(|hierarchy| hierarchy.saves_evicted());
            if let Some(hierarchy) = save {
                let names = windows.iter().flat_map(|(names, _)| names);
                let dropped = names.filter(|name| !hierarchy.has(name)).count();
                hierarchy.stats_mut().dropped += dropped as u64;
            }
            windows.into_iter().for_each(|(_, pages)| self.pool.release_cached(pages));
            self.pool.release_cached(tree.evict_pages(full, &mut self.cache_changes));
        }
        let missing = (pages.full + pages.window).saturating_sub(self.pool.counts().free);
        if missing > 0 {
            self.evict_now(missing);
        }
    }

    /// Gives the tree the whole pages of what a job has computed or received. The job goes on with the tree's pages;
    /// pages that the tree had already from somebody else are free, or stay the job's until it ends where a transfer or
    /// a batch may still read them. Kept without need they could be what a request that runs alone lacks in the end.
    pub(super) fn cache_computed(&mut self, room: Room) {
        let Some(job) = self.jobs.get(&room) else { return };
        // A decode worker is sent its windows. Storage has the answer's from here, for prefill, which never saw it.
        let page_tokens = self.config.page_tokens as usize;
        let answered = job.computed / page_tokens * page_tokens > job.request.prompt.len();
        let stores = self.hierarchy.as_ref().is_some_and(Hierarchy::writes);
        let windows = self.config.role != Role::Decode || (answered && stores);
        self.cache_parts(room, windows, false);
    }

    /// The same for a request that is to compute here what is not cached any more, whatever the role.
    pub(super) fn cache_retracted(&mut self, room: Room) {
        self.cache_parts(room, true, true);
    }

    /// Somebody went on from the beginning of a token page of this job's prefix.
    pub(super) fn mark_window(&mut self, room: Room, token_page: Option<usize>) {
        let lock = self.jobs.get(&room).and_then(|job| job.lock.as_ref());
        if let (Some(shape), Some(tree), Some(lock), Some(at)) =
            (self.config.window, &mut self.cache, lock, token_page)
        {
            tree.mark_window(lock, at, shape);
        }
    }

    /// Gives back what jobs hold although they go on with the cache's pages, where nothing that was begun reads it any
    /// more; false when there is nothing.
    pub(super) fn release_spares(&mut self) -> bool {
        let settled = |job: &Job| {
            job.in_batch.is_none() && job.outgoing.as_ref().is_none_or(|outgoing| outgoing.tags.is_empty())
        };
        let mut released = false;
        for job in self.jobs.values_mut().filter(|job| settled(job)) {
            if let Some(spare) = job.spare.take() {
                released |= !spare.ids().is_empty();
                self.pool.release(spare);
            }
        }
        released
    }

    /// `windows`: with its window parts; `retracted`: it goes on behind all of it.
    fn cache_parts(&mut self, room: Room, windows: bool, retracted: bool) {
        let (Some(tree), Some(job)) = (&mut self.cache, self.jobs.get_mut(&room)) else { return };
        if job.computed >= job.request.prompt.len() {
            self.leaders.remove(room);
        }
        // What lies before the end of its prefix is in the tree already, and the window there is not complete.
        if job.lock.is_none() || job.held.is_none() || !job.again.is_empty() {
            return;
        }
        let (Some(lock), Some(held)) = (job.lock.take(), job.held.take()) else { return };
        let tokens: Vec<u32> = (0..job.computed).map(|position| job.token(position)).collect();
        let inserted = tree.insert(&mut self.pool, lock, &tokens, held, 0, &mut self.cache_changes);
        let mut table = Vec::with_capacity(job.table.len());
        tree.pages(&inserted.lock, &mut table);
        table.extend_from_slice(&job.table[table.len()..]);
        job.table = table;
        job.held = Some(inserted.rest);
        let (mut lock, mut duplicates) = (inserted.lock, inserted.duplicates);
        if let Some(shape) = self.config.window.filter(|_| windows) {
            let own = std::mem::take(&mut job.window.own);
            let kept = tree.keep_windows(&mut self.pool, &mut lock, job.window.first, shape, own);
            duplicates.append(kept.duplicates);
            // The next turn goes on behind all of it; the same prompt, and one that differs in its end, from before its last
            // token.
            let (end, prompt) = (job.computed, job.request.prompt.len());
            let page_tokens = self.config.page_tokens as usize;
            // Somebody has gone on from there.
            if let Some(at) = job.restored_window.take() {
                tree.mark_window(&lock, at, shape);
            }
            let computes = self.config.role != Role::Decode;
            if retracted || (end >= prompt && computes) {
                tree.mark_window(&lock, end / page_tokens, shape);
            }
            if end >= prompt && computes {
                tree.mark_window(&lock, (prompt - 1) / page_tokens, shape);
            }
            (job.window.cached, job.window.own) = (kept.pages, kept.rest);
        }
        job.lock = Some(lock);
        match &mut job.spare {
            _ if job.outgoing.is_none() && job.in_batch.is_none() => self.pool.release(duplicates),
            Some(spare) => spare.append(duplicates),
            None => job.spare = Some(duplicates),
        }
        self.save_computed(room, inserted.taken);
        if windows {
            self.save_ends(room, retracted);
        }
    }

    /// What is in the tree of a prompt that is complete, of an answer, or of a request that will go on, goes below with its
    /// window.
    fn save_ends(&mut self, room: Room, retracted: bool) {
        let Some(job) = self.jobs.get(&room) else { return };
        let (end, prompt) = (job.computed, job.request.prompt.len());
        let page_tokens = self.config.page_tokens as usize;
        let ends = [
            (end >= prompt).then(|| (prompt - 1) / page_tokens),
            (end >= prompt || retracted).then(|| end / page_tokens),
        ];
        self.save_windows(room, BTreeSet::from_iter(ends.into_iter().flatten()));
    }
}

impl Job {
    /// Whether a job that waits computes on this worker what it does not find; otherwise it is sent that.
    pub(super) fn computes(&self, role: Role) -> bool {
        role != Role::Decode || *self.stage == Stage::Retracted
    }

    /// Tokens whose KV a job that waits may find in a cache. One that computes needs at least one token to compute; one that is
    /// sent the rest may hold all of its prompt. One that was retracted looks for its answer too: for all but the last token,
    /// which was drawn and never computed, or must be computed for the first draw.
    pub(super) fn usable_tokens(&self, role: Role) -> Cow<'_, [u32]> {
        let prompt = &self.request.prompt;
        match *self.stage {
            Stage::Retracted => (0..self.known() - 1).map(|position| self.token(position)).collect(),
            _ if self.computes(role) => Cow::Borrowed(&prompt[..prompt.len() - 1]),
            _ => Cow::Borrowed(prompt),
        }
    }

    /// Takes note of how much of the prompt was cached at admission.
    pub(super) fn begin_with(&mut self, prefix: usize, page_tokens: usize, role: Role) {
        self.cached_tokens = u32::try_from(prefix * page_tokens).unwrap_or(u32::MAX);
        (self.promised_tokens, self.near_tokens) = (self.cached_tokens, self.cached_tokens);
        if role != Role::Decode {
            self.computed = prefix * page_tokens;
        }
    }

    /// Takes note of how much was cached when the job was admitted again.
    pub(super) fn go_on_with(&mut self, prefix: usize, page_tokens: usize) {
        self.computed = prefix * page_tokens;
        // What it was promised failed before it had anything, and this is what it has.
        if !self.was_retracted() {
            self.cached_tokens = u32::try_from(self.computed).unwrap_or(u32::MAX);
            self.promised_tokens = self.cached_tokens;
        }
    }
}
