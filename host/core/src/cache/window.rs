//! The window parts of a request's KV: which of them it has, needs next, and no longer needs.
//!
//! ```text
//! token pages     0 . . . . . . . first . . . . . . . . . . . . . . end
//! window parts    gone            cached, kept by its lock   own    none yet
//! ```
//!
//! A request whose KV prefill sends has, from admission on, the parts that its first step sees ([`WindowShape::tail`]). On a
//! worker with a radix tree it also has the parts with which it could continue if it lost its pages
//! ([`WindowShape::kept_tail`]). These parts arrive with the last part of the transfer. A request that is computed here gets
//! parts for each chunk just before the chunk is computed ([`Cache::extend`]). Before its first chunk it gets the parts that it
//! restores from the [offload tiers](crate::hierarchy). When a batch is done, the parts that no later position sees are given
//! back: the request's own to the pool, cached ones to the tree. So what a prompt takes here depends on the window and not on
//! its length.
//!
//! Where the full parts of a prefix are cached and the window at its end is not, the request may recompute the window
//! from the full parts ([`WindowShape::reach`]). It begins before the end of its prefix, at `Holding::recompute`, with
//! no window at all, so the parts of its first positions are not exact. They are given back before the tree gets any
//! part.
//!
//! Only batches touch parts that are given back early. Transfers send the parts of the prompt's end, which stay until the
//! request ends. Parts that arrive belong to steps that have not begun.

use std::ops::Range;

use super::holding::Window;
use super::{Cache, Holding, Prefix, Tokens};
use crate::ids::{PageId, Room};
use crate::pool::HeldPages;
use crate::radix::PrefixLock;
use crate::window::{WindowPages, WindowShape};

/// Pages of the pool that window parts need at admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WindowNeed {
    pub now: usize,
    pub headroom: usize,
}

/// Pages of window parts that are kept at once within these token pages, when they are computed in chunks of `chunk`
/// positions.
fn kept(shape: WindowShape, token_pages: Range<usize>, chunk: usize, page_tokens: usize) -> usize {
    shape.parts as usize * token_pages.len().min(shape.most_kept(chunk.max(1), page_tokens))
}

impl Cache {
    /// Token pages of a prompt whose window parts prefill sends to this worker.
    fn tail(&self, shape: WindowShape, tokens: &Tokens<'_>) -> Range<usize> {
        let prompt = tokens.prompt().len();
        match self.tree.is_some() && !tokens.request.no_cache {
            true => shape.kept_tail(prompt, self.page_tokens),
            false => shape.tail(prompt, self.page_tokens),
        }
    }

    /// Pages of window parts that prefill sends to this worker with the last part of a prompt's transfer.
    pub(crate) fn tail_pages(&self, tokens: &Tokens<'_>) -> usize {
        self.window.map_or(0, |shape| self.tail(shape, tokens).len() * shape.parts as usize)
    }

    /// Pages of window parts that a decode worker may ask for with the last part of a prompt's transfer: the fewest and the
    /// most. Which of both it asks for depends on its cache.
    pub(crate) fn tails(&self, prompt: usize) -> [usize; 2] {
        let Some(shape) = self.window else { return [0; 2] };
        [shape.tail(prompt, self.page_tokens), shape.kept_tail(prompt, self.page_tokens)]
            .map(|tail| tail.len() * shape.parts as usize)
    }

    /// The last `pages` pages of a prompt's window parts, which a transfer brings with the end of the prompt.
    pub(crate) fn window_tail(&self, tokens: &Tokens<'_>, kv: &Holding, pages: usize) -> Vec<PageId> {
        let Some(shape) = self.window else { return Vec::new() };
        let end = self.pages_for(tokens.prompt().len());
        kv.window.parts(shape, &(end - pages / shape.parts as usize..end))
    }

    /// Whether a request can continue behind any whole page of its KV. With sliding layers it needs the window there as well.
    pub(crate) fn continues_anywhere(&self) -> bool {
        self.window.is_none()
    }

    /// Whether KV can be cut behind any position. A state cannot: it cannot be cleared of a token that it has taken in.
    pub(crate) fn may_be_cut(&self) -> bool {
        self.window.is_none_or(|window| !window.keeps_state())
    }

    /// Whether a page holds all layers of the model. Layers that slide have pages of their own.
    pub(crate) fn pages_hold_all_layers(&self) -> bool {
        self.window.is_none()
    }

    /// Whether pages enter the tree after each chunk of a prompt. With sliding layers they must, because the window at
    /// the end of a chunk is gone later.
    pub(crate) fn keeps_each_chunk(&self) -> bool {
        self.window.is_some()
    }

    /// The shortest chunk of a prompt, in positions, for models whose shorter chunks need fewer pages at once. It is one page, as
    /// admission assumes. Shorter chunks cost more than a save that is made later, so only a step that gives saves up uses them.
    pub(crate) fn shortest_chunk(&self, give_up: bool) -> Option<usize> {
        self.window.map(|_| if give_up { 1 } else { self.page_tokens })
    }

    /// Fewest pages of window parts that a sequence of so many token pages needs, when its positions are computed one
    /// by one.
    fn least_window(&self, token_pages: usize) -> usize {
        self.window.map_or(0, |shape| kept(shape, 0..token_pages, 1, self.page_tokens))
    }

    /// Why a sequence of so many positions can never fit into the pool: the pages that it needs, for which layers, and the
    /// limit. `None` if it fits.
    pub(crate) fn too_long(&self, positions: usize) -> Option<(usize, &'static str, u32)> {
        let (most, limits) = (self.pages_for(positions), self.pool.limits());
        let window = self.least_window(most);
        let parts = [
            (most, " for the layers without a window", limits.full),
            (window, " for the layers with one", limits.window),
            (most + window, "", limits.total),
        ];
        let (pages, part, limit) = parts.into_iter().find(|(pages, _, limit)| *pages > *limit as usize)?;
        Some((pages, if self.window.is_some() { part } else { "" }, limit))
    }

    /// Pages of window parts that a waiting request needs beyond the locked ones, if it may grow to `end` token pages. A
    /// request that is computed here is counted with chunks of one page: requests share the tokens of a step, and chunks get
    /// shorter when window pages are short.
    pub(super) fn window_need(&self, tokens: &Tokens<'_>, prefix: Option<&Prefix>, end: usize) -> WindowNeed {
        let Some(shape) = self.window else { return WindowNeed::default() };
        let page_tokens = self.page_tokens;
        if self.sends(tokens) {
            let first = self.tail(shape, tokens).start;
            let now = self.tail_pages(tokens);
            let most = kept(shape, first..end.max(first), 1, page_tokens);
            return WindowNeed { now, headroom: most.saturating_sub(now) };
        }
        let parts = shape.parts as usize;
        let (page, from) = prefix.map_or((0, 0), |prefix| (prefix.page(), prefix.from()));
        let cached = prefix.map_or(0, |prefix| prefix.lock.windows()) * parts;
        let now = prefix.map_or(0, Prefix::restored_windows) * parts;
        let chunk = (tokens.known() - from * page_tokens).min(page_tokens);
        let first = if from < page { from } else { shape.first_kept(from * page_tokens, page_tokens) };
        let most = kept(shape, first..end.max(first), chunk, page_tokens);
        WindowNeed { now, headroom: most.saturating_sub(cached + now) }
    }

    /// Pages of window parts that an admitted request may ask for until it is as long as `end` token pages.
    #[inline]
    pub(super) fn window_headroom(&self, kv: &Holding, end: usize, chunk: usize) -> usize {
        let Some(shape) = self.window else { return 0 };
        let first = kv.window.first;
        let most = kept(shape, first..end.max(first), chunk.min(self.page_tokens), self.page_tokens);
        most.saturating_sub(kv.window.len())
    }

    /// Pages of window parts that a request lacks to be computed up to a position.
    #[inline]
    pub(super) fn window_missing(&self, kv: &Holding, end: usize) -> usize {
        let Some(shape) = self.window else { return 0 };
        self.pages_for(end).saturating_sub(kv.window.end(shape)) * shape.parts as usize
    }

    /// Sets up the window of an admitted request that continues at token page `at`: where its first part is, which parts are
    /// cached, and which are its own.
    pub(super) fn begin_window(&mut self, tokens: &Tokens<'_>, kv: &mut Holding, at: usize, own: HeldPages) {
        let Some(shape) = self.window else { return self.pool.release(own) };
        let first = match self.sends(tokens) {
            true => self.tail(shape, tokens).start,
            false if !kv.recompute.is_empty() => kv.recompute.start / self.page_tokens,
            false => shape.seen_at(at, self.page_tokens).start,
        };
        let cached = match (&self.tree, &kv.lock) {
            (Some(tree), Some(lock)) => tree.window_pages(lock),
            _ => Vec::new(),
        };
        kv.window = Window { first, cached, own };
    }

    /// The window parts for a batch that computes up to a position.
    #[inline]
    pub(crate) fn window_of(&self, kv: &Holding, end: usize) -> WindowPages {
        let Some(shape) = self.window else { return WindowPages::default() };
        let token_pages = kv.window.first..self.pages_for(end);
        WindowPages {
            first: u32::try_from(token_pages.start).unwrap_or(u32::MAX),
            pages: kv.window.parts(shape, &token_pages),
        }
    }

    /// Gives back the parts that no position behind the computed ones sees. No batch may be under way.
    pub(super) fn release_unseen(&mut self, kv: &mut Holding) {
        let Some(shape) = self.window else { return };
        let first = shape.first_kept(kv.computed, self.page_tokens);
        let parts = shape.parts as usize;
        let unseen = first.saturating_sub(kv.window.first);
        let cached = unseen.min(kv.window.cached.len() / parts);
        if let (Some(tree), Some(lock)) = (&mut self.tree, &mut kv.lock) {
            tree.unlock_windows(lock, cached);
        }
        kv.window.cached.drain(..cached * parts);
        let kept = kv.window.own.split_off((unseen - cached) * parts);
        self.pool.release(std::mem::replace(&mut kv.window.own, kept));
        kv.window.first += unseen;
    }

    /// Gives back the parts behind the first `positions` positions.
    pub(super) fn trim_window(&mut self, kv: &mut Holding, positions: usize) {
        let Some(shape) = self.window else { return };
        let end = self.pages_for(positions).max(kv.window.first);
        let kept = (end - kv.window.first) * shape.parts as usize;
        let own = kept.saturating_sub(kv.window.cached.len());
        if own < kv.window.own.ids().len() {
            let behind = kv.window.own.split_off(own);
            self.pool.release(behind);
        }
    }

    /// Ends the recompute range of a request once all of it is computed: gives back its first parts, which are not
    /// exact, and returns the token page in front of which the window is complete. `None` without a range, and before
    /// its end.
    pub(super) fn end_recompute(&mut self, kv: &mut Holding) -> Option<usize> {
        let shape = self.window?;
        if kv.recompute.is_empty() || kv.computed < kv.recompute.end {
            return None;
        }
        let end = std::mem::take(&mut kv.recompute).end;
        let blurred = shape.first_live(end, self.page_tokens).saturating_sub(kv.window.first);
        let exact = kv.window.own.split_off(blurred * shape.parts as usize);
        self.pool.release(std::mem::replace(&mut kv.window.own, exact));
        kv.window.first += blurred;
        Some(end / self.page_tokens)
    }

    /// Recounts one request's window. `computes_to` is for requests that take part in steps: the position up to which
    /// the request has KV, or will have after the present batch. It is `None` for other requests.
    ///
    /// # Panics
    /// When the request lacks parts, has too many, or its lock keeps others.
    pub(crate) fn audit_window(&self, room: Room, kv: &Holding, computes_to: Option<usize>) {
        let Some(shape) = self.window else {
            return assert_eq!(kv.window.len(), 0, "{room:?} has window parts of a model without a window");
        };
        let parts = shape.parts as usize;
        let locked = kv.lock.as_ref().map_or(0, PrefixLock::windows);
        assert_eq!(kv.window.cached.len(), locked * parts, "{room:?}: cached parts are kept by its lock");
        assert!(kv.window.len().is_multiple_of(parts), "{room:?} has a part in part");
        if kv.held.is_none() {
            assert_eq!(kv.window.len(), 0, "{room:?} waits and has window parts");
        } else if let Some(computes_to) = computes_to {
            let page_tokens = self.page_tokens;
            let end = self.pages_for(computes_to);
            let first = shape.first_live(kv.computed, page_tokens).max(kv.recompute.start / page_tokens);
            assert!(kv.window.first <= first, "{room:?} lost a part");
            assert!(kv.window.end(shape) >= end, "{room:?} lacks a part");
            let most = shape.most_kept((end * page_tokens).saturating_sub(kv.computed).max(1), page_tokens);
            assert!(kv.window.len() <= (most + 1) * parts, "{room:?} keeps parts that no position sees");
        }
    }
}
