//! What a request in the queue finds of its prompt, in the radix cache and below.

use super::Scheduler;
use super::growth::Pages;
use super::job::Stage;
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

    /// The same for a worker that computes and restores windows from below: goes on where it gets furthest with both.
    fn find_end(&mut self, now: Time, room: Room, promised: Pages) -> Option<Prefix> {
        let shape = self.restored_shape()?;
        let job = self.jobs.get(&room).filter(|job| job.stage == Stage::Queued && !job.request.no_cache)?;
        let (hierarchy, tree) = (self.hierarchy.as_ref()?, self.cache.as_mut()?);
        let namespace = tree.namespace(&job.request.namespace)?;
        let tokens = &job.request.prompt[..super::cache::usable_prefix(self.config.role, &job.request)];
        let near = tree.window_parts(namespace, tokens);
        // Who cannot be admitted anyway is spared a look below; what is restored takes as many pages as what is computed.
        let least = self.pages_for(job.known()).saturating_sub(near.len());
        if !self.can_have(promised + Pages { full: least, window: 0 }) {
            return None;
        }
        let end = hierarchy.end_for(now, room, &near)?;
        let tree = self.cache.as_mut()?;
        let lock = tree.hold_front(namespace, tokens, end.reach, shape);
        Some(Prefix { lock, end: Some(end) })
    }

    /// The window of a worker whose requests restore window parts: one that computes.
    pub(super) fn restored_shape(&self) -> Option<crate::window::WindowShape> {
        let computes = self.config.role != super::Role::Decode && self.hierarchy.is_some();
        self.config.window.filter(|_| computes)
    }
}
