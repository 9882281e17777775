//! What requests leave in the radix tree for those that begin alike.

use std::collections::BTreeSet;

use super::{Cache, Holding, Tokens};
use crate::hierarchy::Hierarchy;

impl Cache {
    /// Gives the tree the whole pages of what a request has computed or received. The request continues with the tree's pages.
    /// Pages that the tree had already are free, or stay the request's until it ends if something may still read them
    /// (`may_be_read`: a transfer or a batch). Kept without need they could be what a request that runs alone lacks in the end.
    pub(crate) fn keep(&mut self, tokens: &Tokens<'_>, kv: &mut Holding, may_be_read: bool) {
        // A decode worker is sent its windows. Storage has the answer's from here, for prefill, which never saw it.
        let answered = kv.computed / self.page_tokens * self.page_tokens > tokens.prompt().len();
        let stores = self.tiers.as_ref().is_some_and(Hierarchy::writes);
        let windows = !self.is_sent || (answered && stores);
        self.keep_parts(tokens, kv, may_be_read, windows, false);
    }

    /// The same for a request that is preempted: it will compute here what is not cached then, whatever the worker does.
    pub(crate) fn keep_preempted(&mut self, tokens: &Tokens<'_>, kv: &mut Holding, may_be_read: bool) {
        self.keep_parts(tokens, kv, may_be_read, true, true);
    }

    /// The same for a request that a batch has computed on from a position, and what follows for its window: a complete recompute
    /// range is kept for other requests, and what no later position sees is given back.
    pub(crate) fn keep_computed(
        &mut self,
        tokens: &Tokens<'_>,
        kv: &mut Holding,
        from: usize,
        may_be_read: bool,
    ) {
        let whole = self.end_recompute(kv);
        let prompt = tokens.prompt().len();
        // Others that part from this prompt somewhere need the window that is there now, and gone later.
        if from < prompt && (kv.computed >= prompt || self.keeps_piecewise()) {
            self.keep(tokens, kv, may_be_read);
        }
        if let (Some(shape), Some(tree), Some(lock), Some(at)) =
            (self.window, &mut self.tree, &kv.lock, whole)
        {
            tree.mark_window(lock, at, shape);
        }
        self.save_windows(tokens, kv, whole);
        // Only now: what the tree takes of a prompt's windows is found again while there are pages for it.
        self.release_unseen(kv);
    }

    /// Gives back what a request holds although it continues with the tree's pages. No batch and no transfer reads it any more.
    /// Returns whether that freed pages.
    pub(crate) fn release_spare(&mut self, kv: &mut Holding) -> bool {
        let Some(spare) = kv.spare.take() else { return false };
        let released = !spare.ids().is_empty();
        self.pool.release(spare);
        released
    }

    /// `windows` says whether its window parts are kept too, and `preempted` whether it continues behind all of it.
    fn keep_parts(
        &mut self,
        tokens: &Tokens<'_>,
        kv: &mut Holding,
        may_be_read: bool,
        windows: bool,
        preempted: bool,
    ) {
        let Some(tree) = &mut self.tree else { return };
        // What lies before the end of its prefix is in the tree already, and the window there is not complete.
        if kv.lock.is_none() || kv.held.is_none() || !kv.recompute.is_empty() {
            return;
        }
        let (Some(lock), Some(held)) = (kv.lock.take(), kv.held.take()) else { return };
        let computed = tokens.range(0..kv.computed);
        // There the larger number stays longer.
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
            // The next turn continues behind all of it. The same prompt, and one that differs in its end, continue from
            // before the prompt's last token.
            let (end, prompt) = (kv.computed, tokens.prompt().len());
            // This request continued from there.
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

    /// What is in the tree of a complete prompt, of an answer, or of a request that will continue, goes to the offload tiers with
    /// its window.
    fn save_ends(&mut self, tokens: &Tokens<'_>, kv: &mut Holding, preempted: bool) {
        let (end, prompt) = (kv.computed, tokens.prompt().len());
        let ends = [
            (end >= prompt).then(|| (prompt - 1) / self.page_tokens),
            (end >= prompt || preempted).then(|| end / self.page_tokens),
        ];
        self.save_windows(tokens, kv, BTreeSet::from_iter(ends.into_iter().flatten()));
    }
}
