//! What requests leave behind for those that begin alike.

use super::job::{Job, Stage};
use super::{Config, Role, Scheduler};
use crate::ids::Room;
use crate::radix::{Policy, PrefixLock, RadixTree, TreeConfig};
use crate::request::Request;

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

/// Tokens of a request's prompt that may come from the cache. A worker that computes needs at least one token to
/// compute; one that is sent the rest may hold all of it.
pub(super) fn usable_prefix(role: Role, request: &Request) -> usize {
    match role {
        Role::Decode => request.prompt.len(),
        Role::Prefill | Role::Aggregated => request.prompt.len() - 1,
    }
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
        if job.stage == Stage::Retracted {
            return Some(tree.hold(namespace, &job.known_tokens()));
        }
        let usable = usable_prefix(self.config.role, request);
        Some(tree.hold(namespace, &request.prompt[..usable]))
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
        self.stats.delivered_tokens += u64::from(job.promised_tokens);
        if self.config.role == Role::Decode {
            self.stats.pages_saved += u64::from(job.promised_tokens / self.config.page_tokens);
            let kind = match (job.promised_tokens, job.transferred_pages) {
                (0, _) => &mut self.stats.full_transfers,
                (_, 0) => &mut self.stats.full_hits,
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
        Some(Flushed { freed, in_use: tree.counts().pages })
    }

    /// Pages that can be had: free ones, and cached ones that nobody uses.
    pub(super) fn pages_to_be_had(&self) -> usize {
        self.pool.counts().free + self.cache.as_ref().map_or(0, RadixTree::evictable)
    }

    /// Gives up cached pages until so many are free.
    pub(super) fn make_free(&mut self, pages: usize) {
        let missing = pages.saturating_sub(self.pool.counts().free);
        if missing > 0 {
            self.evict_now(missing);
        }
    }

    /// Gives the tree the whole pages of what a job has computed or received. The job goes on with the tree's pages;
    /// pages that the tree had already from somebody else are free, or stay the job's until it ends where a transfer or
    /// a batch may still read them. Kept without need they could be what a request that runs alone lacks in the end.
    pub(super) fn cache_computed(&mut self, room: Room) {
        let (Some(tree), Some(job)) = (&mut self.cache, self.jobs.get_mut(&room)) else { return };
        self.leaders.remove(room);
        if job.lock.is_none() || job.held.is_none() {
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
        job.lock = Some(inserted.lock);
        match &mut job.spare {
            _ if job.outgoing.is_none() && job.in_batch.is_none() => self.pool.release(inserted.duplicates),
            Some(spare) => spare.append(inserted.duplicates),
            None => job.spare = Some(inserted.duplicates),
        }
        self.save_computed(room, inserted.taken);
    }
}

impl Job {
    /// Takes note of how much of the prompt was cached at admission.
    pub(super) fn begin_with(&mut self, prefix: usize, page_tokens: usize, role: Role) {
        self.cached_tokens = u32::try_from(prefix * page_tokens).unwrap_or(u32::MAX);
        self.promised_tokens = self.cached_tokens;
        if role != Role::Decode {
            self.computed = prefix * page_tokens;
        }
    }

    /// Takes note of how much was cached when the job was admitted again.
    pub(super) fn go_on_with(&mut self, prefix: usize, page_tokens: usize) {
        self.computed = prefix * page_tokens;
    }
}
