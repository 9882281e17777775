//! The prefix of a waiting request that is found in the radix tree and in the offload tiers.

use super::{Cache, Holding, Pages, Tokens};
use crate::hierarchy::End;
use crate::ids::Time;
use crate::radix::PrefixLock;

/// The found prefix with which a request is admitted. It keeps pages locked, so the caller must admit the request or
/// [let go](Cache::forgo) of the prefix.
#[derive(Debug)]
#[must_use]
pub(crate) struct Prefix {
    /// Lock on the pages in the radix tree.
    pub(super) lock: PrefixLock,
    /// Where the request continues, if window parts come from the offload tiers. Otherwise the lock alone decides.
    pub(super) end: Option<End>,
}

impl Prefix {
    /// Token pages that are in the radix tree.
    pub(crate) fn cached(&self) -> usize {
        self.lock.pages()
    }

    /// Token pages in the radix tree of which nothing has to be computed: [`cached`](Self::cached), or fewer where the
    /// window at their end is recomputed.
    pub(crate) fn complete(&self) -> usize {
        self.lock.from()
    }

    /// The token page up to which the full parts are there, or will be.
    pub(crate) fn page(&self) -> usize {
        self.end.as_ref().map_or(self.lock.pages(), |end| end.reach.end)
    }

    /// The token page at which computing begins: [`page`](Self::page), or an earlier one when a window is recomputed.
    pub(super) fn from(&self) -> usize {
        self.end.as_ref().map_or(self.lock.from(), |end| end.reach.start)
    }

    /// Token pages whose window parts come from the offload tiers.
    pub(super) fn restored_windows(&self) -> usize {
        self.end.as_ref().map_or(0, |end| end.windows.len())
    }
}

impl Cache {
    /// Whether a peer sends a waiting request the KV that it does not find here. Otherwise this worker computes it.
    pub(super) fn sends(&self, tokens: &Tokens<'_>) -> bool {
        self.is_sent && !tokens.resumes
    }

    /// Locks the cached prefix of a waiting request, as far as it is of use. `None` for a request that runs without the
    /// cache. Only admission counts as a use of the prefix. `promised` are pages of requests that are admitted before it.
    pub(crate) fn probe(&mut self, now: Time, tokens: &Tokens<'_>, promised: Pages) -> Option<Prefix> {
        match self.probe_tiers(now, tokens, promised) {
            Some(prefix) => Some(prefix),
            None => self.lock(tokens).map(|lock| Prefix { lock, end: None }),
        }
    }

    /// Lets go of a found prefix: the request is not admitted now.
    pub(crate) fn forgo(&mut self, prefix: Option<Prefix>) {
        self.unlock(prefix.map(|prefix| prefix.lock));
    }

    /// Like [`probe`](Self::probe), for a request that is computed here and restores windows. It continues at the best
    /// place that tree and tiers offer together.
    fn probe_tiers(&mut self, now: Time, tokens: &Tokens<'_>, promised: Pages) -> Option<Prefix> {
        if self.sends(tokens) || tokens.request.no_cache {
            return None;
        }
        let (shape, tiers, tree) = (self.window?, self.tiers.as_ref()?, self.tree.as_mut()?);
        if !tiers.knows(tokens.room()) {
            return None;
        }
        let namespace = tree.namespace(tokens.namespace())?;
        let usable = tokens.usable(false);
        let in_l1 = tree.window_parts(namespace, &usable);
        // Does not look at the tiers for a request that cannot be admitted anyway. Restoring takes as many pages as computing.
        let least = self.pages_for(tokens.known()).saturating_sub(in_l1.len());
        if !self.can_have(promised + Pages { full: least, window: 0 }) {
            return None;
        }
        let end = self.tiers.as_ref()?.end_for(now, tokens.room(), &in_l1)?;
        let lock = self.tree.as_mut()?.hold_front(namespace, &usable, end.reach, shape);
        Some(Prefix { lock, end: Some(end) })
    }

    fn lock(&mut self, tokens: &Tokens<'_>) -> Option<PrefixLock> {
        let is_sent = self.sends(tokens);
        let tree = self.tree.as_mut()?;
        if tokens.request.no_cache {
            return None;
        }
        let namespace = tree.namespace(tokens.namespace())?;
        let usable = tokens.usable(is_sent);
        // If a peer sends the rest of the prompt, it sends the window, too.
        Some(match self.window.filter(|_| !is_sent) {
            Some(window) => tree.hold_window(namespace, &usable, window),
            None => tree.hold(namespace, &usable),
        })
    }

    pub(super) fn unlock(&mut self, lock: Option<PrefixLock>) {
        if let (Some(tree), Some(lock)) = (&mut self.tree, lock) {
            tree.unlock(lock);
            self.pool.release_cached(tree.gone());
        }
    }

    /// Whole pages of a waiting request that may come from a cache.
    pub(crate) fn usable_pages(&self, tokens: &Tokens<'_>) -> usize {
        tokens.usable(self.sends(tokens)).len() / self.page_tokens
    }

    /// Asks the offload tiers for pages of a waiting request, which is new or was preempted. `place` is its place among
    /// all requests, in order of arrival.
    pub(crate) fn fetch(&mut self, now: Time, place: u64, tokens: &Tokens<'_>, kv: &mut Holding) {
        let is_sent = self.sends(tokens);
        let (Some(tiers), Some(tree)) = (&mut self.tiers, &mut self.tree) else { return };
        let usable = tokens.usable(is_sent);
        let pages = usable.len() / self.page_tokens;
        if tokens.request.no_cache || pages == 0 {
            return;
        }
        let Some(namespace) = tree.namespace(tokens.namespace()) else { return };
        let shape = self.window.filter(|_| !is_sent);
        let windows = shape.map(|shape| (shape, tree.window_parts(namespace, &usable)));
        let in_l1 = match &windows {
            Some((_, in_l1)) => in_l1.len(),
            None => tree.peek(namespace, &usable),
        };
        kv.name_pages(tokens, &self.identity, pages, self.page_tokens);
        let names = kv.names[..pages].to_vec();
        let wanted = crate::hierarchy::Wanted { place, names, in_l1, is_sent, windows };
        tiers.begin(now, tokens.room(), wanted);
    }
}
