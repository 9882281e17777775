//! Keeping the pages of requests in the radix tree, for later requests with the same prefix.

use std::collections::BTreeSet;

use super::{Cache, Holding, Tokens};
use crate::hierarchy::Hierarchy;

impl Cache {
    /// Gives the tree all whole pages that a request has computed or received. The request continues with the tree's
    /// pages. Its own copies of pages that the tree had already are freed. If a transfer or a batch may still read them
    /// (`may_be_read`), they become spare pages of the request instead. Spare pages must not be kept without need: a
    /// request that runs alone could lack them in the end.
    pub(crate) fn keep(&mut self, tokens: &Tokens<'_>, kv: &mut Holding, may_be_read: bool) {
        // Prefill sends a decode worker its windows, so they need not be kept here. Only those of an answer are, if
        // storage is written: prefill never computed them and can read them from there.
        let answered = kv.computed / self.page_tokens * self.page_tokens > tokens.prompt().len();
        let stores = self.tiers.as_ref().is_some_and(Hierarchy::writes);
        let windows = !self.is_sent || (answered && stores);
        self.keep_parts(tokens, kv, may_be_read, windows, false);
    }

    /// The same for a request that is preempted. Its windows are kept on every worker: what is not cached later, it must
    /// compute here.
    pub(crate) fn keep_preempted(&mut self, tokens: &Tokens<'_>, kv: &mut Holding, may_be_read: bool) {
        self.keep_parts(tokens, kv, may_be_read, true, true);
    }

    /// The same for a request whose positions from `from` on a batch has computed. Also updates its window: the window of a
    /// complete recompute range is kept for other requests, and parts that no later position sees are given back.
    pub(crate) fn keep_computed(
        &mut self,
        tokens: &Tokens<'_>,
        kv: &mut Holding,
        from: usize,
        may_be_read: bool,
    ) {
        let whole = self.end_recompute(kv);
        let prompt = tokens.prompt().len();
        // Requests that branch off within this prompt need the window that exists now and is gone later.
        if from < prompt && (kv.computed >= prompt || self.keeps_each_chunk()) {
            self.keep(tokens, kv, may_be_read);
        }
        if let (Some(shape), Some(tree), Some(lock), Some(at)) =
            (self.window, &mut self.tree, &kv.lock, whole)
        {
            tree.mark_window(lock, at, shape);
        }
        self.save_windows(tokens, kv, whole);
        // This comes last: parts that the tree took above stay cached for other requests until their pages are needed.
        self.release_unseen(kv);
    }

    /// Gives back the spare pages of a request, which continues with the tree's pages. No batch and no transfer reads them any
    /// more. Returns whether pages were freed.
    pub(crate) fn release_spare(&mut self, kv: &mut Holding) -> bool {
        let Some(spare) = kv.spare.take() else { return false };
        let released = !spare.ids().is_empty();
        self.pool.release(spare);
        released
    }

    /// Gives the tree the pages of a request, and with `windows` its window parts. With `preempted` the request itself
    /// will continue behind all of them.
    fn keep_parts(
        &mut self,
        tokens: &Tokens<'_>,
        kv: &mut Holding,
        may_be_read: bool,
        windows: bool,
        preempted: bool,
    ) {
        let Some(tree) = &mut self.tree else { return };
        // In a recompute range there is nothing to keep: the tree has these pages already, and the window is not
        // complete.
        if kv.lock.is_none() || kv.held.is_none() || !kv.recompute.is_empty() {
            return;
        }
        let (Some(lock), Some(held)) = (kv.lock.take(), kv.held.take()) else { return };
        let computed = tokens.range(0..kv.computed);
        // Requests with smaller numbers are more urgent, and in the tree pages with larger numbers stay longer.
        let priority = tokens.request.priority.saturating_neg();
        let inserted = tree.insert(&mut self.pool, lock, &computed, held, priority, &mut self.changes);
        let mut table = Vec::with_capacity(kv.table.len());
        tree.pages(&inserted.lock, &mut table);
        table.extend_from_slice(&kv.table[table.len()..]);
        kv.table = table;
        kv.held = Some(inserted.rest);
        let (mut lock, mut duplicates) = (inserted.lock, inserted.duplicates);
        if let Some(shape) = self.window.filter(|_| windows) {
            let own = std::mem::take(&mut kv.window.own);
            let kept = tree.keep_windows(&mut self.pool, &mut lock, kv.window.first, shape, own);
            duplicates.append(kept.duplicates);
            // The next turn of a conversation continues behind all of it. A request with the same prompt, or one that
            // differs only at the end, continues before the prompt's last token.
            let (end, prompt) = (kv.computed, tokens.prompt().len());
            // This request continued at the window that it restored, and others may.
            if let Some(at) = kv.restored_window.take() {
                tree.mark_window(&lock, at, shape);
            }
            let computes = !self.is_sent;
            if preempted || (end >= prompt && computes) {
                tree.mark_window(&lock, end / self.page_tokens, shape);
            }
            if end >= prompt && computes {
                tree.mark_window(&lock, (prompt - 1) / self.page_tokens, shape);
            }
            (kv.window.cached, kv.window.own) = (kept.pages, kept.rest);
        }
        kv.lock = Some(lock);
        match &mut kv.spare {
            _ if !may_be_read => self.pool.release(duplicates),
            Some(spare) => spare.append(duplicates),
            None => kv.spare = Some(duplicates),
        }
        self.save_computed(tokens, kv, inserted.taken);
        if windows {
            self.save_ends(tokens, kv, preempted);
        }
    }

    /// Saves windows to the offload tiers: at the end of a complete prompt, of its answer, and of a request that was preempted
    /// and will continue.
    fn save_ends(&mut self, tokens: &Tokens<'_>, kv: &mut Holding, preempted: bool) {
        let (end, prompt) = (kv.computed, tokens.prompt().len());
        let ends = [
            (end >= prompt).then(|| (prompt - 1) / self.page_tokens),
            (end >= prompt || preempted).then(|| end / self.page_tokens),
        ];
        self.save_windows(tokens, kv, BTreeSet::from_iter(ends.into_iter().flatten()));
    }
}
