//! Keeping pages of requests in the cache, and counting where the KV of their prompts came from.

use super::{Flushed, Scheduler};
use crate::ids::Room;

impl Scheduler {
    /// Gives the cache all whole pages that a job has computed or received.
    pub(super) fn keep(&mut self, room: Room) {
        self.keep_as(room, false);
    }

    /// The same for a job whose positions from `from` on a batch has computed.
    pub(super) fn keep_computed(&mut self, room: Room, from: usize) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let (may_be_read, prompt) = (job.outgoing.is_some(), job.request.prompt.len());
        let (tokens, kv) = job.holding();
        self.cache.keep_computed(&tokens, kv, from, may_be_read);
        if job.kv.computed() >= prompt {
            self.leaders.remove(room);
        }
    }

    /// The same for a request that is about to be preempted.
    pub(super) fn keep_preempted(&mut self, room: Room) {
        self.keep_as(room, true);
    }

    fn keep_as(&mut self, room: Room, preempted: bool) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        if job.kv.computed() >= job.request.prompt.len() {
            self.leaders.remove(room);
        }
        let may_be_read = job.outgoing.is_some() || job.stage().in_batch().is_some();
        let (tokens, kv) = job.holding();
        match preempted {
            true => self.cache.keep_preempted(&tokens, kv, may_be_read),
            false => self.cache.keep(&tokens, kv, may_be_read),
        }
    }

    /// Gives back the spare pages of jobs, which continue with the cache's pages. Returns `false` when that frees
    /// nothing.
    pub(super) fn release_spares(&mut self) -> bool {
        let mut released = false;
        for job in self.jobs.values_mut().filter(|job| !job.is_read()) {
            released |= self.cache.release_spare(&mut job.kv);
        }
        released
    }

    /// Counts where the KV of a complete prompt came from.
    pub(super) fn count_origin(&mut self, room: Room) {
        let Some(job) = self.jobs.get(&room) else { return };
        let origin = job.origin;
        let in_l1 = origin.promised.min(origin.in_l1);
        self.stats.delivered_tokens += u64::from(in_l1);
        self.stats.delivered_offload_tokens += u64::from(origin.offloaded());
        if self.config.role.is_sent_kv() {
            let window = u32::try_from(self.cache.tail_pages(&job.tokens())).unwrap_or(u32::MAX);
            self.stats.pages_saved += u64::from(origin.promised / self.config.page_tokens);
            let kind = match (origin.promised, origin.transferred_pages) {
                (0, _) => &mut self.stats.full_transfers,
                (_, pages) if pages <= window => &mut self.stats.full_hits,
                _ => &mut self.stats.delta_transfers,
            };
            *kind += 1;
        }
    }

    /// Empties the radix cache and host memory. Storage keeps its pages. Pages in use stay for their requests, are
    /// found by no other request, and go with the last of these requests. Pages that these requests compute or receive
    /// from now on, behind the ones that they found before, enter no cache.
    ///
    /// `None` when the worker keeps no cache.
    pub fn flush_cache(&mut self) -> Option<Flushed> {
        let flushed = self.cache.flush()?;
        self.leaders.clear();
        Some(flushed)
    }
}
