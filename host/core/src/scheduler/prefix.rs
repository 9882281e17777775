//! What a request in the queue finds of its prompt, in the radix cache and below.

use super::Scheduler;
use super::growth::Pages;
use crate::hierarchy::End;
use crate::ids::{Room, Time};
use crate::radix::PrefixLock;

/// What a request is admitted with.
#[derive(Debug)]
pub(super) struct Prefix {
    /// What is in the radix cache.
    pub lock: PrefixLock,
    /// Where the request goes on, if more than the lock decides that: window parts come from below the pool as well.
    pub end: Option<End>,
}

impl Prefix {
    /// The token page up to which the full parts are there, or will be.
    pub(super) fn page(&self) -> usize {
        self.end.as_ref().map_or(self.lock.pages(), |end| end.reach.end)
    }

    /// The token page at which computing begins: the same, or one before it for a window that is computed again.
    pub(super) fn from(&self) -> usize {
        self.end.as_ref().map_or(self.lock.from(), |end| end.reach.start)
    }

    /// Token pages whose window parts come from below.
    pub(super) fn restored_windows(&self) -> usize {
        self.end.as_ref().map_or(0, |end| end.windows.len())
    }
}

impl Scheduler {
    /// Locks what is cached of a request's prompt, as far as it is of use. `None` for a request that runs without the cache.
    /// `promised` are the pages of those that are admitted before it.
    pub(super) fn find_prefix(&mut self, now: Time, room: Room, promised: Pages) -> Option<Prefix> {
        match self.find_end(now, room, promised) {
            Some(prefix) => Some(prefix),
            None => self.lock_prefix(room).map(|lock| Prefix { lock, end: None }),
        }
    }

    /// The same for one that computes and restores windows from below: goes on where it gets furthest with both.
    fn find_end(&mut self, now: Time, room: Room, promised: Pages) -> Option<Prefix> {
        let role = self.config.role;
        let job = self.jobs.get(&room).filter(|job| job.computes(role) && !job.request.no_cache)?;
        let (shape, hierarchy, tree) = (self.config.window?, self.hierarchy.as_ref()?, self.cache.as_mut()?);
        if !hierarchy.knows(room) {
            return None;
        }
        let namespace = tree.namespace(&job.request.namespace)?;
        let tokens = job.usable_tokens(role);
        let near = tree.window_parts(namespace, &tokens);
        // Who cannot be admitted anyway is spared a look below; what is restored takes as many pages as what is computed.
        let least = self.pages_for(job.known()).saturating_sub(near.len());
        if !self.can_have(promised + Pages { full: least, window: 0 }) {
            return None;
        }
        let end = hierarchy.end_for(now, room, &near)?;
        let tree = self.cache.as_mut()?;
        let lock = tree.hold_front(namespace, &tokens, end.reach, shape);
        Some(Prefix { lock, end: Some(end) })
    }
}
